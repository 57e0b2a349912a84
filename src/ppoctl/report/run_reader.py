"""The data of a run for a report, read only once: facts, recipes, journal and the history of metrics.

The module imports no torch, vLLM or Megatron.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.loop.expectations import history
from ppoctl.store import run_dir
from ppoctl.store.journal import JournalLine, read_lines
from ppoctl.store.outline import Outlines, outlines_of
from ppoctl.store.run_paths import RunPaths

History = Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class ReadRun:
    """A run directory in memory, without its samples."""

    label: str
    """Name of the run in the report. It is unique among the runs of the report."""
    paths: RunPaths
    facts: Mapping[str, Any]
    recipes: Mapping[int, Mapping[str, Any]]
    """First step that uses a recipe -> resolved recipe."""
    lines: Sequence[JournalLine]
    series: History
    outlines: Outlines

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Recipe of the newest steps."""
        return self.recipes[max(self.recipes)]

    @property
    def stage_lines(self) -> list[JournalLine]:
        """Journal lines of every stage of every step. If a stage was repeated, only its newest line is included."""
        newest = {(line["step"], line["stage"]): line for line in self.lines if "stage" in line}
        return sorted(newest.values(), key=lambda line: int(line["seq"]))


def read_runs(folders: Sequence[Path]) -> list[ReadRun]:
    """Read the runs in these folders.

    Raises RecipeError if a folder is not a run, StorageError if a run cannot be read.
    """
    all_paths = [RunPaths(folder.resolve()) for folder in folders]
    facts = [run_dir.facts(paths) for paths in all_paths]
    labels = _labels([str(each["name"]) for each in facts])
    return [_read(label, paths, known) for label, paths, known in zip(labels, all_paths, facts, strict=True)]


def _read(label: str, paths: RunPaths, facts: Mapping[str, Any]) -> ReadRun:
    lines = read_lines(paths.journal)
    return ReadRun(label, paths, facts, run_dir.recipes(paths), lines, history(lines), outlines_of(paths))


def _labels(names: Sequence[str]) -> list[str]:
    """Return the names of the runs. Equal names are extended by the number of the run in the report."""
    return [name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names, start=1)]
