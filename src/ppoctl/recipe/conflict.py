"""What a rule finds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.shape import Path


@dataclass(frozen=True)
class Conflict:
    """What contradicts what. The first key is the one to change."""

    says: str
    keys: tuple[Path, ...]
    hint: str | None = None


Rule = Callable[[Recipe], Iterator[Conflict]]
