"""The findings of rules: a conflict of keys, a problem with its place, and all problems as one error."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

from ppoctl.errors import MissingAssetError, PpoctlError, RecipeError
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.schema import Recipe, TrainedTable


@dataclass(frozen=True)
class Conflict:
    """A contradiction between keys. The first key is the one to change."""

    message: str
    keys: tuple[KeyPath, ...]
    hint: str | None = None
    hides_values: bool = False
    """Whether the values of the keys are left out of what is said."""


Rule = Callable[[Recipe], Iterator[Conflict]]
"""A rule yields every conflict of a recipe with the law it is named after."""


def rules_of(module: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules among the names of a module, in its order: its public functions that yield conflicts."""
    return tuple(
        each
        for name, each in module.items()
        if isfunction(each) and not name.startswith("_") and each.__annotations__["return"] == Iterator[Conflict]
    )


def trained_roles(recipe: Recipe) -> Iterator[tuple[str, TrainedTable]]:
    """The trained roles whose tables are usable, with their tables."""
    for role in ("actor", "critic"):
        table = getattr(recipe, role, None)
        if table is not None:
            yield role, table


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a recipe: where it was set (file:line, environment, --set), what is wrong, and one command
    or change that mends it."""

    where: str
    message: str
    hint: str | None = None
    kind: type[PpoctlError] = RecipeError
    """The error class that this problem raises, which decides the exit code."""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    @property
    def is_missing(self) -> bool:
        """Whether something is only missing on this machine; it may be there where the run will be."""
        return issubclass(self.kind, MissingAssetError)


def as_error(problems: Sequence[Problem]) -> PpoctlError:
    """All problems as one error of the first one's kind, one line each; the hint is the first there is."""
    hint = next((problem.hint for problem in problems if problem.hint), None)
    return problems[0].kind("\n".join(str(problem) for problem in problems), hint=hint)
