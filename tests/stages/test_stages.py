"""Each stage turns the results of its ports into a record; hand-made inputs."""

import math
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from fakes.components import EvenScorer, fake_recipe
from fakes.job import BuiltStages, Stops, Witness, open_run
from ppoctl.algorithms.formulas.learning_rate import LearningRate
from ppoctl.algorithms.generation_specs import REWARD
from ppoctl.algorithms.stage_spec import StageParts
from ppoctl.algorithms.stages.reward import RewardStage, collect, score_all, slowest
from ppoctl.algorithms.stages.updates import MinibatchPlan, OptimizerSchedule
from ppoctl.core.batch.prompts import Message, Prompt, Prompts
from ppoctl.core.batch.records import REWARD_ERROR, REWARD_TIMEOUT, State
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import NonFiniteError, PreemptedError, RewardError
from ppoctl.core.ports import OptimizerStep
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.steps import RunContext, run
from stages import stub_models
from wiring.harness import with_keys


def requests(*ids: str) -> list[ScoreRequest]:
    return [ScoreRequest(name, "", (), "2 4 1", "even", {}, "terminated") for name in ids]


def test_missing_score_is_not_counted_as_zero() -> None:
    scores = [Score(1.0, "ok"), Score(None, "timeout", "10 s"), Score(0.0, "ok"), Score(None, "error", "boom")]
    rewards = collect(scores, requests("a", "b", "c", "d"))
    assert rewards.valid.tolist() == [True, False, True, False]
    assert rewards.outcomes.tolist()[1::2] == [REWARD_TIMEOUT, REWARD_ERROR]
    assert rewards.scores.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert rewards.metrics()["reward/score_mean"] == 0.5
    assert rewards.metrics()["reward/error_frac"] == 0.25


def test_partial_extra_metric_averages_over_scored_rows() -> None:
    scores = [Score(1.0, "ok", extras={"passed": 0.5}), Score(0.0, "ok"), Score(None, "error", "boom")]
    rewards = collect(scores, requests("a", "b", "c"))
    assert rewards.extras == {"passed": [0.5, None, 0.0]}
    assert rewards.metrics()["reward/passed_mean"] == 0.5
    unmeasured = replace(rewards, extras={"passed": [None, None, 0.0]})
    assert "reward/passed_mean" not in unmeasured.metrics()


def test_token_scores_fill_grid_and_plain_scores_last_token() -> None:
    ids = ((2, 4), (3, 4, 1), (1,), (5, 1))
    score_requests = [replace(one, token_ids=its) for one, its in zip(requests("a", "b", "c", "d"), ids, strict=True)]
    none = Score(None, "unreachable", "no answer")
    scores = [Score(1.5, "ok", token_values=(0.5, 1.0)), Score(2.0, "ok"), none, Score(-3.0, "ok")]
    rewards = collect(scores, score_requests)
    assert rewards.token_scores is not None
    assert rewards.token_scores.tolist() == [[0.5, 1.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, -3.0, 0.0]]
    assert rewards.valid.tolist() == [True, True, False, True]
    assert rewards.metrics()["reward/error_frac"] == pytest.approx(1 / 4)
    assert collect(scores[1:], score_requests[1:]).token_scores is None


def test_slowest_sample_is_reported() -> None:
    score_requests = requests("a", "b", "c", "d", "e")
    scores = [Score(1.0, "ok", seconds=0.1)] * 4
    late = Score(None, "timeout", "10 s", seconds=10.0)
    assert slowest([*scores, late], score_requests) == (
        "the slowest sample took 10.0 s to score (mean 2.1 s): of prompt `e`, timeout"
    )
    assert slowest([*scores, replace(late, seconds=0.9)], score_requests) is None
    assert slowest([late] * 5, score_requests) is None
    metrics = collect([*scores, late], score_requests).timing_metrics()
    assert metrics == {"reward/seconds_mean": pytest.approx(2.08), "reward/seconds_max": 10.0}


