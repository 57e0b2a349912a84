"""Recipes that fit on a number of GPUs, as settings that the command line and recipe files accept."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ppoctl.core.errors import MissingAssetError
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.plan.fit.choices import changes
from ppoctl.plan.fit.proposed import Proposals, propose
from ppoctl.plan.memory.estimate import estimate_here
from ppoctl.plan.shared_sizes import shapes_of
from ppoctl.recipe.loading.explain import as_toml
from ppoctl.recipe.loading.load import Loaded, examine
from ppoctl.recipe.loading.rules.all_rules import violations
from ppoctl.recipe.schema import Recipe


def settings_of(changed: Mapping[KeyPath, Any]) -> list[str]:
    """Return the values of `--set` that make these changes."""
    return [f"{dotted(key)}={value if isinstance(value, str) else as_toml(value)}" for key, value in changed.items()]


def toml_of(changed: Mapping[KeyPath, Any]) -> list[str]:
    """Return the lines of a recipe file that makes these changes."""
    return [f"{dotted(key)} = {as_toml(value)}" for key, value in changed.items()]


def proposals_for(
    loaded: Loaded, sets: Sequence[str], gpu_gib: float, gpus: int | None, notify: Callable[[str], None]
) -> Proposals:
    """Return the fastest recipes that fit on GPUs of `gpu_gib` GiB, as changes of a recipe that was loaded with
    `sets`. Each was loaded again with its changes. `notify` receives what is searched.

    Raises MissingAssetError if a model is not on this machine.
    """
    recipe, shapes = loaded.recipe, shapes_of(loaded.recipe)
    if shapes is None or estimate_here(recipe, gpu_gib) is None:
        raise MissingAssetError(
            f"`model.path` = `{recipe.model.path}`: the memory is unknown without the config.json of each model",
            hint="name a folder with the model's config.json: --set model.path=FOLDER",
        )

    def is_accepted(changed: Recipe) -> bool:
        words = [*sets, *settings_of(changes(recipe, changed))]
        again, _ = examine(loaded.files, words, judges=(violations,))
        return again is not None and again.recipe == changed

    return propose(recipe, shapes, gpu_gib, gpus, is_accepted, notify)
