"""Samples of evaluations and of training as MLflow's tables, and the tag by which its pages find them."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

TAG = "mlflow.loggedArtifacts"
ROWS_PER_TABLE = 64
"""Rows of an evaluation's samples that are shown in MLflow; all of them stay in the run directory."""
MOST_TABLES = 120
"""Newest tables that the tag names. One takes some 55 characters of the 8000 that MLflow gives a tag."""
MOST_OF_TRAINING = 40
"""How many of them are of training, so that evaluations keep their place."""
_TRAINING = "samples/train-"

_FIRST = ("set", "mode", "prompt", "response", "score", "given", "answer", "outcome")
"""Columns by which rows are compared; all others stand behind them."""


def table_name(step: int) -> str:
    """Path of the table of the evaluation after this step; that of another run has the same, so that MLflow compares
    them."""
    return f"samples/step-{step:06d}.json"


def training_table_name(step: int) -> str:
    """Path of the table of samples that this step trained on."""
    return f"{_TRAINING}{step:06d}.json"


def training_table(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Rows that have the same columns, as `MlflowClient.log_table` writes them; None of none."""
    if not rows:
        return None
    cells = [dict(_cells("", row)) for row in rows]
    return json.dumps({"columns": list(cells[0]), "data": [list(row.values()) for row in cells]})


def table(lines: Iterable[str]) -> str:
    """The first rows of `samples.jsonl` as `MlflowClient.log_table` writes a table. The whole of it: `log_table`
    itself appends to what is there. What is within a column (`extras`) becomes columns of its own; a line that is
    damaged is left out."""
    rows = [dict(_cells("", row)) for line in islice(lines, ROWS_PER_TABLE) for row in _read(line)]
    found = dict.fromkeys(name for row in rows for name in row)
    columns = [*(name for name in _FIRST if name in found), *(name for name in found if name not in _FIRST)]
    return json.dumps({"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]})


def with_tables(tag: str | None, names: Sequence[str]) -> str:
    """The tag with these tables, too; those of somebody else stay."""
    had = json.loads(tag) if tag else []
    all_of_them = [*had, *(entry for name in names if (entry := {"path": name, "type": "table"}) not in had)]
    of_training = [entry for entry in all_of_them if str(entry.get("path")).startswith(_TRAINING)]
    kept = [entry for entry in all_of_them if entry not in of_training[:-MOST_OF_TRAINING]]
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
        # JSON as browsers read it has no word for what is not finite.
        yield name, None if isinstance(value, float) and not math.isfinite(value) else value