def test_score_all_flushes_batch_scorer() -> None:
    class Gathers(SlowScorer):
        def flush(self) -> None:
            for future in self.futures[1:]:
                future.set_result(Score(float(len(self.futures)), "ok"))

    scored = score_all(Gathers(), requests("a", "b", "c"), lambda: None)
    assert [score.value for score in scored] == [1.0, 3.0, 3.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_reward_raises_and_names_prompt(value: float) -> None:
    with pytest.raises(NonFiniteError, match="the reward of `b`"):
        collect([Score(1.0, "ok"), Score(value, "ok")], requests("a", "b"))


def test_too_many_score_errors_raise_and_name_first(tmp_path: Path) -> None:
    wiring = open_run(tmp_path / "run", fake_recipe(), Witness())
    rollouts = first_rollouts(wiring.job)
    scorer = EvenScorer({"p1": Score(None, "error", "ValueError: no number")})
    stage = RewardStage(scorer, max_error_frac=0.2, fingerprint="", between=Stops().between)
    prompts = wiring.job.prompts(1)
    with pytest.raises(RewardError, match=r"2 of 8 samples .*25.0%.*`p1` error ValueError") as caught:
        stage.run(prompts, rollouts)
    assert caught.value.exit_code == 4
    assert stage.name == "reward"
    assert replace(stage, max_error_frac=0.25).run(prompts, rollouts).valid.sum() == 6
    # With the bound that the hint suggests the step passes: 1 of 3 is at most 0.34, but above 0.33.
    few = [Score(1.0, "ok"), Score(1.0, "ok"), Score(None, "error", "boom")]
    with pytest.raises(RewardError) as caught:
        stage._require_few_errors(few, requests("a", "b", "c"), [None] * 3, 1, generated=1)
    assert caught.value.hint is not None
    assert "reward.max_error_frac=0.34`" in caught.value.hint


@pytest.mark.parametrize("name", ["shaped", "length", "acc@1"])
def test_metric_name_that_comes_late_is_refused_and_rollouts_are_kept(tmp_path: Path, name: str) -> None:
    wiring = open_run(tmp_path / "run", fake_recipe(), Witness())
    rollouts = first_rollouts(wiring.job)
    scorer = EvenScorer({"p1": Score(1.0, "ok", extras={name: 7.0})})
    accept = " --set reward.function=/r/late.py:score"
    stage = RewardStage(scorer, max_error_frac=1.0, fingerprint="", between=Stops().between, accept=accept)
    with pytest.raises(RewardError, match=f"the reward returns a metric `{name}`") as caught:
        stage.run(wiring.job.prompts(1), rollouts)
    plain = name.replace("@", "_")
    assert caught.value.hint == (
        f"return it under another name, such as `my_{plain}`, then run `ppoctl resume RUN{accept}`: "
        "the rollouts are saved"
    )


def test_hint_of_a_reward_that_raises_accepts_the_changed_file(tmp_path: Path) -> None:
    keys = {"reward": {"kind": "python", "function": "/r/my reward.py:score"}}
    recipe = Recipe.model_validate(with_keys(keys))
    wiring = open_run(tmp_path / "run", fake_recipe(), Witness())
    parts = SimpleNamespace(
        scorer=EvenScorer({"p1": Score(None, "error", "KeyError")}),
        generation=SimpleNamespace(gate=SimpleNamespace(between=lambda: None)),
        notify=lambda _: None,
        reward_digest="",
    )
    stage = REWARD.build(recipe, cast(StageParts, parts))
    with pytest.raises(RewardError) as caught:
        stage.run(wiring.job.prompts(1), first_rollouts(wiring.job))
    assert (caught.value.hint or "").startswith(
        "the rollouts are saved: fix the reward and run `ppoctl resume RUN "
        "--set 'reward.function=/r/my reward.py:score'`"
    )


def test_scorer_receives_all_fields_of_response() -> None:
    row = Prompt("a", (5,), "[user] why?", "x", (Message("user", "why?"),), {"level": 3})
    scorer = AskedScorer()
    stage = RewardStage(scorer, max_error_frac=0.0, fingerprint="", between=Stops().between)
    rollouts = stub_models.rollouts(finish=torch.tensor([0, 1]), prompt_ids=["b", "a"], stamps=["actor@0:first"] * 2)
    rewards = stage.run(Prompts(1, (row, replace(row, id="b", answer=None, fields={}))), rollouts)
    assert scorer.requests == [
        ScoreRequest("b", "[user] why?", (Message("user", "why?"),), "2 1", None, {}, "terminated", (2, 1)),
        ScoreRequest(
            "a", "[user] why?", (Message("user", "why?"),), "3 4 1", "x", {"level": 3}, "truncated", (3, 4, 1)
        ),
    ]
    assert rewards.truths == [None, "x"]


class AskedScorer(EvenScorer):
    """Records its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[ScoreRequest] = []

    def submit(self, request: ScoreRequest) -> Future[Score]:
        self.requests.append(request)
        return super().submit(request)


class SlowScorer:
    """Never reaches the second request."""

    def __init__(self) -> None:
        self.futures: list[Future[Score]] = []

    def submit(self, request: ScoreRequest) -> Future[Score]:
        self.futures.append(Future())
        if len(self.futures) == 1:
            self.futures[0].set_result(Score(1.0, "ok"))
        return self.futures[-1]

    def close(self) -> None:
        pass


def test_stop_while_waiting_for_scores_cancels_the_rest() -> None:
    num_calls = 0

    def stop_at_the_third_look() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise PreemptedError("asked to stop")

    scorer = SlowScorer()
    with pytest.raises(PreemptedError):
        score_all(scorer, requests("a", "b", "c"), stop_at_the_third_look)
    assert [future.cancelled() for future in scorer.futures] == [False, True, True]


def test_non_finite_gradient_stops_run_without_commit(tmp_path: Path) -> None:
    wiring = open_run(tmp_path / "run", fake_recipe(), Witness())
    actor = wiring.job.states.engines["actor"]
    start = actor.start

    def start_broken() -> None:
        start()
        actor.table[3] = math.nan  # type: ignore[attr-defined]

    actor.start = start_broken  # type: ignore[method-assign]
    with pytest.raises((NonFiniteError, RuntimeError)):
        run(wiring.job)
    assert not (tmp_path / "run/steps/000001/70-actor_update").exists()


def test_each_epoch_shuffles_every_row_once() -> None:
    plan = plan_of(epochs=2)
    state = State("actor", 0, 0, "x")
    minibatches = plan.minibatches(state, 8, stub_models.in_loss(torch.ones(8, 3, dtype=torch.bool)))
    assert [m.totals for m in minibatches] == [(12,)] * 4
    epochs = [torch.cat([m.rows for m in minibatches[i : i + 2]]) for i in (0, 2)]
    assert all(sorted(rows.tolist()) == list(range(8)) for rows in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    assert [m.step.lr for m in minibatches] == [0.25, 0.5, 0.75, 1.0]


def test_fully_masked_minibatch_is_skipped() -> None:
    mask = torch.zeros(8, 3, dtype=torch.bool)
    mask[0, 0] = True
    (only,) = plan_of(epochs=1).minibatches(State("actor", 0, 0, "x"), 8, stub_models.in_loss(mask))
    assert only.totals == (1,)


def test_minibatch_with_one_nonempty_term_is_trained() -> None:
    masks = [torch.full((8, 1), fill_value=is_second) for is_second in (False, True)]
    (first, _) = plan_of(epochs=1).minibatches(State("actor", 0, 0, "x"), 8, stub_models.in_loss(*masks))
    assert first.totals == (0, 4)


def plan_of(*, epochs: int) -> MinibatchPlan:
    schedule = OptimizerSchedule(
        LearningRate(1.0, "constant", 4, 0, 0.0), OptimizerStep(1.0, 0.0, 1.0, 0.9, 0.95, 1e-8)
    )
    return MinibatchPlan(epochs, 4, 7, schedule)


def first_rollouts(job: RunContext):
    return BuiltStages(job, 1).rollout.run(job.states.initial["actor"], job.prompts(1))
