"""Rows as tables of pyarrow. Light: it is imported where a table is made."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


def as_table(rows: Sequence[Mapping[str, Any]]) -> "pyarrow.Table":
    """Rows as a table with a column for every key that any of them has, in the order in which they come."""
    import pyarrow

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    return pyarrow.table(columns)


def _column(values: list[Any]) -> "pyarrow.Array":
    """A column; mappings, whose keys may differ from row to row, become JSON, as empty ones have no place in a
    table."""
    import pyarrow

    if any(isinstance(value, Mapping) for value in values):
        values = [None if value is None else json.dumps(value, sort_keys=True) for value in values]
    return pyarrow.array(values)
