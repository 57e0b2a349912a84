"""Comparison of two runs, sample by sample, as their ledgers tell it. Light: reads JSON lines only."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.store.journal import read_lines

COMPARED = ("seed", "tokens", "finish", "outcome", "score")
"""Fields of a sample that are compared. Not among them: where its weights came from (`stamp`, `used_by`), how often
it was sent for."""


@dataclass(frozen=True)
class Difference:
    """The first sample that is not the same in both runs."""

    step: int
    prompt: str
    sample: int
    what: dict[str, tuple[Any, Any]]
    """Fields that differ, with both values; `missing` where one run has no such sample."""


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: how far two runs went together."""

    equal_samples: int
    """Samples before the first difference."""
    last_equal_step: int
    """Last step up to which all samples of all steps are equal; 0: none."""
    samples: tuple[int, int]
    """Number of samples of each run."""
    lost_steps: tuple[tuple[int, ...], tuple[int, ...]]
    """Steps that the other run has and this one's ledger lost, for each run; they are stepped over."""
    first: Difference | None


def compare(left: Path, right: Path) -> Comparison:
    """Compare two ledgers in their order; a line that a kill left unfinished is left out, and so is a step that one
    of them lost before its end. A run that goes on longer differs where the other one ends. Raises
    CorruptArtifactError naming a damaged line."""
    both = [read_lines(left), read_lines(right)]
    samples = (len(both[0]), len(both[1]))
    lost = (_lost(*both), _lost(*reversed(both)))
    lines = [[line for line in one if line["step"] not in (*lost[0], *lost[1])] for one in both]
    equal, last_equal_step = 0, 0
    for mine, other in zip(*lines, strict=False):
        difference = _difference(mine, other)
        if difference is not None:
            return Comparison(equal, last_equal_step, samples, lost, difference)
        equal += 1
        if mine.get("end_of_step"):
            last_equal_step = int(mine["step"])
    longer = max(lines, key=len)
    first = _missing(longer[equal], in_left=longer is lines[1]) if len(longer) > equal else None
    return Comparison(equal, last_equal_step, samples, lost, first)


def _lost(mine: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> tuple[int, ...]:
    """Steps that only the other has, before the last one here."""
    steps = {int(line["step"]) for line in mine}
    return tuple(sorted({int(line["step"]) for line in other if line["step"] < max(steps, default=0)} - steps))


def _difference(mine: dict[str, Any], other: dict[str, Any]) -> Difference | None:
    keys = ("step", "prompt", "sample", *COMPARED)
    what = {key: (mine[key], other[key]) for key in keys if mine[key] != other[key]}
    return Difference(int(mine["step"]), mine["prompt"], int(mine["sample"]), what) if what else None


def _missing(line: dict[str, Any], *, in_left: bool) -> Difference:
    here, there = ("missing", "there") if in_left else ("there", "missing")
    return Difference(int(line["step"]), line["prompt"], int(line["sample"]), {"sample": (here, there)})
