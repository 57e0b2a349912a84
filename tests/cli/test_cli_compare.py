"""`ppoctl compare`: the screen, and every way in which two runs and their ledgers can differ."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ppoctl.cli.app import run
from ppoctl.core.batch.sealed_json import seal, sealed_line, unseal
from ppoctl.recipe.schema import Recipe
from ppoctl.store import run_dir
from ppoctl.store.run_paths import RunPaths
from recipe.conftest import SMALLEST

EQUAL = {"seed": 1, "tokens": "aa", "finish": "terminated", "outcome": "ok", "score": 1.0, "sends": 1}
SOURCES = {"model": "a" * 64, "data.train": "b" * 64}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def resolved(name: str, **keys: Any) -> dict[str, Any]:
    recipe = Recipe.model_validate({**tomllib.loads(SMALLEST), "name": name, **keys})
    return recipe.model_dump(mode="json", by_alias=True)


def write(
    folder: Path, name: str, changes: Mapping[tuple[int, int], Mapping[str, Any]] | None = None, steps: int = 2
) -> RunPaths:
    """Write a run of two samples per step; `changes` by (step, sample)."""
    paths = RunPaths(folder / name)
    facts = {"sources": SOURCES, "versions": {"torch": "2.13"}}
    run_dir.create(paths, recipe_toml="", resolved=resolved(name), facts=facts)
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
    paths.ledger.write_bytes(b"".join(map(sealed_line, lines)))
    return paths


def write_metrics(paths: RunPaths, *values: Mapping[str, float]) -> None:
    """Write the journal of steps 1, 2, ... with these metrics."""
    line = {"stage": "reward", "seconds": 1.0, "clocked": {}}
    lines = [{**line, "step": step, "seq": step, "figures": each} for step, each in enumerate(values, start=1)]
    paths.journal.write_bytes(b"".join(map(sealed_line, lines)))


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["compare", *words]) == 0
    return capsys.readouterr().out


def sample_lines(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return the part of the output about samples, which comes last."""
    return output_of(capsys, *words).rpartition("\n\n")[2].splitlines()


def test_compare_screen_names_the_first_difference(tmp_path: Path, capsys):
    write(tmp_path, "a")
    write(tmp_path, "b", {(2, 0): {"tokens": "bb", "score": None}, (2, 1): {"tokens": "cc"}})
    assert sample_lines(capsys, "a", "b") == [
        "equal samples: 2 of 4 and 4",
        "equal steps: 1",
        "first difference: step 2, prompt p2, sample 0",
        "        a    b",
        "tokens  aa   bb",
        "score   1.0  None",
    ]


def test_step_is_equal_only_if_all_its_samples_are_equal(tmp_path: Path, capsys):
    write(tmp_path, "a")
    write(tmp_path, "b", {(2, 1): {"tokens": "cc"}})
    assert sample_lines(capsys, "a", "b")[:2] == ["equal samples: 3 of 4 and 4", "equal steps: 1"]


def test_stamps_sends_and_an_unfinished_line_are_not_differences(tmp_path: Path, capsys):
    write(tmp_path, "a")
    write(tmp_path, "b", {(1, 1): {"sends": 2}})
    with (tmp_path / "b" / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"step": 3, "prompt": "p3"}')
    assert sample_lines(capsys, "a", "b") == ["equal samples: 4 of 4 and 4", "equal steps: 2", "no difference"]


@pytest.mark.parametrize(("left", "right", "places"), [(2, 3, ["missing", "there"]), (3, 2, ["there", "missing"])])
def test_longer_run_differs_at_the_end_of_the_shorter_run(tmp_path, capsys, left, right, places):
    write(tmp_path, "a", steps=left)
    write(tmp_path, "b", steps=right)
    found = json.loads(output_of(capsys, "a", "b", "--json"))
    assert (found["equal_samples"], found["last_equal_step"]) == (4, 2)
    assert (found["first"]["step"], found["first"]["what"]) == (3, {"sample": places})


def lose(root: Path, step: int) -> None:
    ledger = root / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(line for line in lines if json.loads(line)["step"] != step))


def test_steps_lost_from_a_ledger_are_skipped_and_reported(tmp_path: Path, capsys):
    write(tmp_path, "a", steps=4)
    write(tmp_path, "b", {(4, 1): {"tokens": "cc"}}, steps=4)
    lose(tmp_path / "a", 2)
    lose(tmp_path / "b", 1)
    assert sample_lines(capsys, "a", "b")[:5] == [
        "equal samples: 3 of 6 and 6",
        "equal steps: 3",
        "skipped, missing in the ledger of a: 2",
        "skipped, missing in the ledger of b: 1",
        "first difference: step 4, prompt p4, sample 1",
    ]


