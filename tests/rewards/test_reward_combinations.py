"""Rewards that combine scorers: weighted sums, and a scorer selected by row."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from ppoctl.core.batch.prompts import Json, Prompt
from ppoctl.core.batch.scores import BatchScorer, Score, ScoreRequest
from ppoctl.core.errors import NonFiniteError, RecipeError, RewardError
from ppoctl.recipe.fingerprint import fingerprint
from ppoctl.recipe.loading.load import load
from ppoctl.rewards.choose_reward import ChooseReward, ChoosingScorer
from ppoctl.rewards.exact_match import ExactMatchScorer
from ppoctl.rewards.gsm8k import Gsm8kScorer
from ppoctl.rewards.probe import probe, probed_rows
from ppoctl.rewards.reward_rows import RowCheck
from ppoctl.rewards.reward_table import Reward
from ppoctl.rewards.scorer_table import RewardTable
from ppoctl.rewards.sum import SumReward, SumScorer, summed
from rewards.asking import request, scores_of, word_ids
from rewards.scorers_in_process import Gathers, Held

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"


def reward(**keys: Any) -> Any:
    table: TypeAdapter[RewardTable] = TypeAdapter(Reward)
    return table.validate_python(keys)


SUM = {"kind": "sum", "parts": {"answer": {"kind": "gsm8k"}, "bare": {"kind": "exact_match", "weight": -0.5}}}
CHOOSE = {
    "kind": "choose",
    "cases": {"openai/gsm8k": {"kind": "gsm8k"}, "3": {"kind": "exact_match", "ignore_case": True}},
}


def about(response: str, truth: str, fields: Mapping[str, Json]) -> ScoreRequest:
    return ScoreRequest("train/0", "", (), response, truth, fields, "terminated")


def test_sum_reward_weighs_and_reports_parts() -> None:
    requests = [request("42", "42"), request("#### 42", "42"), request("#### 4", "#### 4")]
    wrong, right, both = scores_of(reward(**SUM), *requests)
    assert wrong == Score(-0.5, "ok", extras={"answer": 0.0, "answer_lenient": 1.0, "bare": 1.0}, answer="42")
    assert right == Score(1.0, "ok", extras={"answer": 1.0, "answer_lenient": 1.0, "bare": 0.0}, answer="42")
    assert both.value == 0.5


def test_sum_without_score_of_a_part_has_no_score() -> None:
    scores = {"a": Score(1.0, "ok"), "b": Score(None, "unreachable", "no answer"), "c": Score(None, "error")}
    assert summed({"a": 1.0, "b": 1.0, "c": 1.0}, scores, tokens=2) == Score(
        None, "unreachable", "component `b`: no answer"
    )


def test_sum_adds_plain_scores_at_last_token() -> None:
    parts = {"a": Score(3.0, "ok", token_values=(1.0, 2.0)), "b": Score(1.0, "ok")}
    whole = summed({"a": 2.0, "b": 0.5}, parts, tokens=2)
    assert (whole.value, whole.token_values) == (6.5, (2.0, 4.5))


def test_sum_is_independent_of_part_order() -> None:
    parts = {name: Score(value, "ok") for name, value in {"a": 0.1, "b": 0.2, "c": 0.3}.items()}
    ones = dict.fromkeys(parts, 1.0)
    assert summed(ones, parts, tokens=1).value == summed(ones, dict(reversed(parts.items())), tokens=1).value == 0.6


def test_sum_parts_are_scored_concurrently_and_cancelled_together() -> None:
    first, second = Held(), Held()
    scorer = SumScorer({"a": (1.0, first), "b": (1.0, second)})
    pending, cancelled = scorer.submit(request("x")), scorer.submit(request("y"))
    assert (first.asked, second.asked) == (["x", "y"], ["x", "y"])
    second.futures[0].set_result(Score(1.0, "ok"))
    assert not pending.done()
    first.futures[0].set_result(Score(2.0, "ok"))
    assert pending.result(timeout=1).value == 3.0
    assert cancelled.cancel()
    assert first.futures[1].cancelled()
    assert second.futures[1].cancelled()
    scorer.close()
    assert (first.is_closed, second.is_closed) == (True, True)


def test_sum_raises_error_of_its_part() -> None:
    part = Held()
    whole = SumScorer({"a": (1.0, part)}).submit(request("x"))
    part.futures[0].set_exception(NonFiniteError("nan"))
    with pytest.raises(NonFiniteError):
        whole.result(timeout=1)


def test_sum_flushes_batch_scorer_parts() -> None:
    scorer = SumScorer({"a": (1.0, Gathers())})
    whole = scorer.submit(request("x"))
    assert isinstance(scorer, BatchScorer)
    assert not whole.done()
    scorer.flush()
    assert whole.result(timeout=1).value == 2.0


@pytest.mark.parametrize(
    ("fields", "value"),
    [({"data_source": "openai/gsm8k"}, 1.0), ({"data_source": 3}, 0.0), ({"data_source": "other"}, None), ({}, None)],
)
def test_choose_reward_scores_row_by_its_case(fields: dict[str, Json], value: float | None) -> None:
    (score,) = scores_of(reward(**CHOOSE), about("thus #### 4", "4", fields))
    assert score.value == value
    if value is None:
        assert score.outcome == "error"
        assert "data_source" in score.message


def test_choose_reward_falls_back_to_otherwise() -> None:
    case, otherwise = Held(), Held()
    scorer = ChoosingScorer(reward(**CHOOSE), {"openai/gsm8k": case}, otherwise)
    scorer.submit(about("a", "4", {"data_source": "openai/gsm8k"}))
    scorer.submit(about("b", "4", {"data_source": "aime"}))
    scorer.submit(about("c", "4", {}))
    assert (case.asked, otherwise.asked) == (["a"], ["b", "c"])


def checked(table: Any, rows: list[Prompt]) -> RowCheck:
    """Return a check of these rows; the second last row occurs twice."""
    check = RowCheck(table, "data.train")
    for number, row in enumerate(rows):
        check.see(row.id, row.answer, row.fields, 2 if number == len(rows) - 2 else 1)
    return check


def test_rows_without_case_are_counted_and_named() -> None:
    rows = [Prompt(f"train/{n}", (), "", "4", (), {"data_source": source}) for n, source in enumerate(["3", "x"])]
    rows.append(Prompt("train/3", (), "", "4", (), {"level": 1}))
    with pytest.raises(RewardError) as caught:
        checked(reward(**CHOOSE), rows).require()
    assert caught.value.message == (
        "the reward cannot score all rows of [data.train]: 2 rows, first `train/1`: `data_source` is `x`, and the "
        "reward has no case of that name (cases: `openai/gsm8k`, `3`); 1 row, first `train/3`: the row has no field "
        "`data_source`, which selects the reward (fields of the row: `level`)"
    )
    assert caught.value.hint == "write a table [reward.cases.x], or [reward.otherwise]"
    with pytest.raises(RewardError) as caught:  # a column cannot help: only a mix has sources
        checked(reward(**{**CHOOSE, "by": "source"}), rows).require()
    assert (caught.value.hint or "").startswith("make the set a mix: only a mix names the `source` of its rows")
    checked(reward(**CHOOSE, otherwise={"kind": "exact_match"}), rows).require()


def test_row_requires_ground_truth_only_if_its_scorer_compares() -> None:
    train, held = RowCheck(reward(**SUM), "data.train"), RowCheck(reward(**SUM), "data.eval.held")
    for check in (train, held):
        check.see("0", "4", {})
        check.see("1", None, {})
    with pytest.raises(RewardError, match=r"1 row, first `1`: there is no ground truth") as caught:
        train.require()
    assert "data.train.answer" not in (caught.value.hint or ""), "only one format has this key"
    held.require()


def test_rows_whose_truth_is_not_read_to_its_end_are_counted_and_named() -> None:
    check = RowCheck(reward(kind="gsm8k"), "data.eval.held")
    for number, truth in enumerate(["4", "#### 3/4", "", "#### 1e3", "four", "#### 5, 7"]):
        check.see(f"held/{number}", truth, {}, 2 if number == 3 else 1)
    assert check.empty == 1
    with pytest.raises(RewardError) as caught:
        check.require()
    assert caught.value.message == (
        "the reward cannot score all rows of [data.eval.held]: 4 rows, first `held/1`: the ground truth `#### 3/4` "
        "is not one number, so only a part of it would be read (also `held/3`, `held/5`); 1 row, first `held/4`: the "
        "ground truth `four` is neither a number nor a text with `#### number`"
    )
    assert caught.value.hint == 'set `kind = "math"`, which reads fractions, formulas and units'
    empty = RowCheck(reward(kind="gsm8k"), "data.train")
    empty.see("0", " ", {}, 3)
    with pytest.raises(RewardError, match=r"the ground truth of all rows of \[data.train\] is empty"):
        empty.require()


def test_gold_answers_come_from_scorer_of_row() -> None:
    table = reward(**CHOOSE)
    rows = [Prompt(f"train/{n}", (), "", "4", (), {"data_source": "openai/gsm8k"}) for n in range(9)]
    rows.append(Prompt("train/9", (), "", "Yes", (), {"data_source": "3"}))
    tried = probed_rows(table, rows)
    assert [row.id for row in tried] == ["train/0", "train/1", "train/2", "train/3", "train/9"]
    with closing(table.open()) as scorer:
        probed = probe(scorer, table, tried, word_ids)
    assert all(row.is_sound for row in probed)
    assert (probed[0].tried["gold"], probed[-1].tried["gold"]) == ("The answer is\n#### 4", "Yes")


def test_sum_gold_answer_comes_from_first_part_with_candidates() -> None:
    candidates = reward(**SUM).candidates("4")
    assert candidates is not None
    assert candidates.gold == "The answer is\n#### 4"


def test_combined_reward_reports_properties_of_its_parts() -> None:
    assert [type(single).__mro__[1] for single in reward(**SUM).singles] == [Gsm8kScorer, ExactMatchScorer]
    assert reward(**SUM).reads_truth
    assert isinstance(reward(**SUM), SumReward)
    assert isinstance(reward(**CHOOSE), ChooseReward)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["reward={kind='sum', parts={}}"], "reward.parts"),
        (["reward={kind='sum', parts={score={kind='gsm8k'}}}"], "`reward/score_mean` is the name of another metric"),
        (["reward={kind='sum', parts={'a b'={kind='gsm8k'}}}"], "`a b` names a component of the reward"),
        (["reward={kind='sum', parts={a={kind='sum'}}}"], 'must be one of `"gsm8k"`'),
        (["reward={kind='choose', cases={a={kind='gsm8k', weight=2.0}}}"], "unknown key `reward.cases.a.weight`"),
    ],
)
def test_invalid_combination_raises(sets: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message.replace("(", r"\(")):
        load([QUICKSTART], sets, {})


def test_part_weight_changes_fingerprint_and_part_timeout_does_not() -> None:
    def fingerprint_of(*sets: str) -> str:
        whole = "reward={kind='sum', parts={a={kind='gsm8k'}, b={kind='gsm8k', strict=false}}}"
        return fingerprint(load([QUICKSTART], [whole, *sets], {}).recipe, ("reward",))

    assert (
        fingerprint_of() == fingerprint_of("reward.parts.a.timeout_s=3") == fingerprint_of("reward.parts.a.weight=1")
    )
    assert (
        len(
            {
                fingerprint_of(),
                fingerprint_of("reward.parts.a.weight=2"),
                fingerprint_of("reward.parts.b.strict=true"),
            }
        )
        == 3
    )


def test_metrics_of_parts_may_be_expected_and_misspelled_raise() -> None:
    whole = "reward={kind='sum', parts={answer={kind='gsm8k'}}}"
    load([QUICKSTART], [whole, 'expect."reward/answer_mean".min=0', 'expect."reward/answer_lenient_mean".min=0'], {})
    load([QUICKSTART], ["reward={kind='python', function='p:f'}", 'expect."reward/short_mean".min=0'], {})
    with pytest.raises(RecipeError, match=r"no metric is called `reward/anser_mean`"):
        load([QUICKSTART], [whole, 'expect."reward/anser_mean".min=0'], {})
    with pytest.raises(RecipeError, match=r"`reward/scor_mean`; did you mean `reward/score_mean`"):
        load([QUICKSTART], ['expect."reward/scor_mean".min=0'], {})


def test_mix_with_some_ground_truth_passes_eval_score_check() -> None:
    rows = QUICKSTART.with_suffix("") / "test.jsonl"
    bare = f"{{format='columns', path='{rows}', prompt='question'}}"
    whole = f"{{format='gsm8k', path='{rows}'}}"
    load([QUICKSTART], [f"data.eval.heldout={{format='mix', sources={{bare={bare}, whole={whole}}}}}"], {})
    with pytest.raises(RecipeError, match="have no ground truth"):
        load([QUICKSTART], [f"data.eval.heldout={{format='mix', sources={{bare={bare}}}}}"], {})
