"""Under which layouts a saved state can be loaded: what its manifest says, and what a recipe asks for. Light."""

from collections.abc import Mapping
from typing import Any

from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.schema import Recipe

_FREE = ("context", "data", "sequence")
"""Of a layout, what a state that can be loaded with any number of data ranks does not depend on."""


def saved_layout(recipe: Recipe, role: str) -> dict[str, Any]:
    """The role's parallel table, and `reshardable`: `full` or `dp`."""
    table = layouts(recipe)[role]
    kind = recipe.checkpoint.reshardable if table.distributed_optimizer else "full"
    return {**table.model_dump(mode="json"), "reshardable": kind}


def what_differs(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Keys of the layout that keep a state from being loaded; empty: it can be."""
    bound = {"distributed_optimizer"}
    if saved["reshardable"] == "dp":
        bound = set(saved) - {"reshardable", *_FREE}
    return sorted(key for key in bound if saved[key] != asked[key])
