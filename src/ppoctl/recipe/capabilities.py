"""What a recipe needs that ppoctl cannot do yet: it is judged and planned all the same, and trained once somebody
accepts that it is done without."""

from collections.abc import Iterator

from ppoctl.errors import RecipeError
from ppoctl.recipe.problems import Conflict, rules_of
from ppoctl.recipe.schema import Recipe

NOT_YET = {
    "freezing": "layers of the actor that do not train",
    "pf-ppo": "rollouts drawn again by their score before the update (PF-PPO)",
    "tools": "responses of several turns, with tools or an environment",
}
"""Capabilities that a recipe may require, and what each is."""


def wanting(recipe: Recipe) -> tuple[str, ...]:
    """Names of what the recipe requires, and neither is there nor is done without."""
    return tuple(name for name in recipe.requires if name in NOT_YET and name not in recipe.without)


def require_capable(recipe: Recipe) -> None:
    """Raise RecipeError where training would be something else than the recipe says, and nobody has accepted that."""
    if names := wanting(recipe):
        raise RecipeError(
            "\n".join(says(name) for name in names),
            hint=f"{' '.join(f'--without {name}' for name in names)}  # accepts that the run deviates",
        )


def says(name: str) -> str:
    """A sentence on one capability that is required."""
    return f"`requires` names `{name}`, which ppoctl cannot do yet: {NOT_YET[name]}"


def what_is_required_is_known(recipe: Recipe) -> Iterator[Conflict]:
    for name in recipe.requires:
        if name not in NOT_YET:
            yield Conflict(f"nothing is called `{name}`; known are {', '.join(NOT_YET)}", (("requires",),))


def only_what_is_required_is_done_without(recipe: Recipe) -> Iterator[Conflict]:
    for name in recipe.without:
        if name not in recipe.requires:
            yield Conflict(f"the recipe does not require `{name}`", (("without",), ("requires",)))


CAPABILITY_RULES = rules_of(globals())
