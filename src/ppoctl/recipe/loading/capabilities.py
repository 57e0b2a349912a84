"""Capabilities that a recipe may require and that ppoctl does not have yet.

Such a recipe is validated and planned like any other. Training starts only after the user accepts, with `--without`,
that the run lacks the capability.
"""

import re
from collections.abc import Iterator

from ppoctl.core.errors import RecipeError
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath
from ppoctl.recipe.schema import Recipe

NOT_YET = {
    "async": "asynchronous training with a queue of samples; `rollout.ahead` generates at most two steps ahead",
    "critic-free": "further algorithms without a critic (GPG, optimal token baselines)",
    "sft-start": "supervised fine-tuning (SFT) of the model that a run starts from: `model.path` names its result",
}
"""Capability that a recipe may require -> its description."""

AVAILABLE = ("dynamic-sampling", "freezing", "lora", "pf-ppo", "tools")
"""Capabilities that an earlier version did not have: the recipe of a run may still require them."""

_KEYS = {
    "async": ("async", "async_ppo", "max_staleness"),
    "critic-free": ("critic_free",),
}
"""Capability -> names that users try as a key for it."""

_ESTIMATORS = re.compile(r"gpg|(tir_)?optimal_token_baseline")
"""Advantage estimators without a critic that other systems have and ppoctl lacks; users try them as
`ppo.advantages.kind`."""


def planned_key(name: str) -> str | None:
    """Return the description of the planned capability to which an unknown key belongs; None: it does not belong to
    any."""
    return next((NOT_YET[capability] for capability, names in _KEYS.items() if name.lower() in names), None)


def planned_value(path: KeyPath, value: object) -> str | None:
    """Return the description of the planned capability to which an invalid value belongs; None: it does not belong to
    any."""
    is_estimator = path == ("ppo", "advantages", "kind") and isinstance(value, str)
    return NOT_YET["critic-free"] if is_estimator and _ESTIMATORS.fullmatch(str(value).lower()) else None


def wanting(recipe: Recipe) -> tuple[str, ...]:
    """Return the capabilities that the recipe requires, ppoctl lacks, and `without` does not list."""
    return tuple(name for name in recipe.requires if name in NOT_YET and name not in recipe.without)


def require_capable(recipe: Recipe) -> None:
    """Raise RecipeError if the recipe requires a missing capability that `without` does not list."""
    if names := wanting(recipe):
        raise RecipeError(
            "\n".join(says(name) for name in names),
            hint=f"{' '.join(f'--without {name}' for name in names)}  # accepts that the run deviates",
        )


def says(name: str) -> str:
    """Return a sentence about one required capability that is missing."""
    return f"`requires` names `{name}`, which ppoctl cannot do yet: {NOT_YET[name]}"


def check_requires(recipe: Recipe) -> Iterator[Finding]:
    for name in recipe.requires:
        if name not in (*NOT_YET, *AVAILABLE):
            yield conflict(f"unknown capability `{name}`; known are {', '.join(NOT_YET)}", (("requires",),))


def check_without(recipe: Recipe) -> Iterator[Finding]:
    for name in recipe.without:
        if name not in recipe.requires:
            yield conflict(f"the recipe does not require `{name}`", (("without",), ("requires",)))
