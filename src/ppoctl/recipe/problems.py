"""One thing wrong with a recipe, and all of them as one error."""

from collections.abc import Sequence
from dataclasses import dataclass

from ppoctl.errors import RecipeError


@dataclass(frozen=True)
class Problem:
    """`where` it was set (file:line, environment, --set), what is wrong, and one command or change that mends it."""

    where: str
    says: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.where}: {self.says}" if self.where else self.says


def as_error(problems: Sequence[Problem]) -> RecipeError:
    """All problems as one error, one line each; the hint is the first one's."""
    hint = next((problem.hint for problem in problems if problem.hint), None)
    return RecipeError("\n".join(str(problem) for problem in problems), hint=hint)
