"""The comment at the top of a shipped recipe: the purpose of the recipe, and labelled fields."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ppoctl.recipe.loading.load import load
from ppoctl.recipe.parallel import devices

_PARTS = re.compile(r"^(Teaches|Needs|Costs|Source|Published|Deviations):", re.MULTILINE)
_PAGE = """# Recipes

The recipes that ship with ppoctl. `ppoctl recipes list` lists them, `ppoctl recipes show NAME` prints one with its
requirements, its cost and its deviations from the source, and `ppoctl recipes copy NAME DEST` copies one to edit.
`validate` and `plan` work without the model and the rows of a recipe. A run that does not meet the expectations of
its recipe ends with exit 5; `make contracts` runs the recipes with published values. `make docs` generates this page.

"""


@dataclass(frozen=True)
class RecipeHeader:
    """The header of a recipe."""

    purpose: str
    """First line of the header."""
    parts: Mapping[str, str]
    """Text of each field on one line: Teaches, Needs, Costs, Source; optionally Published and Deviations."""


def header_of(text: str) -> RecipeHeader:
    """Return the header of a recipe's text: the comment lines at its top."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    purpose, *rest = _PARTS.split("\n".join(lines))
    parts = {label: " ".join(field.split()) for label, field in zip(rest[::2], rest[1::2], strict=True)}
    return RecipeHeader(" ".join(purpose.split()), parts)


def page(files: Mapping[str, Path]) -> str:
    """Return the page docs/recipes.md for `files`, the recipe files by name."""
    rows = [("recipe", "purpose, and what it demonstrates", "GPUs", "source", "published", "expects"), ("---",) * 6]
    for name, file in files.items():
        head, recipe = header_of(file.read_text("utf-8")), load([file], (), {"PPOCTL_DATA": "/data"}).recipe
        on_cpu = recipe.model.dtype == "float32" and devices(recipe) == 1
        expects = [f"`{metric}` {_bounds(bound.model_dump())}" for metric, bound in recipe.expect.items()]
        without = f"; requires {', '.join(recipe.requires)}" if recipe.requires else ""
        rows.append(
            (
                f"`{name}`",
                f"{head.purpose}: {head.parts['Teaches']}{without}",
                "none" if on_cpu else str(devices(recipe)),
                head.parts["Source"],
                head.parts.get("Published", ""),
                "; ".join(expects),
            )
        )
    return _PAGE + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _bounds(expectation: Mapping[str, object]) -> str:
    words = {"min": "at least", "max": "at most", "rise_min": "rises by at least", "at_step": "at step"}
    return " ".join(f"{words[key]} {expectation[key]}" for key in words if expectation[key] is not None)
