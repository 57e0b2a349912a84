"""The environment variables vLLM, torch and Hugging Face read when they are first imported."""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported

from ppoctl.engines.loopback import open_store
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.errors import EnvironmentProblemError
from ppoctl.machine.device import VISIBLE, hides_all, on_gpu
from ppoctl.recipe.schema import GeneratorTable
from ppoctl.weights.sharing import this_machine

MEET_S = 600.0
"""For tensor ranks to come; whoever asks them gives up before."""
CACHES = Path(tempfile.gettempdir())
"""Folder of this node in which a user's caches lie. Its names do not begin as those of private folders, which are
removed."""
_CACHE_FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
_kept: list[Any] = []
"""Stores live as long as the process."""


def compiles(table: GeneratorTable) -> bool:
    """Whether an engine compiles the model; where the recipe leaves it open, on a GPU."""
    return on_gpu() if table.compile is None else table.compile


def prepare_environment(settings: VllmSettings) -> None:
    """Set what must be set before vLLM is imported; safe to call again. Touches `os.environ`, and torch.compile's
    switch where that was read already.

    Values a person exported win, except the one this engine is built on: the engine lives in this process.
    """
    # In this process tensors pass by reference, a start takes 2 s instead of 12, and nothing can be orphaned.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # vLLM's default binds threads to cores and keeps one core back, which the trainer in this process needs.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if settings.table.model_runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(settings.table.model_runner == "v2"))
    if Path(settings.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if on_gpu():
        _prepare_for_gpu(settings)
    else:
        # Its latent attention on a CPU has one size of head, DeepSeek-V3's; as plain attention it has all.
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")
        if not compiles(settings.table):
            _disable_torch_compile()


def _prepare_for_gpu(settings: VllmSettings) -> None:
    _keep_caches_on_this_node()
    # Every request has a seed and processed log-probs, which FlashInfer's sampler does not have. It would be imported
    # all the same, and may compile.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if settings.dtype == "float32":
        # Only Triton's attention takes float32, and its products are in TF32 unless told: 3e-4 off, relatively.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    if settings.table.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"


@contextmanager
def store_in_memory() -> Iterator[None]:
    """Context in which an engine of one process starts with its store of process groups in anonymous memory. vLLM
    would put it into a file of the temporary folder, which stays there when the process is killed."""
    from vllm.v1.executor import uniproc_executor as found

    uniproc_executor: Any = found
    theirs = uniproc_executor.get_file_store_init_method
    uniproc_executor.get_file_store_init_method = lambda: f"file:///proc/self/fd/{os.memfd_create('store')}"
    try:
        yield
    finally:
        uniproc_executor.get_file_store_init_method = theirs


def _keep_caches_on_this_node() -> None:
    """Compiled code goes to a private folder of this node, where many engines of many nodes would otherwise write
    into one home. Where somebody else has taken its name, or nothing there can be executed, they stay at home."""
    folder = CACHES / f"ppoctl_cache_{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
        if is_ours and not os.statvfs(folder).f_flag & os.ST_NOEXEC:
            for name, of in _CACHE_FOLDERS.items():
                os.environ.setdefault(name, str(folder / of))


def join_tensor_ranks(rank: int, world_size: int, address: str) -> None:
    """Say, as torchrun would, which tensor rank of an engine this process is, and where (`host:port`) they meet; and
    let it see the GPUs of all that are on its node, in the order of the ranks. Nothing in this process may have asked
    torch for CUDA before: from then on it sees what it saw. Raises EnvironmentProblemError."""
    host, port = address.rsplit(":", 1)
    soon = timedelta(seconds=MEET_S)
    if rank == 0:
        # Where vLLM's own would listen at every address; under this switch torch makes none.
        store = open_store(host, int(port), soon)
    else:
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=soon)
    _kept.append(store)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=port)
    os.environ["LOCAL_RANK"] = str(_see_all_devices(store, rank, world_size))
    if host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _see_all_devices(store: TCPStore, rank: int, world_size: int) -> int:
    """Place of this rank among those of its node. Each rank begins with its own GPU, and vLLM looks for those of the
    other ranks in `CUDA_VISIBLE_DEVICES`, under their places."""
    shown = os.environ.get(VISIBLE, "")
    store.set(f"device of {rank}", f"{this_machine()} {'' if hides_all(shown) else shown}")
    said = [store.get(f"device of {other}").decode().rpartition(" ") for other in range(world_size)]
    here = [other for other, (machine, _, _) in enumerate(said) if machine == this_machine()]
    devices = [said[other][2] for other in here]
    if any(devices):
        _require_one_each(devices)
        os.environ[VISIBLE] = ",".join(devices)
    return here.index(rank)


def _require_one_each(devices: Sequence[str]) -> None:
    if "" in devices or "," in "".join(devices) or len(set(devices)) < len(devices):
        raise EnvironmentProblemError(
            f"tensor ranks of an engine need a GPU each, and see `{'`, `'.join(devices)}` (CUDA_VISIBLE_DEVICES)",
            hint="unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES  # before Ray starts, on all nodes",
        )


def _disable_torch_compile() -> None:
    """On a CPU even an eager engine compiles small helpers with the C++ compiler: 5-15 s, and an error without one.

    Not on a GPU: there the switch would also slow the trainer's fused functions in this process.
    """
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo is not None and os.environ["TORCH_COMPILE_DISABLE"] == "1":
        dynamo.disable = True
