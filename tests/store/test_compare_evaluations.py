"""Comparing two evaluations: pairs of prompts, differences by hand, p-values by counting all signs."""

import json
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.components import fake_recipe
from fakes.job import play
from ppoctl.cli.app import run
from ppoctl.core.errors import CorruptArtifactError, RecipeError, StorageError
from ppoctl.store import eval_samples
from ppoctl.store.compare_evaluations import compare_evaluations, paired
from ppoctl.store.run_paths import RunPaths


def rows(scores: dict[str, list[float | None]], set: str = "held", mode: str = "sampled") -> list[dict[str, Any]]:
    return [
        {"set": set, "mode": mode, "prompt_id": prompt, "sample": number, "score": score, "extras": {}}
        for prompt, of_prompt in scores.items()
        for number, score in enumerate(of_prompt)
    ]


def test_paired_test_of_binary_scores_equals_mcnemar() -> None:
    """9 of 10 that differ are better: 2 (C(10, 0) + C(10, 1)) / 2^10."""
    found = paired([1.0] * 9 + [-1.0] + [0.0] * 30)
    assert (found.better, found.worse, found.pairs, found.mean) == (9, 1, 40, 0.2)
    assert found.p_value == pytest.approx(2 * 11 / 1024)
    assert paired([0.0, 0.0]).p_value == 1.0
    assert paired([1.0, -1.0]).p_value == 1.0
    assert paired([1.0] * 3000).p_value == pytest.approx(0.0)


def test_effect_size_and_interval_are_none_without_variance() -> None:
    assert (paired([0.0, 0.0]).effect, paired([1.0, 1.0]).effect) == (0.0, None)
    assert paired([1.1 - 1.0, 0.1, 0.1]).effect is None  # they differ in the last bits only
    assert (paired([1.0]).low, paired([1.0]).high, paired([1.0]).effect) == (None, None, None)


@settings(max_examples=20)
@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), min_size=1, max_size=9))
def test_p_value_matches_the_sign_permutation_test(differences: list[float]) -> None:
    """Up to the error of ten thousand random sign assignments."""
    reached = abs(sum(differences)) - 1e-9
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    share = sum(each >= reached for each in sums) / len(sums)
    assert paired(differences).p_value == pytest.approx(share, abs=0.025)


@pytest.mark.parametrize(("pairs", "quantile"), [(2, 12.706), (3, 4.303), (5, 2.776), (31, 2.042), (1319, 1.9617)])
def test_confidence_interval_uses_students_t(pairs: int, quantile: float) -> None:
    differences = [0.5 if number % 2 else -0.25 for number in range(pairs)]
    mean = sum(differences) / pairs
    variance = sqrt(sum((each - mean) ** 2 for each in differences) / (pairs - 1))
    found = paired(differences)
    assert (found.high - found.mean) == pytest.approx(quantile * variance / sqrt(pairs), rel=2e-3)
    assert found.low + found.high == pytest.approx(2 * found.mean)
    assert found.effect == pytest.approx(mean / variance)


def test_evaluations_are_compared_by_mean_score_per_prompt() -> None:
    left = rows({"a": [1, 0], "b": [0, 0], "c": [None, None], "d": [1, 1], "e": [1]})
    right = rows({"b": [1, 0], "a": [1, 1], "c": [1, 1], "d": [None, 1], "f": [1]})
    [found] = compare_evaluations(left + rows({"a": [1]}, set="other"), right)
    assert (found.set, found.mode, found.scores) == ("held", "sampled", (0.5, pytest.approx(2.5 / 3)))
    assert (found.difference.pairs, found.left_out) == (3, 3)
    assert [(each.prompt, each.scores) for each in found.changed] == [("a", (0.5, 1.0)), ("b", (0.0, 0.5))]


def test_evaluations_without_common_prompts_are_refused() -> None:
    for other in (rows({"z": [1]}), rows({"a": [1]}, mode="greedy"), rows({"a": [None]})):
        with pytest.raises(RecipeError, match=r"no prompt has a score in both"):
            compare_evaluations(rows({"a": [1]}), other)


def test_eval_samples_are_read_from_runs_stage_folders_and_files(tmp_path: Path) -> None:
    play(tmp_path / "run", fake_recipe(steps=2))
    paths = RunPaths(tmp_path / "run")
    newest = eval_samples.read(paths.root)
    assert newest == eval_samples.read(paths.stage(2, "eval")) != eval_samples.read(paths.stage(0, "eval"))
    for name in ("rows.jsonl", "rows.parquet"):
        eval_samples.write(tmp_path / name, newest)
        found = eval_samples.read(tmp_path / name)
        plain = [{key: value for key, value in row.items() if key != "extras"} for row in found]
        assert plain == [{key: value for key, value in row.items() if key != "extras"} for row in newest]
    [one, two] = compare_evaluations(newest, newest)
    assert (one.mode, two.mode, one.changed, one.difference.p_value) == ("greedy", "sampled", (), 1.0)


