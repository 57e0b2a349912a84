"""Length of a run whose recipe sets `epochs`: `steps` replaces `epochs` before anything reads the recipe.

Steps take the training rows epoch after epoch (`data.source`). A step may take the last rows of one epoch and the
first rows of the next, so that only the last epoch leaves rows unused.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ppoctl.core.errors import DataError, MissingAssetError, PpoctlError, quoted
from ppoctl.core.finding import Finding, from_error, note, problem
from ppoctl.core.key_path import dotted
from ppoctl.data.row_files import files_of, rows_of
from ppoctl.data.row_tables import AnyRows, Rows, StoredRows, sources_of
from ppoctl.recipe.loading.layers import Layers


def put_steps_for_epochs(layers: Layers) -> Finding | None:
    """Replace `epochs` by `steps` in the written recipe. Returns a note with both numbers.

    Returns None if the recipe has no valid `epochs`. If the rows cannot be counted, the reason is added to
    `layers.problems` and the recipe keeps `epochs`.
    """
    epochs, per_step = _at(layers.written, "epochs"), _at(layers.written, "rollout", "prompts_per_step")
    table = _train(layers.written)
    if table is None or not (_is_count(epochs) and _is_count(per_step)):
        return None  # validation reports a wrong value
    if isinstance(_at(layers.written, "rollout", "groups"), dict):
        message = (
            f"`epochs` is `{epochs}`, but with [rollout.groups] the prompts of a step depend on the scores, "
            "so no number of steps is an epoch"
        )
        layers.problems.append(problem(message, layers.place(("epochs",)), "write `steps` in place of `epochs`"))
        return None
    rows, place = rows_of(table), layers.place(("epochs",))
    if rows is None:
        layers.problems += _uncounted(table, layers)
        return None
    steps, remaining = divmod(epochs * rows, per_step)
    if not steps:
        message = f"`epochs` is `{epochs}`: {rows} rows of `data.train` do not fill one step of {per_step} prompts"
        hint = f"--set rollout.prompts_per_step={max(rows, 1)}"
        layers.problems.append(problem(message, place, hint, error=DataError))
        return None
    del layers.written["epochs"]
    layers.written["steps"] = steps
    layers.counts_epochs = True
    unused = f"; {remaining} rows of the last epoch are not used" if remaining else ""
    return note(f"`epochs` = `{epochs}` of {rows} rows: {steps} steps of {per_step} prompts{unused}", kind="recipe")


def _train(written: Any) -> AnyRows | None:
    """Return the table of the training rows; None: the table is not valid."""
    try:
        table: AnyRows = TypeAdapter(Rows).validate_python(_at(written, "data", "train"))
    except ValidationError:
        return None
    return table


def _uncounted(table: AnyRows, layers: Layers) -> Iterator[Finding]:
    """Yield the reasons why rows cannot be counted, except an unset environment variable, which `Layers` reports."""
    place = layers.place(("epochs",))
    for source, single in sources_of(table).items():
        key = ("data", "train", *(("sources", source) if source else ()))
        name = dotted(key)
        if isinstance(single, StoredRows) and single.path is not None and single.duplicates == "keep":
            paths = single.path if isinstance(single.path, tuple) else (single.path,)
            if any(path.startswith("$") for path in paths) or rows_of(single) is not None:
                continue
            try:
                files_of(single, key=name)
            except PpoctlError as error:  # the check of the rows reports it in the same words
                yield from_error(error, layers.place((*key, "path")), kind="data")
                continue
            message = f"`epochs` counts the rows of `{name}.path`, `{single.named}`, which cannot be read"
            yield problem(message, place, f"ls -l {quoted(paths[0])}", error=MissingAssetError)
            continue
        reason = (
            'with `duplicates = "drop"`'
            if isinstance(single, StoredRows) and single.path
            else "which are not in a file"
        )
        message = (
            f"`epochs` requires a row count, but the rows of [{name}], {reason}, are counted only when they are read"
        )
        yield problem(message, place, "write `steps` in place of `epochs`; `ppoctl preview` counts the rows")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _at(tables: Any, *path: str) -> Any:
    for name in path:
        tables = tables.get(name) if isinstance(tables, dict) else None
    return tables
