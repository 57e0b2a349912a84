"""Results of the checks of a recipe: a conflict between keys, a problem with its origin, and one error for all
problems."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

from ppoctl.errors import MissingAssetError, PpoctlError, RecipeError
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class Conflict:
    """A contradiction between keys. The user should change the first key."""

    message: str
    keys: tuple[KeyPath, ...]
    hint: str | None = None
    hides_values: bool = False
    """Whether the message omits the values of the keys."""


Rule = Callable[[Recipe], Iterator[Conflict]]
"""A function that yields each conflict that it finds between keys of a recipe."""


def rules_of(module: Mapping[str, Any]) -> tuple[Rule, ...]:
    """Return the rules of a module, in the order of their definition: the public functions whose return type is
    `Iterator[Conflict]`."""
    functions = [member for name, member in module.items() if isfunction(member) and not name.startswith("_")]
    return tuple(member for member in functions if member.__annotations__.get("return") == Iterator[Conflict])


@dataclass(frozen=True)
class Problem:
    """One error in a recipe, and one command or change that fixes it."""

    where: str
    """Origin of the wrong value: `file:line`, `environment NAME` or `--set`; empty: the recipe as a whole."""
    message: str
    hint: str | None = None
    kind: type[PpoctlError] = RecipeError
    """The error class that this problem raises, which decides the exit code."""

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    @property
    def is_missing(self) -> bool:
        """Whether the problem is only that something is missing on this machine; it may exist on the machine of the
        run."""
        return issubclass(self.kind, MissingAssetError)


def as_error(problems: Sequence[Problem]) -> PpoctlError:
    """Return one error with a line per problem, the class of the first problem, and the first hint."""
    hint = next((problem.hint for problem in problems if problem.hint), None)
    return problems[0].kind("\n".join(str(problem) for problem in problems), hint=hint)
