"""Comparing two ledgers line by line: where they diverge, which steps one of them lost, and which ends first."""

from pathlib import Path
from typing import Any

import pytest

from ppoctl.core.batch.sealed_json import sealed_line
from ppoctl.store.compare_ledgers import Comparison, Difference, compare
from ppoctl.store.log_files import Tail


def ledger(path: Path, *steps: int, last_score: float = 1.0) -> Path:
    fields: dict[str, Any] = {"seed": 1, "tokens": "aa", "finish": "terminated", "outcome": "ok", "score": 1.0}
    lines = [
        {"step": step, "prompt": f"p{step}", "sample": sample, **fields, "end_of_step": sample == 1}
        for step in steps
        for sample in (0, 1)
    ]
    lines[-1]["score"] = last_score
    path.write_bytes(b"".join(map(sealed_line, lines)))
    return path


@pytest.mark.parametrize(
    ("left", "right", "lost", "missing"),
    [
        ((1, 2, 3), (1, 2, 3), ((), ()), None),
        # A step that is lost in the middle is skipped; at the end it is missing.
        ((1, 3), (1, 2, 3), ((2,), ()), None),
        ((1, 2, 3), (2, 3), ((), (1,)), None),
        ((1, 2), (1, 2, 3), ((), ()), (3, ("missing", "there"))),
        ((1, 2, 3), (1, 2), ((), ()), (3, ("there", "missing"))),
    ],
)
def test_ledger_comparison_reports_lost_and_missing_steps(
    tmp_path: Path, left: tuple[int, ...], right: tuple[int, ...], lost: object, missing: Any
) -> None:
    found = compare(ledger(tmp_path / "left", *left), ledger(tmp_path / "right", *right))
    both = [step for step in left if step in right]
    first = None if missing is None else Difference(missing[0], f"p{missing[0]}", 0, {"sample": missing[1]})
    assert found == Comparison(2 * len(both), max(both), (2 * len(left), 2 * len(right)), lost, first)  # type: ignore[arg-type]


def test_last_equal_step_is_complete(tmp_path: Path) -> None:
    found = compare(ledger(tmp_path / "left", 1, 2), ledger(tmp_path / "right", 1, 2, last_score=0.0))
    assert (found.equal_samples, found.last_equal_step) == (3, 1)


def test_tail_rereads_a_replaced_or_truncated_file(tmp_path: Path) -> None:
    file, other = tmp_path / "console.log", tmp_path / "other"
    file.write_text("one\ntwo\nhal")
    tail = Tail(file)
    assert list(tail.new()) == [["one", "two"]]
    other.write_text("another first line\nand more\n")
    other.replace(file)
    assert list(tail.new()) == [["another first line", "and more"]]
    file.write_text("cut\n")
    assert list(tail.new()) == [["cut"]]
    assert tail.rest() == []
