"""Conversion of rows to pyarrow tables. `pyarrow` is imported only when a table is created."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


def as_table(rows: Sequence[Mapping[str, Any]]) -> "pyarrow.Table":
    """Return the rows as a table with a column for every key of any row, in the order of first occurrence."""
    import pyarrow

    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    return pyarrow.table(columns)


def _column(values: list[Any]) -> "pyarrow.Array":
    """Return a column. Mappings become JSON: their keys differ between rows, and a table cannot hold `{}`."""
    import pyarrow

    if any(isinstance(value, Mapping) for value in values):
        values = [None if value is None else json.dumps(value, sort_keys=True) for value in values]
    return pyarrow.array(values)