def test_inputs_without_eval_samples_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.jsonl").write_text("{\n")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000 + "\n")
    (tmp_path / "other.jsonl").write_text('{"question": "x"}\n')
    with pytest.raises(CorruptArtifactError, match="cannot be read"):
        eval_samples.read(tmp_path / "no.jsonl")
    with pytest.raises(CorruptArtifactError, match="cannot be read"):
        eval_samples.read(tmp_path / "deep.jsonl")
    with pytest.raises(RecipeError, match="has no rows of an evaluation's samples"):
        eval_samples.read(tmp_path / "other.jsonl")
    with pytest.raises(RecipeError, match="is not a run directory"):
        eval_samples.read(tmp_path)
    with pytest.raises(StorageError, match=r"cannot write `.*/gone/out\.jsonl`: No such file or directory"):
        eval_samples.write(tmp_path / "gone" / "out.jsonl", rows({"a": [1]}))


def test_compare_screen_shows_difference_and_changed_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {f"p{number}": [0.0 if number < 12 else 1.0] for number in range(20)}
    after = before | {f"p{number}": [1.0] for number in range(9)} | {"p19": [0.0]}
    for name, scores in (("a", before), ("b", after)):
        eval_samples.write(Path(f"{name}.jsonl"), rows(scores, mode="greedy"))
    assert run(["compare", "a.jsonl", "b.jsonl", "--eval", "--show", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "set          prompts  a.jsonl  b.jsonl  difference [95 %]           effect  p",
        "held greedy  20       0.4      0.8      +0.4000 [+0.1200, +0.6800]  +0.67   0.021",
        "",
        "held greedy: 9 better, 1 worse, 10 equal",
        "prompt  a.jsonl  b.jsonl",
        "p0      0        1",
        "p1      0        1",
        "and 8 more: --show 10",
    ]
    assert run(["compare", "a.jsonl", "b.jsonl", "--eval", "--exit-code"]) == 10
    assert run(["compare", "a.jsonl", "a.jsonl", "--eval", "--exit-code"]) == 0
    capsys.readouterr()
    assert run(["compare", "a.jsonl", "b.jsonl", "--eval", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    [compared] = both["sets"]
    assert len(compared["changed"]) == 10
    assert both["not_compared"] == []
    assert compared["difference"]["p_value"] == pytest.approx(22 / 1024)


def test_sets_in_only_one_evaluation_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    held = rows({"p": [1.0]})
    eval_samples.write(Path("a.jsonl"), held + rows({"q": [1.0]}, set="far") + rows({"p": [0.0]}, mode="greedy"))
    eval_samples.write(Path("b.jsonl"), held + rows({"q": [None]}, set="far"))
    assert run(["compare", "a.jsonl", "b.jsonl", "--eval"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "not compared, because no prompt has a score in both: far sampled, held greedy"
    )


DIFFERENT = {
    "a score": rows({"p": [1.0], "q": [0.5]}),
    "no score of a prompt": rows({"p": [1.0], "q": [None]}),
    "no prompt": rows({"p": [1.0]}),
    "another prompt": rows({"p": [1.0], "q": [1.0], "r": [1.0]}),
    "another set": rows({"p": [1.0], "q": [1.0]}) + rows({"p": [1.0]}, set="far"),
    "another mode": rows({"p": [1.0], "q": [1.0]}) + rows({"p": [1.0]}, mode="greedy"),
    "nothing": rows({"p": [1.0], "q": [1.0]}),
    "other samples with the same mean": rows({"p": [0.0, 2.0], "q": [1.0]}),
}
"""Difference from the evaluation `nothing` -> evaluation."""


@pytest.mark.parametrize("what", DIFFERENT)
def test_exit_code_is_10_if_a_score_differs_or_is_in_only_one_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    eval_samples.write(Path("a.jsonl"), DIFFERENT["nothing"])
    eval_samples.write(Path("b.jsonl"), DIFFERENT[what])
    is_equal = what in ("nothing", "other samples with the same mean")
    for names in (("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl")):
        for json_too in ([], ["--json"]):
            assert run(["compare", *names, "--eval", "--exit-code", *json_too]) == (0 if is_equal else 10)
            assert run(["compare", *names, "--eval", *json_too]) == 0
