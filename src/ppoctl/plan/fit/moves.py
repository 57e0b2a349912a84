"""The table of settings that the search changes: their keys, the work that they add to a step, and what they change
in the results."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ppoctl.model.shape import ModelShape
from ppoctl.plan.fit.choices import TrainedPartTable
from ppoctl.recipe.schema import AdaptersTable, LoraTable, TopLayersTable

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Targets of adapters in a model with experts, which have none."""


@dataclass(frozen=True)
class Move:
    """One kind of change."""

    name: str
    keys: tuple[str, ...]
    """Glob patterns of the dotted keys that it changes."""
    work: str
    """Field of `StepSeconds` that contains its cost."""
    costs: str
    """Its cost in words."""
    changes_results: bool = False


MOVES = (
    Move("token budgets", ("*.batching.*",), "microbatches", "more reads of the weights in GPU memory"),
    Move("recomputation", ("*.recompute",), "recomputation", "forward passes again: at most one third of an update"),
    Move("offload", ("cluster.offload",), "offload", "weights and optimizer move to the host and back in each step"),
    Move(
        "KV cache", ("generator.gpu_memory_frac",), "decoding", "fewer sequences at once, so more waves of decoding"
    ),
    Move("no CUDA graphs", ("generator.compile",), "decoding", "the host starts each kernel of each token"),
    Move("engines", ("generator.engines", "generator.tensor"), "decoding", "all-reduces in each layer and token"),
    Move(
        "layout",
        ("*.parallel", "cluster.placement", "cluster.weights", "checkpoint.reshardable"),
        "communication",
        "communication between tensor, context and data ranks; idle time of pipeline ranks",
    ),
    Move(
        "optimizer on the CPU",
        ("*.optimizer.on",),
        "optimizer",
        "gradients and weights move over the bus, and the host computes the optimizer step",
    ),
    Move("part that trains", ("*.train",), "updates", "nothing: updates are faster", changes_results=True),
)


def moves_of(keys: Iterable[str]) -> list[Move]:
    """Return the moves that these dotted keys belong to, in the order of the table."""
    changed = list(keys)
    return [move for move in MOVES if any(fnmatchcase(key, pattern) for key in changed for pattern in move.keys)]


TOP_LAYERS = (1 / 2, 1 / 4, 1 / 8)
"""Fractions of the layers that are tried as the last layers that train."""


def adapters_for(shape: ModelShape) -> AdaptersTable:
    """Return the adapters that are tried."""
    is_dense = shape.experts is None
    return AdaptersTable(lora=LoraTable(rank=8) if is_dense else LoraTable(rank=8, targets=ATTENTION))


def top_layers_for(shape: ModelShape, frac: float) -> TopLayersTable:
    """Return the last layers that are tried: this fraction of all, at least one."""
    return TopLayersTable(top_layers=max(1, int(shape.num_layers * frac)))


def change_of_results(role: str, part: TrainedPartTable) -> str:
    """Return what a role trains in place of all layers."""
    if isinstance(part, AdaptersTable):
        return (
            f"the {role} trains adapters of rank {part.lora.rank} (their learning rate is usually ten times as high)"
        )
    assert part is not None
    return f"only the last {part.top_layers} layers of the {role} train"
