"""Samples of an evaluation as rows, from the files that evaluations write. Reads no records; imports no torch."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from ppoctl.core.errors import CorruptArtifactError, RecipeError, quoted
from ppoctl.store.arrow_tables import as_table
from ppoctl.store.outline import EVAL
from ppoctl.store.output_file import write_output
from ppoctl.store.recorded_run import RecordedRun

SampleDict = dict[str, Any]
SAMPLES = "samples.jsonl"


def read(path: Path) -> list[SampleDict]:
    """Read the samples of an evaluation.

    `path` is a run (its newest evaluation is read), the folder of an evaluation (`steps/000040/80-eval`), or a file
    that `eval --out` wrote (JSONL or parquet). Raises RecipeError if `path` has no samples of an evaluation;
    CorruptArtifactError if the file cannot be read.
    """
    file = _file(path)
    try:
        if file.suffix == ".parquet":
            from pyarrow.parquet import read_table

            rows: list[SampleDict] = read_table(file).to_pylist()
        else:
            rows = [json.loads(line) for line in file.read_bytes().splitlines() if line.strip()]
        known = all({"set", "mode", "prompt_id", "sample", "score"} <= row.keys() for row in rows)
    except (ValueError, AttributeError, OSError, RecursionError) as error:
        raise CorruptArtifactError(f"`{file}` cannot be read: {error}", hint=f"ls -l {quoted(file)}") from error
    if not rows or not known:
        raise RecipeError(f"`{file}` has no rows of an evaluation's samples", hint="ppoctl eval --help")
    return rows


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    if (path / SAMPLES).is_file():
        return path / SAMPLES
    if not path.exists():
        raise RecipeError(
            f"`{path}` does not exist; give a run, a folder of an evaluation, or a file by `eval --out`",
            hint=f"ls {quoted(path.parent)}",
        )
    paths = RecordedRun.open(path).paths
    files = [file for step in paths.committed_steps() if (file := paths.stage(step, EVAL) / SAMPLES).is_file()]
    if not files:
        raise RecipeError(f"run `{path}` has no evaluation yet", hint=f"ppoctl eval {quoted(path)}")
    return files[-1]


def write(out: Path, rows: Sequence[SampleDict]) -> None:
    """Write rows to a file: as parquet if its name ends in `.parquet`, otherwise as JSONL. Raises StorageError."""
    if out.suffix == ".parquet":
        from pyarrow.parquet import write_table

        file = BytesIO()
        write_table(as_table(rows), file)
        data = file.getvalue()
    else:
        data = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows).encode("ascii")
    write_output(out, data)
