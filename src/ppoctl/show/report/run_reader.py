"""The runs of a report, each with a label and the history of its metrics.

The module imports no torch, vLLM or Megatron.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from ppoctl.show.report.expectations import history
from ppoctl.store.journal import JournalLine
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths

History = Mapping[str, Sequence[tuple[int, float]]]


class ReportedRun(RecordedRun):
    """A run of a report."""

    def __init__(self, paths: RunPaths, label: str = "") -> None:
        super().__init__(paths)
        self.label = label
        """Name of the run in the report. It is unique among the runs of the report."""

    @cached_property
    def series(self) -> History:
        """Metric -> its points: step and value."""
        return history(self.lines)

    @property
    def stage_lines(self) -> list[JournalLine]:
        """Journal lines of every stage of every step. If a stage was repeated, only its newest line is included."""
        newest = {(line["step"], line["stage"]): line for line in self.lines if "stage" in line}
        return sorted(newest.values(), key=lambda line: int(line["seq"]))


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Open the runs in these folders.

    Raises RecipeError if a folder is not a run, StorageError if a run cannot be read.
    """
    runs = [ReportedRun.open(folder.resolve()) for folder in folders]
    for run, label in zip(runs, _labels([str(run.facts["name"]) for run in runs]), strict=True):
        run.label = label
    return runs


def _labels(names: Sequence[str]) -> list[str]:
    """Return the names of the runs. Equal names are extended by the number of the run in the report."""
    return [name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names, start=1)]