def test_compare_refuses_a_folder_that_is_not_a_run(tmp_path: Path, capsys):
    write(tmp_path, "a")
    assert run(["compare", "a", "nothing"]) == 2
    assert "`nothing` is not a run directory" in capsys.readouterr().err


def test_other_differences_are_printed_before_the_samples(tmp_path: Path, capsys):
    a, b = write(tmp_path, "a"), write(tmp_path, "b")
    optimizer = {"optimizer": {"lr": 2e-6}}
    b.recipe_from(2).write_text(seal(resolved("b", steps=20, actor=optimizer, tracking={"kind": "none"})))
    facts = unseal(b.run_json.read_text())
    others = {"model": "c" * 64, "tokenizer": "d" * 64, "clock": "2024-07-26T13:05:00"}
    b.run_json.write_text(seal({**facts, "sources": {**SOURCES, **others}}))
    reward, pass_at_1, kl = "reward/score_mean", "eval/held/pass_at_1", "policy/approx_kl"
    write_metrics(a, {reward: 0.25, kl: 0.5, pass_at_1: 0.5}, {reward: 0.75, kl: 0.125}, {reward: 0.5, kl: 0.25})
    write_metrics(b, {reward: 0.25, kl: 0.5}, {reward: 0.5, kl: 0.125, pass_at_1: 0.75})
    assert output_of(capsys, "a", "b").startswith("""\
recipe key           a         b
steps                10        20
actor.optimizer.lr   1e-06     2e-06
tracking.kind        "mlflow"  "none"
tracking.experiment  "ppoctl"  -

source     a             b
model      aaaaaaaaaaaa  cccccccccccc
clock      -             2024-07-26T13:05:00
tokenizer  -             dddddddddddd

equal: versions

metric               step  a     b    best of a  best of b
reward/score_mean    2     0.75  0.5  0.75 at 2  0.5 at 2
eval/held/pass_at_1  -     -     -    0.5 at 1   0.75 at 2

equal samples: 4 of 4 and 4
""")
    parsed = json.loads(output_of(capsys, "a", "b", "--json"))
    assert parsed["keys"]["steps"] == [10, 20]
    assert parsed["sources"] == {name: [SOURCES.get(name), other] for name, other in others.items()}
    assert (parsed["versions"], parsed["equal_samples"]) == ({}, 4)
    by_name = {figure["metric"]: figure for figure in parsed["figures"]}
    assert by_name[kl] == {"metric": kl, "step": 2, "values": [0.125, 0.125], "best": [None, None]}
    assert by_name[reward]["best"] == [{"step": 2, "value": 0.75}, {"step": 2, "value": 0.5}]


def test_equal_runs_are_summarized_in_two_lines(tmp_path: Path, capsys):
    a, b = write(tmp_path, "a"), write(tmp_path, "b")
    assert output_of(capsys, "a", "b").splitlines()[:3] == [
        "equal: recipe, sources, versions", "metrics: the runs have none in common", "",
    ]  # fmt: skip
    for layout in (a, b):
        write_metrics(layout, {"reward/score_mean": 0.5}, {"reward/score_mean": float("nan")})
    assert output_of(capsys, "a", "b").splitlines()[1] == "metrics: equal up to step 2"


def test_best_value_is_the_first_optimum_in_the_metric_direction(tmp_path: Path, capsys):
    a, b = write(tmp_path, "a"), write(tmp_path, "b")
    cut = "rollout/truncated_frac"
    write_metrics(a, {cut: 0.5}, {cut: 0.25}, {cut: 0.25})
    write_metrics(b, {cut: 0.5}, {cut: 0.75}, {cut: 0.25})
    row = output_of(capsys, "a", "b").splitlines()[3]
    assert row.split() == [cut, "3", "0.25", "0.25", *("0.25", "at", "2"), *("0.25", "at", "3")]


def test_exit_code_option_reports_whether_samples_differ(tmp_path: Path):
    write(tmp_path, "a")
    write(tmp_path, "b", {(2, 1): {"tokens": "cc"}})
    assert run(["compare", "a", "b"]) == 0
    assert run(["compare", "a", "b", "--exit-code"]) == 10
    assert run(["compare", "a", "b", "--exit-code", "--json"]) == 10
    assert run(["compare", "a", "a", "--exit-code"]) == 0


def test_missing_evaluation_is_reported(capsys):
    assert run(["compare", "--eval", "a.jsonl", "b.jsonl"]) == 2
    assert capsys.readouterr().err == (
        "error: `a.jsonl` does not exist; give a run, a folder of an evaluation, or a file by `eval --out`\n\n"
        "hint: ls .\n"
    )
