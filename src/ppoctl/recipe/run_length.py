"""How long a run is where a recipe says it in epochs: `steps` takes the place of `epochs` before anything reads it.

Steps draw the training rows epoch after epoch (`data.source`): rows that an epoch leaves over begin the step that the
next one ends, so that only the last epoch leaves some undrawn.
"""

from pathlib import Path
from typing import Any

from ppoctl.errors import DataError, MissingAssetError, quoted
from ppoctl.recipe.layers import Layers
from ppoctl.recipe.problems import Problem
from ppoctl.recipe.schema import ColumnRows, Gsm8kRows


def count_rows(path: str, max_rows: int | None) -> int | None:
    """Rows of a local file that are used: lines of JSONL that are not blank, or what a parquet file says it has.
    None: there is no such file, or it is neither."""
    file = Path(path)
    if not file.is_file():
        return None
    if file.suffix == ".parquet":
        from pyarrow import parquet

        try:
            rows = int(parquet.read_metadata(file).num_rows)
        except (OSError, ValueError):  # pyarrow's own are of these
            return None
    elif file.suffix == ".jsonl":
        with file.open("rb") as lines:
            rows = sum(1 for line in lines if line.strip())
    else:
        return None
    return rows if max_rows is None else min(rows, max_rows)


def rows_of(table: Gsm8kRows | ColumnRows) -> int | None:
    """Rows of a dataset that are used; None where they cannot be counted."""
    return count_rows(table.path, table.max_rows)


def put_steps_for_epochs(layers: Layers) -> str | None:
    """Write `steps` in place of `epochs`; returns a note on what came of it. What keeps them from being counted is
    added to the problems; `epochs` then stays."""
    epochs, per_step = _at(layers.written, "epochs"), _at(layers.written, "rollout", "prompts_per_step")
    path, most = _at(layers.written, "data", "train", "path"), _at(layers.written, "data", "train", "max_rows")
    if not (
        _is_count(epochs) and _is_count(per_step) and isinstance(path, str) and (most is None or _is_count(most))
    ):
        return None  # whoever checks the values says so
    rows, place = count_rows(path, most), layers.place(("epochs",))
    if rows is None:
        if not path.startswith("$"):  # a variable that is not set has been told
            says = f"`epochs` counts the rows of `data.train.path`, `{path}`, which cannot be read"
            layers.problems.append(Problem(place, says, f"ls -l {quoted(path)}", MissingAssetError))
        return None
    steps, left = divmod(epochs * rows, per_step)
    if not steps:
        says = f"`epochs` is `{epochs}`: {rows} rows of `data.train` are no step of {per_step} prompts"
        layers.problems.append(Problem(place, says, f"--set rollout.prompts_per_step={max(rows, 1)}", DataError))
        return None
    del layers.written["epochs"]
    layers.written["steps"] = steps
    layers.counts_epochs = True
    over = f"; {left} rows of the last epoch are left over" if left else ""
    return f"`epochs` = `{epochs}` of {rows} rows: {steps} steps of {per_step} prompts{over}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _at(tables: Any, *path: str) -> Any:
    for name in path:
        tables = tables.get(name) if isinstance(tables, dict) else None
    return tables
