"""Host memory of a node whose GPUs do the work: what all processes on it need beside their GPUs, at most at one time.

Devices are given to nodes in their order, as Ray packs them; the driver is on the first. Of a GPU's driver and pinned
buffers of its libraries nothing is known here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from ppoctl.recipe.memory.driver import update_input_bytes
from ppoctl.recipe.memory.items import OBJECT_STORE_BYTES, RANK_BYTES, VLLM_BYTES, Known
from ppoctl.recipe.parallel import GPUS_PER_NODE, devices, is_one_process, processes


@dataclass(frozen=True)
class NodeBytes:
    """The fullest node."""

    nodes: int
    gpus: int
    """Of this node."""
    moved_out: int
    """What `cluster.offload` moves out of its GPUs."""
    states: int
    """Copies of what its ranks write behind training."""
    rollouts: int
    """In each rank, with the grids of an update."""
    driver: int
    """Samples of a step, then its records."""
    sending: int
    """Weights on their way to engines, where they go through host memory."""
    object_store: int
    """Of a Ray of the run's own; a running one has as much as it was started with."""
    libraries: int

    @property
    def total(self) -> int:
        parts = self.moved_out + self.states + self.rollouts + self.driver + self.sending
        return parts + self.object_store + self.libraries


def fullest_node(known: Known) -> NodeBytes:
    """Of all nodes of `GPUS_PER_NODE` that the recipe's devices take."""
    room = devices(known.recipe)
    nodes = ceil(room / GPUS_PER_NODE)
    starts = range(0, room, GPUS_PER_NODE)
    found = [_node(known, nodes, range(start, min(start + GPUS_PER_NODE, room))) for start in starts]
    return max(found, key=lambda node: node.total)


def _node(known: Known, nodes: int, gpus: range) -> NodeBytes:
    recipe = known.recipe
    tenants = list(_tenants(known, gpus))
    ranks = [(role, rank) for role, rank in tenants if role != "generator"]
    alone = is_one_process(recipe)
    own_ray = not alone and recipe.cluster.ray_address is None
    driver = 0 in gpus
    libraries = len(ranks) * RANK_BYTES + (len(tenants) - len(ranks)) * VLLM_BYTES + driver * RANK_BYTES
    return NodeBytes(
        nodes=nodes,
        gpus=len(gpus),
        moved_out=sum(_moved_out(known, *tenant) for tenant in tenants) if recipe.cluster.offload else 0,
        states=sum(_written(known, *rank) for rank in ranks) if recipe.checkpoint.asynchronous else 0,
        rollouts=0 if alone else sum(update_input_bytes(known.batch, role) for role, _ in ranks),
        driver=known.driver.peak if driver else 0,
        sending=known.sending.on_host,
        object_store=OBJECT_STORE_BYTES if own_ray else 0,
        libraries=VLLM_BYTES if alone else libraries,
    )


def _tenants(known: Known, gpus: range) -> Iterator[tuple[str, int]]:
    """Role and rank of every process on these GPUs (`engines.ray.room`)."""
    before = 0
    for role, size in processes(known.recipe).items():
        yield from ((role, rank) for rank in range(size) if before + rank in gpus)
        if known.recipe.cluster.placement == "apart":
            before += size


def _moved_out(known: Known, role: str, rank: int) -> int:
    """What this process has on the host when it is not at work: gradients are dropped."""
    if role == "generator":
        return known.generator.weights
    has = known.ranks[role][known.stage(role, rank)]
    return has.weights + has.main_weights + has.moments + has.reference


def _written(known: Known, role: str, rank: int) -> int:
    """A rank's part of a saved state: written by the first ranks with a copy of the model, or where a distributed
    optimizer is not gathered for it, by all."""
    layout = known.trainings[role].layout
    if layout.distributed_optimizer and known.recipe.checkpoint.reshardable == "dp":
        return known.states[role] // layout.world_size
    is_first = rank % layout.stage_ranks < layout.tensor
    return known.states[role] // layout.model_ranks if is_first else 0
