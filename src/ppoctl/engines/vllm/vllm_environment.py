"""Environment variables that vLLM, torch and Hugging Face read when they are first imported."""

import errno
import os
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.core.machine.device import VISIBLE, hides_all, on_gpu
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.engines.weights.loopback import open_store
from ppoctl.engines.weights.sharing import this_machine
from ppoctl.recipe.schema import GeneratorTable

MEET_S = 600.0
"""Seconds that tensor ranks wait for each other. The caller of the ranks has a shorter timeout."""
_CACHE_FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
_LOOK_EVERY_S = 0.2
_kept: list[Any] = []
"""Stores that must exist as long as the process."""


def compiles(table: GeneratorTable) -> bool:
    """Whether an engine compiles the model. If the recipe does not decide, an engine on a GPU does."""
    return on_gpu() if table.compile is None else table.compile


def prepare_environment(settings: VllmSettings) -> None:
    """Set the environment variables that vLLM reads when it is imported. May be called again. Changes `os.environ`,
    and torch's setting for torch.compile if torch has already read the variable.

    Variables that the user exported take precedence. The exception is VLLM_ENABLE_V1_MULTIPROCESSING, because the
    engine must run in this process.
    """
    # Within one process, tensors are passed by reference, startup takes 2 s instead of 12, and no orphan can remain.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # By default vLLM binds threads to cores and reserves a core. A trainer in this process needs that core.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if settings.table.model_runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(settings.table.model_runner == "v2"))
    if Path(settings.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if on_gpu():
        _prepare_for_gpu(settings)
    else:
        # On a CPU, vLLM's latent attention supports only the head size of DeepSeek-V3. Plain attention supports all
        # sizes.
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")
        if not compiles(settings.table):
            _disable_torch_compile()


def _prepare_for_gpu(settings: VllmSettings) -> None:
    _keep_caches_on_this_node()
    # Every request has a seed and processed log-probs. FlashInfer's sampler supports neither, but vLLM would import
    # it anyway, and might compile it.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if settings.dtype == "float32":
        # Only Triton's attention supports float32. By default it multiplies in TF32, with a relative error of 3e-4.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    if settings.table.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


@contextmanager
def alone_on_gpu(uuid: str, limit_s: float = MEET_S) -> Iterator[None]:
    """Context in which no other engine of this user starts on this GPU. A starting vLLM compares free memory before
    and after a trial run, and fails if other processes took or freed memory in between. Raises
    EnvironmentProblemError after `limit_s` seconds."""
    # The kernel frees the name of an abstract socket when its process ends, however it ends. No file is left behind.
    with socket.socket(socket.AF_UNIX) as held:
        until = time.monotonic() + limit_s
        while True:
            try:
                held.bind(f"\0{os.getuid()} {uuid} ppoctl")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            if time.monotonic() >= until:
                raise EnvironmentProblemError(
                    f"another engine has been starting on GPU `{uuid}` for {limit_s:g} s",
                    hint="nvidia-smi  # which processes use the GPU; end one that hangs",
                )
            time.sleep(_LOOK_EVERY_S)
        yield


@contextmanager
def store_in_memory() -> Iterator[None]:
    """Context in which a single-process engine starts with the store of its process group in anonymous memory. By
    default vLLM creates a file in the temporary folder, and this file remains if the process is killed."""
    from vllm.v1.executor import uniproc_executor as found

    uniproc_executor: Any = found
    original = uniproc_executor.get_file_store_init_method
    uniproc_executor.get_file_store_init_method = lambda: f"file:///proc/self/fd/{os.memfd_create('store')}"
    try:
        yield
    finally:
        uniproc_executor.get_file_store_init_method = original


def _keep_caches_on_this_node() -> None:
    """Use a private folder of this node for compiled code: otherwise the engines of many nodes would all write into
    the home directory. The caches stay in the home directory if another user owns the private folder, or if the
    folder's file system forbids execution."""
    # The name does not begin with the prefix of private folders, because private folders are removed.
    folder = Path(tempfile.gettempdir()) / f"ppoctl_cache_{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
        if is_ours and not os.statvfs(folder).f_flag & os.ST_NOEXEC:
            for variable, name in _CACHE_FOLDERS.items():
                os.environ.setdefault(variable, str(folder / name))


def join_tensor_ranks(rank: int, world_size: int, address: str) -> None:
    """Set the variables that torchrun would set: the tensor rank of this process, and where the ranks of the engine
    meet (`address`, `host:port`). Also make the GPUs of all ranks on this node visible, in rank order. This process
    must not have used CUDA before: torch reads the visible GPUs only once. Raises EnvironmentProblemError."""
    host, port = address.rsplit(":", 1)
    timeout = timedelta(seconds=MEET_S)
    if rank == 0:
        # vLLM's own store would listen on every address. With TORCHELASTIC_USE_AGENT_STORE, torch creates no store.
        store = open_store(host, int(port), timeout)
    else:
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    _kept.append(store)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=port)
    os.environ["LOCAL_RANK"] = str(_see_all_devices(store, rank, world_size))
    # By default gloo resolves the host name, which can fail without a network.
    if host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _see_all_devices(store: TCPStore, rank: int, world_size: int) -> int:
    """Return the index of this rank among the ranks of its node. Each rank starts with only its own GPU visible, but
    vLLM uses these indices to find the other ranks' GPUs in `CUDA_VISIBLE_DEVICES`."""
    shown = os.environ.get(VISIBLE, "")
    store.set(f"device of {rank}", f"{this_machine()} {'' if hides_all(shown) else shown}")
    reports = [store.get(f"device of {other}").decode().rpartition(" ") for other in range(world_size)]
    ranks_on_node = [other for other, (machine, _, _) in enumerate(reports) if machine == this_machine()]
    devices = [reports[other][2] for other in ranks_on_node]
    if any(devices):
        _require_one_each(devices)
        os.environ[VISIBLE] = ",".join(devices)
    return ranks_on_node.index(rank)


def _require_one_each(devices: Sequence[str]) -> None:
    if "" in devices or "," in "".join(devices) or len(set(devices)) < len(devices):
        raise EnvironmentProblemError(
            f"tensor ranks of an engine need one GPU each, but see `{'`, `'.join(devices)}` (CUDA_VISIBLE_DEVICES)",
            hint="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES  # before Ray starts, on all nodes",
        )


def _disable_torch_compile() -> None:
    """Disable torch.compile on a CPU: even an eager engine would compile small helpers with the C++ compiler. That
    takes 5-15 s, and is an error if there is no compiler.

    This function is not used on a GPU: it would also slow down fused functions of a trainer in this process.
    """
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo is not None and os.environ["TORCH_COMPILE_DISABLE"] == "1":
        dynamo.disable = True
