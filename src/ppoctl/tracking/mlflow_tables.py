"""Samples of evaluations and of training as MLflow tables, and the tag that makes MLflow's pages show them."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

TAG = "mlflow.loggedArtifacts"
ROWS_PER_TABLE = 64
"""Number of an evaluation's samples that MLflow shows; the run directory has all of them."""
MOST_TABLES = 120
"""Number of newest tables in the tag. A table takes about 55 of the 8000 characters of an MLflow tag."""
MOST_OF_TRAINING = 40
"""Largest number of training tables among these, so that training tables do not displace evaluations."""
_TRAINING = "samples/train-"

_FIRST = ("set", "mode", "prompt", "response", "conversation", "score", "given", "answer", "outcome")
"""First columns of a table, by which a reader compares rows; all other columns come after them."""


def table_name(step: int) -> str:
    """Return the path of the table of the evaluation after this step.

    The path is the same for all runs, so that MLflow can compare their tables.
    """
    return f"samples/step-{step:06d}.json"


def training_table_name(step: int) -> str:
    """Return the path of the table of this step's training samples."""
    return f"{_TRAINING}{step:06d}.json"


def training_table(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return rows, which have equal columns, in the format of `MlflowClient.log_table`; None if there are no rows."""
    if not rows:
        return None
    cells = [dict(_cells("", row)) for row in rows]
    return json.dumps({"columns": list(cells[0]), "data": [list(row.values()) for row in cells]})


def table(lines: Iterable[str]) -> str:
    """Return the first rows of `samples.jsonl` in the format of `MlflowClient.log_table`.

    The result is a complete table; `log_table` itself would append to an existing one. Nested values (`extras`)
    become separate columns. A damaged line is omitted.
    """
    rows = [dict(_cells("", row)) for line in islice(lines, ROWS_PER_TABLE) for row in _read(line)]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [*(name for name in _FIRST if name in names), *(name for name in names if name not in _FIRST)]
    return json.dumps({"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]})


def with_tables(tag: str | None, names: Sequence[str]) -> str:
    """Return the tag with these tables added; tables that others added remain."""
    existing = json.loads(tag) if tag else []
    entries = [*existing, *(entry for name in names if (entry := {"path": name, "type": "table"}) not in existing)]
    of_training = [entry for entry in entries if str(entry.get("path")).startswith(_TRAINING)]
    kept = [entry for entry in entries if entry not in of_training[:-MOST_OF_TRAINING]]
    return json.dumps(kept[-MOST_TABLES:])


def _read(line: str) -> Iterable[dict[str, Any]]:
    with suppress(ValueError):
        yield json.loads(line)


def _cells(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _cells(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list):
        yield name, json.dumps(value)
    else:
        # JSON has no value for NaN and infinity, and browsers reject Python's notation.
        yield name, None if isinstance(value, float) and not math.isfinite(value) else value
