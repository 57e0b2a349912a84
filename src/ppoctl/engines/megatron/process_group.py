"""The process group and Megatron-Core's parallel state, initialized once per process."""

from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from math import ceil
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not re-exported

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.core.machine.device import on_gpu
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.cpu_adaptation import megatron_device
from ppoctl.engines.weights.loopback import gloo_on_loopback, is_loopback, open_store

COLLECTIVE_S = 600.0
"""Default timeout of a collective in seconds."""
_met_at = ""
"""Host where this process joined the other processes of its role."""


@dataclass(frozen=True)
class RankInfo:
    """Rank of a process within its role."""

    rank: int
    world_size: int
    address: str
    """`host:port` where rank 0 waits for the others."""


@dataclass(frozen=True)
class GroupTimeouts:
    """Timeouts of ranks that wait for each other."""

    meet_s: float
    """Seconds in which all ranks must start."""
    collective_s: float
    """Timeout of each collective. It must exceed the timeout of the caller of the ranks, because the caller can
    report which rank is late, while a collective only reports that it failed."""


def join(place: RankInfo, patience: GroupTimeouts) -> None:
    """Make this process a rank of its role's process group. Returns when all ranks have joined.

    Raises EnvironmentProblemError if they do not join in time.
    """
    global _met_at
    host, port = place.address.rsplit(":", 1)
    _met_at = host
    meet, collective = timedelta(seconds=patience.meet_s), timedelta(seconds=patience.collective_s)
    try:
        with megatron_device(), gloo_on_loopback() if is_loopback(host) else nullcontext():
            if place.rank == 0:
                store = open_store(host, int(port), meet, world_size=place.world_size)
            else:
                tcp_store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]  # as above
                store = tcp_store(host, int(port), place.world_size, is_master=False, timeout=meet)
            torch.distributed.init_process_group(
                _backend(), store=store, rank=place.rank, world_size=place.world_size, timeout=collective
            )
    except (torch.distributed.DistError, OSError) as error:
        raise EnvironmentProblemError(
            f"the {place.world_size} processes of a role did not connect at {place.address} within "
            f"{patience.meet_s:g} s (`cluster.start_deadline_s`): {error}",
            hint="raise the deadline, or check `ray status`: a node may be down, or its ports closed",
        ) from error


def ensure_process_group(parallel: ParallelTable, collective_s: float = COLLECTIVE_S) -> ProcessGroupCollection:
    """Return Megatron-Core's process groups for this layout. The first call creates the groups.

    A process that already belongs to a default group (see `join`) keeps this group. A single process becomes a world
    of size 1, with the rendezvous in memory and gloo bound to the loopback interface: no name is resolved, and
    nothing listens on the network. If vLLM's engine runs in the same process, call this function before the engine is
    created: if vLLM created the default group, it would destroy the group when the engine ends.
    """
    alone = not torch.distributed.is_initialized()
    with megatron_device(), gloo_on_loopback() if alone or is_loopback(_met_at) else nullcontext():
        if alone:
            torch.distributed.init_process_group(_backend(), store=HashStore(), rank=0, world_size=1)
        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                context_parallel_size=parallel.context,
                expert_model_parallel_size=parallel.expert,
                expert_tensor_parallel_size=parallel.expert_tensor,
                virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
                # States of a distributed optimizer are gathered over gloo, in host memory instead of GPU memory.
                # Roles of a single process share the groups, and the optimizer of another role may be distributed.
                create_gloo_process_groups=alone or parallel.distributed_optimizer,
                # Megatron-Core takes whole minutes. A shorter timeout could end a collective too early.
                distributed_timeout_minutes=ceil(collective_s / 60),
            )
            # Megatron-Core's inference tracker does not change torch's random-number generators. The models use no
            # random numbers.
            random.initialize_rng_tracker(inference_rng_tracker=True)
        return ProcessGroupCollection.use_mpu_process_groups()


def leave() -> None:
    """Undo `ensure_process_group` and `join`."""
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def _backend() -> str:
    return "nccl" if on_gpu() else "gloo"
