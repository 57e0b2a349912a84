"""What a docstring of the recipe says beside its prose, in lines that begin with a mark: formula, source, whose
default it is, and the figures that show it. docs/algorithms.md and `ppoctl recipes keys` print these."""

import re
from dataclasses import dataclass
from inspect import cleandoc

_MARK = re.compile(r"^(Formula|Table|Source|Default of|Figures):", re.MULTILINE)


@dataclass(frozen=True)
class DocstringFields:
    """A docstring in parts, each on one line; empty where it has no such part."""

    prose: str
    formula: str
    source: str
    default_of: str
    metrics: tuple[str, ...]
    """Names of metrics in which the setting can be seen at work."""
    table: tuple[tuple[str, ...], ...] = ()
    """Rows of cells, the head first; in the docstring rows end with `;` and cells with `/`."""


def parse_docstring(docstring: str) -> DocstringFields:
    """The parts of a docstring. A part goes on until the next line that begins with a mark."""
    prose, *rest = _MARK.split(cleandoc(docstring))
    parts = {name: _line(text) for name, text in zip(rest[::2], rest[1::2], strict=True)}
    figures = tuple(name.strip() for name in parts.get("Figures", "").rstrip(".").split(",") if name.strip())
    formula, source, default_of = (parts.get(name, "") for name in ("Formula", "Source", "Default of"))
    rows = [row.split(" / ") for row in parts.get("Table", "").split(";")]
    table = tuple(tuple(cell.strip() for cell in row) for row in rows if len(row) > 1)
    return DocstringFields(_line(prose), formula, source, default_of, figures, table)


def _line(text: str) -> str:
    return " ".join(text.split())
