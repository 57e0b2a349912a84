"""The comment that a shipped recipe begins with: what it is for, and parts that begin with a word and a colon."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ppoctl.loading.load import load
from ppoctl.recipe.parallel import devices

_PARTS = re.compile(r"^(Teaches|Needs|Costs|Source|Published|Deviations):", re.MULTILINE)
_PAGE = """# Recipes

What ships: `ppoctl recipes list` names them, `ppoctl recipes show NAME` prints one with what it needs, what it costs
and where it deviates from its source, `ppoctl recipes copy NAME DEST` copies one to edit. `validate` and `plan`
answer for each where neither its model nor its rows are. A recipe that expects a figure ends with exit 5 without it;
`make contracts` runs those whose figure is published. `make docs` makes this page.

"""


@dataclass(frozen=True)
class Head:
    """What a recipe says of itself."""

    purpose: str
    """Its first line."""
    parts: Mapping[str, str]
    """Text by word, each on one line: Teaches, Needs, Costs, Source; Published and Deviations where there are any."""


def head_of(text: str) -> Head:
    """The head of a recipe's text: its comment lines before anything else."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    before, *rest = _PARTS.split("\n".join(lines))
    parts = {word: " ".join(said.split()) for word, said in zip(rest[::2], rest[1::2], strict=True)}
    return Head(" ".join(before.split()), parts)


def page(files: Mapping[str, Path]) -> str:
    """The page docs/recipes.md of the recipes by name."""
    rows = [("recipe", "what it is, and teaches", "GPUs", "source", "published", "expects"), ("---",) * 6]
    for name, file in files.items():
        head, recipe = head_of(file.read_text("utf-8")), load([file], (), {"PPOCTL_DATA": "/data"}).recipe
        on_cpu = recipe.model.dtype == "float32"
        expects = [f"`{metric}` {_bounds(wanted.model_dump())}" for metric, wanted in recipe.expect.items()]
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


def _bounds(wanted: Mapping[str, object]) -> str:
    words = {"min": "at least", "max": "at most", "rise_min": "risen by", "at_step": "at step"}
    return " ".join(f"{words[key]} {wanted[key]}" for key in words if wanted[key] is not None)
