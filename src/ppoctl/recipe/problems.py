"""What a rule finds, one thing wrong with a recipe or with what it names, and all of them as one error."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ppoctl.errors import MissingAssetError, PpoctlError, RecipeError
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.shape import Path


@dataclass(frozen=True)
class Conflict:
    """What contradicts what. The first key is the one to change."""

    says: str
    keys: tuple[Path, ...]
    hint: str | None = None


Rule = Callable[[Recipe], Iterator[Conflict]]
"""A law of recipes: it finds all that breaks it."""


@dataclass(frozen=True)
class Problem:
    """`where` it was set (file:line, environment, --set), what is wrong, and one command or change that mends it."""

    where: str
    says: str
    hint: str | None = None
    kind: type[PpoctlError] = RecipeError
    """Whose exit code it has."""

    def __str__(self) -> str:
        return f"{self.where}: {self.says}" if self.where else self.says

    @property
    def is_missing(self) -> bool:
        """Whether something is only not here; it may be right where the run will be."""
        return issubclass(self.kind, MissingAssetError)


def as_error(problems: Sequence[Problem]) -> PpoctlError:
    """All problems as one error of the first one's kind, one line each; the hint is the first there is."""
    hint = next((problem.hint for problem in problems if problem.hint), None)
    return problems[0].kind("\n".join(str(problem) for problem in problems), hint=hint)
