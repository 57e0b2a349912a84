"""`ppoctl compare`: the screen, and every way in which two ledgers can differ."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ppoctl.batch.sealed import seal, sealed_line
from ppoctl.cli.app import run
from ppoctl.store.layout import FORMAT

EQUAL = {"seed": 1, "tokens": "aa", "finish": "terminated", "outcome": "ok", "score": 1.0, "sends": 1}


def write(
    folder: Path, name: str, changes: Mapping[tuple[int, int], Mapping[str, Any]] | None = None, steps: int = 2
):
    """A run of two samples per step; `changes` by (step, sample)."""
    root = folder / name
    root.mkdir()
    (root / "run.json").write_text(seal({"format": FORMAT}))
    lines = [
        {
            "step": step,
            "prompt": f"p{step}",
            "sample": sample,
            "stamp": name,
            "used_by": {"actor": name},
            **EQUAL,
            **({"end_of_step": True} if sample == 1 else {}),
            **(changes or {}).get((step, sample), {}),
        }
        for step in range(1, steps + 1)
        for sample in (0, 1)
    ]
    (root / "ledger.jsonl").write_bytes(b"".join(map(sealed_line, lines)))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["compare", *words]) == 0
    return capsys.readouterr().out


def test_the_screen_names_the_first_difference(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a")
    write(tmp_path, "b", {(2, 0): {"tokens": "bb", "score": None}, (2, 1): {"tokens": "cc"}})
    assert said(capsys, "a", "b").splitlines() == [
        "equal samples: 2 of 4 and 4",
        "equal steps: 1",
        "first difference: step 2, prompt p2, sample 0",
        "        a    b",
        "tokens  aa   bb",
        "score   1.0  None",
    ]


def test_a_step_is_equal_when_all_of_it_is(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a")
    write(tmp_path, "b", {(2, 1): {"tokens": "cc"}})
    assert said(capsys, "a", "b").splitlines()[:2] == ["equal samples: 3 of 4 and 4", "equal steps: 1"]


def test_a_line_that_a_kill_left_unfinished_is_not_told(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(tmp_path, name)
    with (tmp_path / "b" / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"step": 3, "prompt": "p3"}')
    assert said(capsys, "a", "b").splitlines() == ["equal samples: 4 of 4 and 4", "equal steps: 2", "no difference"]


def test_where_weights_came_from_and_sends_are_no_difference(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a")
    write(tmp_path, "b", {(1, 1): {"sends": 2}})
    assert said(capsys, "a", "b").splitlines() == ["equal samples: 4 of 4 and 4", "equal steps: 2", "no difference"]


@pytest.mark.parametrize(("left", "right", "places"), [(2, 3, ["missing", "there"]), (3, 2, ["there", "missing"])])
def test_a_run_that_went_on_differs_where_the_other_ends(tmp_path, monkeypatch, capsys, left, right, places):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a", steps=left)
    write(tmp_path, "b", steps=right)
    found = json.loads(said(capsys, "a", "b", "--json"))
    assert (found["equal_samples"], found["last_equal_step"]) == (4, 2)
    assert (found["first"]["step"], found["first"]["what"]) == (3, {"sample": places})


def lose(root: Path, step: int) -> None:
    ledger = root / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(line for line in lines if json.loads(line)["step"] != step))


def test_a_step_that_one_ledger_lost_is_stepped_over_and_told(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a", steps=4)
    write(tmp_path, "b", {(4, 1): {"tokens": "cc"}}, steps=4)
    lose(tmp_path / "a", 2)
    lose(tmp_path / "b", 1)
    assert said(capsys, "a", "b").splitlines()[:5] == [
        "equal samples: 3 of 6 and 6",
        "equal steps: 3",
        "stepped over, lost from the ledger of a: 2",
        "stepped over, lost from the ledger of b: 1",
        "first difference: step 4, prompt p4, sample 1",
    ]


def test_what_is_no_run_is_refused(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a")
    assert run(["compare", "a", "nothing"]) == 2
    assert "`nothing` is not a run directory" in capsys.readouterr().err
