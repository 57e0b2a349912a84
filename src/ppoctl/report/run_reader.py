"""One run as a report needs it: facts, recipes, journal and the history of its figures, read once. Light."""

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
    """A run directory in memory; its samples stay on disk."""

    label: str
    """Name under which the report speaks of it, unlike that of every other run in it."""
    paths: RunPaths
    facts: Mapping[str, Any]
    recipes: Mapping[int, Mapping[str, Any]]
    """Resolved recipes by the first step they hold for."""
    lines: Sequence[JournalLine]
    series: History
    outlines: Outlines

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe as it holds for the newest steps."""
        return self.recipes[max(self.recipes)]

    @property
    def stage_lines(self) -> list[JournalLine]:
        """The journal's line of every stage of every step; of one that was made again, the later."""
        counting = {(line["step"], line["stage"]): line for line in self.lines if "stage" in line}
        return sorted(counting.values(), key=lambda line: int(line["seq"]))


def read_runs(folders: Sequence[Path]) -> list[ReadRun]:
    """The runs in these folders. Raises RecipeError where one is no run, StorageError where it cannot be read."""
    layouts = [RunPaths(folder.resolve()) for folder in folders]
    facts = [run_dir.facts(layout) for layout in layouts]
    labels = _labels([str(each["name"]) for each in facts])
    return [_read(label, layout, known) for label, layout, known in zip(labels, layouts, facts, strict=True)]


def _read(label: str, paths: RunPaths, facts: Mapping[str, Any]) -> ReadRun:
    lines = read_lines(paths.journal)
    return ReadRun(label, paths, facts, run_dir.recipes(paths), lines, history(lines), outlines_of(paths))


def _labels(names: Sequence[str]) -> list[str]:
    """The names; of those that are equal, each with its number in the report."""
    return [name if names.count(name) == 1 else f"{name} ({at})" for at, name in enumerate(names, start=1)]
