"""How a trained role is spread over processes. Layout changes speed and memory, never a result."""

from typing import TYPE_CHECKING, Annotated

from ppoctl.recipe.effects import SPEED
from ppoctl.recipe.table import AtLeastOne, Table

if TYPE_CHECKING:
    from ppoctl.recipe.schema import Recipe


GPUS_PER_NODE = 8
"""What nodes are taken to have, where `plan` has to know."""


class ParallelTable(Table):
    """Megatron-Core's parallel layout of one role. A written table is complete: keys not given are 1 or off."""

    tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split each layer; divides attention heads and key/value heads."""
    pipeline: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split the layers."""
    stages_per_rank: Annotated[int, SPEED, AtLeastOne] = 1
    """Runs of layers on each pipeline rank; more than one (the interleaved schedule) shortens the wait at the ends of
    a minibatch, for more messages."""
    context: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split the tokens of a microbatch, also those of one sequence: what to raise when one is too long."""
    data: Annotated[int, SPEED, AtLeastOne] = 1
    """Copies of the model that share the rows of a minibatch."""
    sequence: Annotated[bool, SPEED] = False
    """Split norms and residuals over the tensor ranks too (sequence parallelism); experts need it where there are
    tensor ranks."""
    expert: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that share the experts of a layer; divides their number. Made of the data, context and tensor ranks: no
    more processes."""
    expert_tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split each expert, besides; also made of those ranks. Experts are small: 1, whole,
    suits nearly all (Megatron-Core's own default is `tensor`)."""
    first_stage_layers: Annotated[int | None, SPEED, AtLeastOne] = None
    """Layers of the first pipeline rank, which also holds the embedding; absent: as many as the others."""
    last_stage_layers: Annotated[int | None, SPEED, AtLeastOne] = None
    """Layers of the last pipeline rank, which also holds the output layer; absent: as many as the others."""
    distributed_optimizer: Annotated[bool, SPEED] = False
    """Split main weights and moments over the data and context ranks."""

    @property
    def expert_ranks(self) -> int:
        """Ranks of a pipeline stage that hold one copy of all its experts."""
        return self.expert * self.expert_tensor

    @property
    def experts_span_data(self) -> bool:
        """Whether data ranks exchange tokens: then each must run as many microbatches as the others."""
        return self.tensor * self.context % self.expert_ranks != 0

    @property
    def virtual_pipeline(self) -> int | None:
        """Megatron-Core's name for more than one run of layers on a rank; None: one."""
        return self.stages_per_rank if self.stages_per_rank > 1 else None

    @property
    def model_ranks(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """Processes of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        """Processes of the role."""
        return self.stage_ranks * self.pipeline

    def describe(self) -> str:
        """What is not 1 or off, in words."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "stages per rank": self.stages_per_rank}
        sizes |= {
            "context": self.context,
            "data": self.data,
            "expert": self.expert,
            "expert tensor": self.expert_tensor,
        }
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        words += ["sequence"] * self.sequence + ["distributed optimizer"] * self.distributed_optimizer
        return ", ".join(words) or "one process"


def layouts(recipe: "Recipe") -> dict[str, ParallelTable]:
    """Of each role. The critic follows the actor unless its table is written."""
    actor = recipe.actor.parallel or ParallelTable()
    return {"actor": actor, "critic": recipe.critic.parallel or actor}


def processes(recipe: "Recipe") -> dict[str, int]:
    """Of each role."""
    sizes = {role: layout.world_size for role, layout in layouts(recipe).items()}
    return {**sizes, "generator": recipe.generator.engines * recipe.generator.tensor}


def devices(recipe: "Recipe") -> int:
    """GPUs, or places on CPUs, that the processes take (`engines.ray.room`)."""
    sizes = processes(recipe).values()
    return max(sizes) if recipe.cluster.placement == "colocated" else sum(sizes)


def is_one_process(recipe: "Recipe") -> bool:
    """Whether all roles live in the process of the command, without Ray."""
    return recipe.cluster.placement == "colocated" and set(processes(recipe).values()) == {1}
