"""Comparison of two runs, sample by sample, from their ledgers. Reads JSON lines only; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.store.journal import read_lines

COMPARED = ("seed", "tokens", "finish", "outcome", "score")
"""Fields of a sample that are compared. The origin of the weights (`stamp`, `used_by`) and the number of times a
request was sent (`sends`) are not compared."""


@dataclass(frozen=True)
class Difference:
    """The first sample that differs between two runs."""

    step: int
    prompt: str
    sample: int
    what: dict[str, tuple[Any, Any]]
    """Fields that differ, with both values; `missing` if one run does not have the sample."""


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: how far two runs are equal."""

    equal_samples: int
    """Number of samples before the first difference."""
    last_equal_step: int
    """Last step up to which all samples of all steps are equal; 0: no step."""
    samples: tuple[int, int]
    """Number of samples of each run."""
    lost_steps: tuple[tuple[int, ...], tuple[int, ...]]
    """For each run, the steps that its ledger lost and the other ledger has; the comparison skips these steps."""
    first: Difference | None


def compare(left: Path, right: Path) -> Comparison:
    """Compare two ledgers, line by line in their order.

    A line that a kill left unfinished is skipped, and so is a step that one ledger lost before its end. If only the
    lengths of the runs differ, the first difference is at the end of the shorter run. Raises CorruptArtifactError
    naming a damaged line.
    """
    ledgers = [read_lines(left), read_lines(right)]
    samples = (len(ledgers[0]), len(ledgers[1]))
    lost = (_lost(*ledgers), _lost(*reversed(ledgers)))
    lines = [[line for line in ledger if line["step"] not in (*lost[0], *lost[1])] for ledger in ledgers]
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
    """Return the steps that only `other` has, before the last step of `mine`."""
    steps = {int(line["step"]) for line in mine}
    return tuple(sorted({int(line["step"]) for line in other if line["step"] < max(steps, default=0)} - steps))


def _difference(mine: dict[str, Any], other: dict[str, Any]) -> Difference | None:
    keys = ("step", "round", "prompt", "sample", *COMPARED)
    what = {key: (mine.get(key), other.get(key)) for key in keys if mine.get(key) != other.get(key)}
    return Difference(int(mine["step"]), mine["prompt"], int(mine["sample"]), what) if what else None


def _missing(line: dict[str, Any], *, in_left: bool) -> Difference:
    left, right = ("missing", "there") if in_left else ("there", "missing")
    return Difference(int(line["step"]), line["prompt"], int(line["sample"]), {"sample": (left, right)})
