"""The process group and Megatron-Core's parallel state. Set up once per process; does not choose layouts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not re-exported to type checkers

from ppoctl.engines.megatron.cpu_adaptation import megatron_device


def ensure_process_group() -> ProcessGroupCollection:
    """Megatron-Core's process groups; makes them on the first call.

    A process that already belongs to a group (a rank of a larger run) keeps it. A process alone becomes a world of
    one, with its rendezvous in memory and gloo bound to the loopback interface: no name is resolved, nothing
    listens on the network. Must run before vLLM's engine is made in the same process: vLLM destroys the default
    group at its end when it made it itself.
    """
    alone = not torch.distributed.is_initialized()
    with megatron_device(), _gloo_on_loopback() if alone else nullcontext():
        if alone:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel()
            # The tracker that leaves generators alone: nothing in PPO draws random numbers inside the model.
            initialize_rng_tracker(inference_rng_tracker=True)
        return ProcessGroupCollection.use_mpu_process_groups()


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """gloo resolves the host name unless told an interface; a laptop without a network has none."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = before or "lo"
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLOO_SOCKET_IFNAME"]
