"""How long a run is where a recipe says it in epochs: `steps` takes the place of `epochs` before anything reads it.

Steps draw the training rows epoch after epoch (`data.source`): rows that an epoch leaves over begin the step that the
next one ends, so that only the last epoch leaves some undrawn.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ppoctl.errors import DataError, MissingAssetError, quoted
from ppoctl.loading.layers import Layers
from ppoctl.loading.problems import Problem
from ppoctl.recipe.origins import dotted
from ppoctl.recipe.row_files import rows_of
from ppoctl.recipe.rows import AnyRows, Rows, StoredRows, sources_of


def put_steps_for_epochs(layers: Layers) -> str | None:
    """Write `steps` in place of `epochs`; returns a note on what came of it. What keeps them from being counted is
    added to the problems; `epochs` then stays."""
    epochs, per_step = _at(layers.written, "epochs"), _at(layers.written, "rollout", "prompts_per_step")
    table = _train(layers.written)
    if table is None or not (_is_count(epochs) and _is_count(per_step)):
        return None  # whoever checks the values says so
    rows, place = rows_of(table), layers.place(("epochs",))
    if rows is None:
        layers.problems += _uncounted(table, place)
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


def _train(written: Any) -> AnyRows | None:
    """The table of the training rows; None where it is not right yet."""
    try:
        table: AnyRows = TypeAdapter(Rows).validate_python(_at(written, "data", "train"))
    except ValidationError:
        return None
    return table


def _uncounted(table: AnyRows, place: str) -> Iterator[Problem]:
    """The problem that keeps rows from being counted. A variable that is not set has been told."""
    for key, single in sources_of(table).items():
        name = dotted(("data", "train", *(("sources", key) if key else ())))
        if isinstance(single, StoredRows) and single.path is not None and single.duplicates == "keep":
            paths = single.path if isinstance(single.path, tuple) else (single.path,)
            if any(path.startswith("$") for path in paths) or rows_of(single) is not None:
                continue
            says = f"`epochs` counts the rows of `{name}.path`, `{single.named}`, which cannot be read"
            yield Problem(place, says, f"ls -l {quoted(paths[0])}", MissingAssetError)
            continue
        why = (
            'with `duplicates = "drop"`' if isinstance(single, StoredRows) and single.path else "which are in no file"
        )
        says = f"`epochs` counts rows, and those of [{name}], {why}, are counted only when they are read"
        yield Problem(place, says, "write `steps` in place of `epochs`; `ppoctl preview` counts the rows")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _at(tables: Any, *path: str) -> Any:
    for name in path:
        tables = tables.get(name) if isinstance(tables, dict) else None
    return tables
