"""What a recipe asks of a cluster."""

from dataclasses import dataclass

from ppoctl.recipe.parallel import devices
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class Request:
    """Nodes and GPUs of a job."""

    nodes: int
    gpus_per_node: int | None
    """GPUs of each node; None: none are asked for."""


def request_of(recipe: Recipe) -> Request:
    """What the recipe's layout and `[slurm]` ask for together."""
    table = recipe.slurm
    needed = -(-devices(recipe) // table.gpus_per_node) if table.gpus_per_node else 1
    return Request(table.nodes or needed, table.gpus_per_node)
