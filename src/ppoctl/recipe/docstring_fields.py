"""Labelled lines in docstrings of the recipe: formula, source, systems with the same default, related metrics, names
in other systems.

docs/algorithms.md and `ppoctl recipes keys` print these fields."""

import re
from dataclasses import dataclass
from inspect import cleandoc

_LABELS = ("Formula", "Table", "Source", "Default of", "Figures", "Other names", "Equal scores")
_LABEL = re.compile(f"^({'|'.join(_LABELS)}):", re.MULTILINE)


@dataclass(frozen=True)
class DocstringFields:
    """The fields of a docstring, each on one line; a missing field is empty."""

    prose: str
    formula: str
    source: str
    default_of: str
    metrics: tuple[str, ...]
    """Names of the metrics that show the effect of the setting."""
    table: tuple[tuple[str, ...], ...] = ()
    """Rows of cells, header first. In the docstring, `;` separates rows and `/` separates cells."""
    other_names: tuple[tuple[str, str], ...] = ()
    """System, and its names for this setting, separated by `, `. In the docstring, `;` separates systems."""
    equal_scores: str = ""
    """Advantages of responses to one prompt that all have the same score s, for an estimator."""


def parse_docstring(docstring: str) -> DocstringFields:
    """Return the fields of a docstring. A field ends at the next line that begins with a label."""
    prose, *rest = _LABEL.split(cleandoc(docstring))
    fields = {label: _one_line(text) for label, text in zip(rest[::2], rest[1::2], strict=True)}
    metrics = tuple(name.strip() for name in fields.get("Figures", "").rstrip(".").split(",") if name.strip())
    formula, source, default_of = (fields.get(label, "") for label in ("Formula", "Source", "Default of"))
    rows = [row.split(" / ") for row in fields.get("Table", "").split(";")]
    table = tuple(tuple(cell.strip() for cell in row) for row in rows if len(row) > 1)
    elsewhere = (entry.strip().partition(" ") for entry in fields.get("Other names", "").split(";"))
    other_names = tuple((system, names) for system, _, names in elsewhere if names)
    equal_scores = fields.get("Equal scores", "")
    return DocstringFields(_one_line(prose), formula, source, default_of, metrics, table, other_names, equal_scores)


def _one_line(text: str) -> str:
    return " ".join(text.split())
