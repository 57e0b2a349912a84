"""The environment variables vLLM, torch and Hugging Face read when they are first imported."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from ppoctl.device import on_gpu
from ppoctl.engines.loopback import open_store
from ppoctl.engines.vllm.settings import VllmSettings

MEET_S = 600.0
"""For tensor ranks to come; whoever asks them gives up before."""
_kept: list[Any] = []
"""Stores live as long as the process."""


def prepare_environment(settings: VllmSettings) -> None:
    """Set what must be set before vLLM is imported; safe to call again. Touches `os.environ`, and torch.compile's
    switch where that was read already.

    Values a person exported win, except the one this engine is built on: the engine lives in this process.
    """
    # In this process tensors pass by reference, a start takes 2 s instead of 12, and nothing can be orphaned.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # vLLM's default binds threads to cores and keeps one core back, which the trainer in this process needs.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if not on_gpu():
        # Its latent attention on a CPU has one size of head, DeepSeek-V3's; as plain attention it has all.
        os.environ.setdefault("VLLM_MLA_DISABLE", "1")
    if Path(settings.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not settings.table.compile and not on_gpu():
        _disable_torch_compile()


def join_tensor_ranks(rank: int, world_size: int, address: str) -> None:
    """Say, as torchrun would, which tensor rank of an engine this process is, and where (`host:port`) they meet."""
    host, port = address.rsplit(":", 1)
    if rank == 0:
        # Where vLLM's own would listen at every address; under this switch torch makes none.
        _kept.append(open_store(host, int(port), timedelta(seconds=MEET_S)))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR=host, MASTER_PORT=port)
    # Each process sees its own device only, except on a CPU, which has one.
    os.environ["LOCAL_RANK"] = str(rank) if not on_gpu() else "0"
    if host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _disable_torch_compile() -> None:
    """On a CPU even an eager engine compiles small helpers with the C++ compiler: 5-15 s, and an error without one.

    Not on a GPU: there the switch would also slow the trainer's fused functions in this process.
    """
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo is not None and os.environ["TORCH_COMPILE_DISABLE"] == "1":
        dynamo.disable = True
