"""Host memory of a node whose GPUs do the work: the most that all processes on it need at one time beside their GPUs.

Devices are given to nodes in their order, as Ray packs them; the driver is on the first. Of a GPU's driver and pinned
buffers of its libraries nothing is known here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from ppoctl.plan.memory.driver import update_input_bytes
from ppoctl.plan.memory.items import RANK_BYTES, VLLM_BYTES, PlanInputs
from ppoctl.recipe.parallel import GPUS_PER_NODE, OBJECT_STORE_BYTES, devices, is_one_process, processes


@dataclass(frozen=True)
class NodeBytes:
    """Host bytes of the fullest node."""

    nodes: int
    gpus: int
    """GPUs of the node."""
    moved_out: int
    """Bytes that `cluster.offload` moves out of the node's GPUs."""
    states: int
    """Copies of the states that the node's ranks write behind training."""
    rollouts: int
    """Sequences that each rank reads, with the grids of an update."""
    driver: int
    """Samples of a step, then its records; on the driver's node only."""
    sending: int
    """Weights on their way to engines, where they go through host memory."""
    published: int
    """Weights that a rank of this node keeps for engines that die."""
    object_store: int
    """The object store of a Ray of the run's own; a running one has as much as it was started with."""
    libraries: int

    @property
    def total(self) -> int:
        parts = self.moved_out + self.states + self.rollouts + self.driver + self.sending + self.published
        return parts + self.object_store + self.libraries


def fullest_node(inputs: PlanInputs) -> NodeBytes:
    """Host bytes of the fullest of all nodes of `GPUS_PER_NODE` that the recipe's devices take."""
    room = devices(inputs.recipe)
    nodes = ceil(room / GPUS_PER_NODE)
    starts = range(0, room, GPUS_PER_NODE)
    found = [_node(inputs, nodes, range(start, min(start + GPUS_PER_NODE, room))) for start in starts]
    return max(found, key=lambda node: node.total)


def _node(inputs: PlanInputs, nodes: int, gpus: range) -> NodeBytes:
    recipe = inputs.recipe
    tenants = list(_tenants(inputs, gpus))
    ranks = [(role, rank) for role, rank in tenants if role != "generator"]
    alone = is_one_process(recipe)
    own_ray = not alone and recipe.cluster.ray_address is None
    driver = 0 in gpus
    libraries = len(ranks) * RANK_BYTES + (len(tenants) - len(ranks)) * VLLM_BYTES + driver * RANK_BYTES
    return NodeBytes(
        nodes=nodes,
        gpus=len(gpus),
        moved_out=sum(_moved_out(inputs, *tenant) for tenant in tenants) if recipe.cluster.offload else 0,
        states=sum(_written(inputs, *rank) for rank in ranks) if recipe.checkpoint.asynchronous else 0,
        rollouts=0 if alone else sum(update_input_bytes(inputs.batch, role) for role, _ in ranks),
        driver=inputs.driver.peak if driver else 0,
        sending=inputs.sending.on_host,
        published=inputs.sending.published if driver else 0,
        object_store=OBJECT_STORE_BYTES if own_ray else 0,
        libraries=VLLM_BYTES if alone else libraries,
    )


def _tenants(inputs: PlanInputs, gpus: range) -> Iterator[tuple[str, int]]:
    """The role and rank of every process on these GPUs (`engines.ray.placement`)."""
    before = 0
    for role, size in processes(inputs.recipe).items():
        yield from ((role, rank) for rank in range(size) if before + rank in gpus)
        if inputs.recipe.cluster.placement == "apart":
            before += size


def _moved_out(inputs: PlanInputs, role: str, rank: int) -> int:
    """Bytes that this process has on the host while it is not at work: gradients are dropped."""
    if role == "generator":
        return inputs.generator.weights
    has = inputs.ranks[role][inputs.stage(role, rank)]
    return has.weights + has.main_weights + has.moments + has.reference


def _written(inputs: PlanInputs, role: str, rank: int) -> int:
    """Bytes of a rank's part of a saved state. The first ranks with a copy of the model write it, or all ranks where
    a distributed optimizer is not gathered."""
    layout = inputs.trainings[role].layout
    if layout.distributed_optimizer and inputs.recipe.checkpoint.reshardable == "dp":
        return inputs.states[role] // layout.world_size
    is_first = rank % layout.stage_ranks < layout.tensor
    return inputs.states[role] // layout.model_ranks if is_first else 0
