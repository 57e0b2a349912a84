"""Environment variables and arguments of vLLM before its import and start: on a CPU, and on a simulated GPU."""

import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.engines.vllm import arguments, engine_factories, vllm_environment, vllm_start
from ppoctl.engines.vllm.arguments import engine_arguments, graph_sizes
from ppoctl.engines.vllm.engine_factories import OpenEngine
from ppoctl.engines.vllm.log import close_log, keep_log, log_location, write_log
from ppoctl.engines.vllm.vllm_environment import alone_on_gpu, compiles, prepare_environment
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.recipe.schema import GeneratorTable

ROOT = Path(__file__).parents[3]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of caches, in an environment without exported settings."""
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    show_a_gpu(monkeypatch)


def show_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (vllm_environment, arguments, vllm_start):
        monkeypatch.setattr(module, "on_gpu", lambda: True)


def settings_of(dtype: Any = "float32", **keys: Any) -> VllmSettings:
    return VllmSettings(str(ROOT / "recipes/quickstart/model"), dtype, 64, (0,), GeneratorTable(**keys))


def test_importing_generator_does_not_import_vllm():
    """The import takes ten seconds, which a command that stops early must not wait for."""
    look = "import sys, ppoctl.engines.vllm; print(sorted({'vllm', 'transformers'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_float32_gpu_engine_disables_tf32_unless_exported(clean, gpu):
    prepare_environment(settings_of("bfloat16"))
    assert "TRITON_F32_DEFAULT" not in os.environ
    prepare_environment(settings_of())
    assert os.environ["TRITON_F32_DEFAULT"] == "ieee"
    os.environ["TRITON_F32_DEFAULT"] = "tf32"
    prepare_environment(settings_of())
    assert os.environ["TRITON_F32_DEFAULT"] == "tf32"


def test_gpu_engine_captures_graphs_and_cpu_engine_is_eager(clean, monkeypatch):
    assert not compiles(GeneratorTable())
    assert engine_arguments(settings_of())["enforce_eager"]
    prepare_environment(settings_of())
    assert os.environ.pop("TORCH_COMPILE_DISABLE") == "1"
    show_a_gpu(monkeypatch)
    assert not engine_arguments(settings_of())["enforce_eager"]
    assert engine_arguments(settings_of(compile=False))["enforce_eager"]
    prepare_environment(settings_of())
    assert "TORCH_COMPILE_DISABLE" not in os.environ


def test_gpu_recipes_do_not_use_eager_mode(gpu, shipped):
    assert len(shipped) > 20
    # On 24 GB, the KV cache of a 4B model needs the memory of the CUDA graphs.
    assert [name for name, recipe in shipped.items() if not compiles(recipe.generator)] == ["qwen3-4b-24g"]
    assert "TORCH_COMPILE_DISABLE" not in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_gpu_tensor_ranks_reduce_over_nccl(gpu):
    from vllm.engine.arg_utils import EngineArgs

    engine_args = EngineArgs(**engine_arguments(settings_of(tensor=2)))
    assert engine_args.disable_custom_all_reduce
    assert (engine_args.tensor_parallel_size, engine_args.distributed_executor_backend) == (2, "external_launcher")
    assert not EngineArgs(**engine_arguments(settings_of())).disable_custom_all_reduce


def test_keys_of_decoding_reach_vllm(clean, gpu):
    prepare_environment(settings_of())
    assert not {"VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"} & set(os.environ)
    assert engine_arguments(settings_of())["async_scheduling"] is None
    prepare_environment(settings_of(batch_invariant=True, model_runner="v1"))
    assert (os.environ["VLLM_BATCH_INVARIANT"], os.environ["VLLM_USE_V2_MODEL_RUNNER"]) == ("1", "0")
    prepare_environment(settings_of(model_runner="v2"))
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert engine_arguments(settings_of(async_scheduling=False))["async_scheduling"] is False


def test_cpu_environment_omits_gpu_only_settings(clean):
    prepare_environment(settings_of(batch_invariant=True))
    assert not {"VLLM_BATCH_INVARIANT", "TRITON_F32_DEFAULT", "VLLM_USE_FLASHINFER_SAMPLER"} & set(os.environ)


def test_caches_are_private_and_on_this_node_unless_exported(clean, gpu):
    os.environ["TRITON_CACHE_DIR"] = "mine"
    prepare_environment(settings_of())
    folder = clean / f"ppoctl_cache_{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    names = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
    values = [os.environ[name] for name in names]
    assert values == [str(folder / "vllm"), "mine", str(folder / "inductor"), str(folder / "flashinfer")]


def test_flashinfer_sampler_is_disabled_unless_exported(clean, gpu):
    """vLLM reads the variable before it imports FlashInfer, which creates folders in the home directory and may
    compile."""
    prepare_environment(settings_of())
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "1"
    prepare_environment(settings_of())
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


@pytest.mark.parametrize("is_link", [True, False])
def test_insecure_cache_folder_is_not_used(clean, gpu, is_link):
    folder = clean / f"ppoctl_cache_{os.getuid()}"
    if is_link:
        (clean / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(clean / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    prepare_environment(settings_of())
    assert "VLLM_CACHE_ROOT" not in os.environ


def _rank(rank: int, devices: str, port: int, queue: Any, all_values: Any) -> None:
    """Run a tensor rank in a separate process; report the devices that torch and the engine would see."""
    seen: list[str | None] = []
    torch.cuda.is_available = lambda: bool(seen.append(os.environ.get("CUDA_VISIBLE_DEVICES")))
    engine_factories.Engine = lambda *_, **__: torch.cuda.is_available()  # type: ignore[assignment,misc]
    os.environ["CUDA_VISIBLE_DEVICES"] = devices
    try:
        opened = OpenEngine(settings_of(tensor=2))
        opened.prepare()  # does not look for GPUs
        opened(rank, 2, f"127.0.0.1:{port}")
    except Exception as error:  # noqa: BLE001 - to be compared
        queue.put((rank, str(error), "", seen))
    else:
        queue.put((rank, os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"], seen))
    all_values.wait(60)  # the ranks share a process group in the first one


def ranks_that_see(*devices: str) -> list[tuple[int, str, str, list[str]]]:
    # A thread of the test process may hold a lock of torch: the ranks are forked from a server without threads.
    fork = multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload([__name__])
    queue: Any = fork.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    last = port, queue, fork.Barrier(len(devices))
    processes = [
        fork.Process(target=_rank, args=(rank, device, *last), daemon=True) for rank, device in enumerate(devices)
    ]
    for process in processes:
        process.start()
    found = sorted(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    return found


def test_tensor_ranks_see_all_gpus_before_cuda_starts():
    assert ranks_that_see("3", "1") == [(0, "3,1", "0", ["3,1"]), (1, "3,1", "1", ["3,1"])]
    assert ranks_that_see("-1", "-1") == [(0, "-1", "0", ["-1"]), (1, "-1", "1", ["-1"])]  # deliberately a CPU
    assert ranks_that_see("", "") == [(0, "", "0", [""]), (1, "", "1", [""])]


def test_tensor_ranks_with_several_gpus_each_raise_error():
    [(_, first, _, _), (_, second, _, _)] = ranks_that_see("0,1", "0,1")
    assert first == second
    assert first.startswith("tensor ranks of an engine need one GPU each, but see `0,1`, `0,1`")


def test_vllm_looks_up_gpus_of_all_ranks_in_visible_devices(monkeypatch):
    """Therefore each rank must see the devices of the others."""
    from vllm.platforms.interface import Platform

    class Cuda(Platform):
        device_control_env_var = "CUDA_VISIBLE_DEVICES"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(IndexError):
        Cuda.logical_device_id_to_visible_device_id(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert [Cuda.logical_device_id_to_visible_device_id(rank) for rank in range(2)] == [0, 1]


class _Core:
    """Stand-in for vLLM's engine in three steps."""

    def __init__(self) -> None:
        self.left = 3
        self.engine_core = self
        self._finalizer = self

    def detach(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def has_unfinished_requests(self) -> bool:
        return self.left > 0

    def get_num_unfinished_requests(self) -> int:
        return 1

    def step(self) -> list[Any]:
        self.left -= 1
        return []


@pytest.fixture
def vllm_logger() -> Iterator[logging.Logger]:
    """Configure vLLM's logger as vLLM does, and restore it."""
    logger = logging.getLogger("vllm")
    before = list(logger.handlers), logger.level, logger.propagate
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.level, logger.propagate = before


def test_vllm_log_goes_to_file_per_engine_and_not_to_screen(clean, vllm_logger, capfd):
    screen = logging.StreamHandler()
    vllm_logger.handlers = [screen]
    settings = replace(settings_of(), logs=clean)
    prepare_environment(settings)  # as left by an earlier engine
    write_log(settings, "engine-3")
    prepare_environment(settings)
    logging.getLogger("vllm.v1.engine").info("using FLASH_ATTN")
    log = (clean / "vllm-engine-3.log").read_text(encoding="utf-8")
    assert log.endswith(" INFO vllm.v1.engine: using FLASH_ATTN\n")
    assert os.environ["VLLM_CONFIGURE_LOGGING"] == "0"
    assert "FLASH_ATTN" not in "".join(capfd.readouterr())
    assert log_location(settings).endswith("/vllm-*.log")


@pytest.mark.parametrize(
    "exported",
    [{"VLLM_LOGGING_LEVEL": "DEBUG"}, {"VLLM_LOGGING_LEVEL": "ERROR"}, {"VLLM_LOGGING_CONFIG_PATH": "mine.json"}],
)
def test_exported_vllm_logging_settings_are_kept(clean, vllm_logger, exported):
    os.environ.update(exported)
    before = list(vllm_logger.handlers), vllm_logger.level, vllm_logger.propagate
    write_log(replace(settings_of(), logs=clean), "engine-0")
    prepare_environment(settings_of())
    close_log()
    assert (vllm_logger.handlers, vllm_logger.level, vllm_logger.propagate) == before
    assert "VLLM_CONFIGURE_LOGGING" not in os.environ
    assert exported.items() <= os.environ.items()


def test_vllm_without_run_directory_prints_errors_only(clean, vllm_logger, capfd):
    for _ in range(2):  # an engine, and another one after it
        write_log(settings_of(), "engine-0")
        prepare_environment(settings_of())
        logging.getLogger("vllm.v1.engine").warning("a fallback")
        logging.getLogger("vllm.v1.engine").error("no room")
    assert capfd.readouterr().err.splitlines() == ["no room"] * 2


def test_early_vllm_log_lines_are_written_to_file(clean, vllm_logger, capfd):
    keep_log()
    prepare_environment(settings_of())
    logging.getLogger("vllm.v1.engine").info("using FLASH_ATTN")
    logging.getLogger("vllm.v1.engine").error("no room")
    assert capfd.readouterr().err == ""
    write_log(replace(settings_of(), logs=clean), "engine-0")
    logging.getLogger("vllm.v1.engine").info("at work")
    log = (clean / "vllm-engine-0.log").read_text(encoding="utf-8").splitlines()
    assert [line.rpartition(": ")[2] for line in log] == ["using FLASH_ATTN", "no room", "at work"]
    assert capfd.readouterr().err == ""


def test_early_vllm_errors_are_printed_without_log_folder(clean, vllm_logger, capfd):
    keep_log()
    logging.getLogger("vllm.v1.engine").info("using FLASH_ATTN")
    logging.getLogger("vllm.v1.engine").error("no room")
    write_log(settings_of(), "engine-0")
    assert capfd.readouterr().err == "no room\n"


def test_engine_opened_on_folder_skips_first_restart(monkeypatch, tmp_path):
    """If the folder is gone by then, it starts on the model."""
    started: list[str] = []
    formats: list[str] = []

    def started_on(settings: VllmSettings, *, load_format: str) -> _Core:
        started.append(settings.model)
        formats.append(load_format)
        return _Core()

    monkeypatch.setattr(vllm_start, "started", started_on)
    opened = OpenEngine(settings_of())
    opened.folder = str(tmp_path)
    engine = opened(0, 1, "")
    engine.restart(str(tmp_path))
    assert started == [str(tmp_path)]
    engine.restart(str(tmp_path))  # it has slept since
    assert started == [str(tmp_path)] * 2
    opened.folder = str(tmp_path / "gone")
    opened(0, 1, "")
    assert started[2:] == [settings_of().model]
    # A folder is read, with a checksum of each tensor. The model's own weights are not read, because a transfer
    # replaces them.
    assert formats == ["ppoctl_witnessed", "ppoctl_witnessed", "dummy"]


def test_environment_is_prepared_before_vllm_import(monkeypatch, tmp_path):
    """vLLM's loader must not be imported earlier."""
    order: list[str] = []
    monkeypatch.setattr(vllm_start, "prepare_environment", lambda settings: order.append(settings.model))
    monkeypatch.setattr(vllm_start, "third_party_quiet", lambda: nullcontext(order.append("import")))
    monkeypatch.setattr(vllm_start, "started", lambda *_, **__: _Core())
    opened = OpenEngine(settings_of())
    opened.folder = str(tmp_path)
    opened(0, 1, "")
    assert order == [str(tmp_path), "import"]


def test_engines_of_one_gpu_start_one_after_the_other():
    """The name is free again as soon as a process ends, however it ends."""
    mine, other = (f"GPU-{os.getpid()}-{name}" for name in ("mine", "other"))
    holder = "import sys, time; from ppoctl.engines.vllm.vllm_environment import alone_on_gpu\n"
    holder += f"with alone_on_gpu('{mine}'): print('holds', flush=True); time.sleep(600)"
    first = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "holds\n"
        with alone_on_gpu(other):
            pass
        with (
            pytest.raises(EnvironmentProblemError, match=rf"has been starting on GPU `{mine}` for 0\.3 s"),
            alone_on_gpu(mine, limit_s=0.3),
        ):
            pass
    finally:
        first.kill()
        first.communicate()
    with alone_on_gpu(mine, limit_s=60.0):
        pass


def test_engine_on_a_gpu_has_its_part_of_the_memory(monkeypatch):
    from vllm.engine.arg_utils import EngineArgs

    settings = settings_of(engines_per_gpu=3, gpu_memory_frac=0.6, max_concurrent_seqs=100, kv_cache_mib=99)
    assert engine_arguments(settings)["kv_cache_memory_bytes"] == 33 * 2**20
    show_a_gpu(monkeypatch)
    found = engine_arguments(settings)
    assert found["gpu_memory_utilization"] == pytest.approx(0.2)
    assert found["max_num_seqs"] == 34
    assert found["cudagraph_capture_sizes"] == [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 68]
    eager = replace(settings, table=settings.table.model_copy(update={"compile": False}))
    assert engine_arguments(eager)["cudagraph_capture_sizes"] is None
    assert {*found} <= {field.name for field in fields(EngineArgs)}


def test_graphs_are_at_most_half_larger_than_their_batch():
    sizes = graph_sizes(1000)
    assert (len(sizes), sizes[-1]) == (17, 512)
    assert all(larger <= 1.5 * smaller + 1 for smaller, larger in pairwise(sizes))
    assert graph_sizes(1) == [1, 2]
    assert graph_sizes(5) == [1, 2, 4, 6, 8, 10]
