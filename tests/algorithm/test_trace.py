"""Traces: what a step function calls is found without running it, and a step function that depends on a value that a
stage computes is refused."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.step_functions import TWO_ROUNDS
from for_each import id_in_order
from ppoctl.algorithms.advantages_spec import ADVANTAGES
from ppoctl.algorithms.choose import (
    all_step_functions,
    missing,
    reported_at,
    step_function_at,
    trace_at,
    traces,
    updated_role,
)
from ppoctl.algorithms.forward_specs import LOGPROBS, VALUES
from ppoctl.algorithms.generation_specs import REWARD, ROLLOUT
from ppoctl.algorithms.kl_use import kl_use
from ppoctl.algorithms.ppo import PPO
from ppoctl.algorithms.remax_step import REMAX
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs, trace
from ppoctl.algorithms.update_specs import ACTOR_UPDATE
from ppoctl.core.batch.fields import FIELDS
from ppoctl.store.outline import Outlines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from store import fixture_runs


def test_trace_lists_stages_inputs_and_trained_roles() -> None:
    found = trace(PPO)
    assert [(entry.name, entry.reads, entry.trains) for entry in found.outline.stages] == [
        ("rollout", ("actor", "prompts"), None),
        ("reward", ("prompts", "rollout"), None),
        ("values", ("critic", "rollout"), None),
        ("logprobs", ("actor", "rollout"), None),
        ("advantages", ("rollout", "reward", "values", "logprobs", "carry"), None),
        ("critic_update", ("critic", "rollout", "values", "advantages"), "critic"),
        ("actor_update", ("actor", "rollout", "logprobs", "advantages"), "actor"),
    ]
    assert found.roles == ("actor", "critic")
    assert found["rollout.7"] is ROLLOUT
    with pytest.raises(KeyError):
        found["correction"]


def test_greedy_responses_have_rows_of_their_own_and_advantages_those_of_the_rollout() -> None:
    found = trace(REMAX)
    assert [(entry.name, entry.reads, entry.rows) for entry in found.outline.stages] == [
        ("rollout", ("actor", "prompts"), None),
        ("reward", ("prompts", "rollout"), None),
        ("greedy_rollout", ("actor", "prompts"), "greedy_rollout"),
        ("greedy_reward", ("prompts", "greedy_rollout"), "greedy_rollout"),
        ("logprobs", ("actor", "rollout"), None),
        ("advantages", ("rollout", "reward", "logprobs", "carry", "greedy_rollout", "greedy_reward"), None),
        ("actor_update", ("actor", "rollout", "logprobs", "advantages"), None),
    ]
    assert found.roles == ("actor",)
    reward, greedy_reward = found["reward"], found["greedy_reward"]
    assert [each.reports(fake_recipe(), "reward/part_mean") for each in (reward, greedy_reward)] == [True, False]


def test_every_step_function_generates_with_the_policy() -> None:
    for function in all_step_functions():
        for recipe in (fake_recipe(), fake_recipe(ppo={"minibatch_seqs": 4, "old_logprobs": "sampler"})):
            passes = [each for stage in trace(function).stages for each in stage.passes(recipe)]
            assert {each.model for each in passes if each.kind == "generate"} == {POLICY}
            roles = {*trace(function).roles, "reference", ""}
            assert {each.model for each in passes} <= roles, function.name


def test_every_stage_has_a_known_kind_of_record() -> None:
    for function in all_step_functions():
        assert {stage.kind for stage in trace(function).stages} <= FIELDS.keys()


def test_rows_of_a_second_round_follow_its_rollout() -> None:
    entries = {entry.name: entry for entry in trace(TWO_ROUNDS).outline.stages}
    assert all(entry.rows is None and entry.at_most == 1 and entry.loop == 0 for entry in entries.values())
    assert entries["actor_update"].reads == ("actor", "rollout.2", "logprobs.2", "advantages.2")


def _of(body: Any) -> StepFunction:
    def run(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
        rollouts = run_stage(ROLLOUT, inputs.states["actor"], inputs.prompts)
        rewards = run_stage(REWARD, inputs.prompts, rollouts)
        body(run_stage, inputs, rollouts, rewards)
        return StepOutputs({}, inputs.carry, ((rollouts, rewards),))

    return StepFunction("tried", run)


@pytest.mark.parametrize(
    "body",
    [
        lambda run_stage, inputs, rollouts, rewards: 1 if rewards.all_equal else 2,
        lambda run_stage, inputs, rollouts, rewards: rewards.scores > 0,
        lambda run_stage, inputs, rollouts, rewards: rewards == rollouts,
        lambda run_stage, inputs, rollouts, rewards: len(rollouts.texts),
        lambda run_stage, inputs, rollouts, rewards: list(rewards.scores),
        lambda run_stage, inputs, rollouts, rewards: float(inputs.carry.kl_coef),
    ],
    ids=["if", "greater", "equal", "len", "iter", "float"],
)
def test_step_function_that_reads_a_computed_value_is_refused(body: Any) -> None:
    with pytest.raises(
        TypeError, match=r"a step function reads a value that `\w+` computes; only `Round.end_if` may"
    ):
        trace(_of(body))


def test_records_with_different_rows_are_refused() -> None:
    def body(run_stage: RunStage, inputs: StepInputs, rollouts: Any, rewards: Any) -> None:
        second = run_stage(replace(ROLLOUT, name="rollout.2"), inputs.states["actor"], inputs.prompts)
        run_stage(
            ADVANTAGES, second, rewards, None, run_stage(LOGPROBS, inputs.states["actor"], second), inputs.carry
        )

    message = r"stage `advantages` receives records with different rows: those of \['rollout', 'rollout.2'\]"
    with pytest.raises(TypeError, match=message):
        trace(_of(body))


@pytest.mark.parametrize("name", list(fixture_runs.STOPS))
def test_recorded_outlines_of_a_fixture_run_equal_the_traces_of_its_recipe(name: str, tmp_path: Path) -> None:
    recorded = RecordedRun(RunPaths(fixture_runs.bring(name, tmp_path))).outlines
    found = traces(fixture_runs.recipe())
    assert recorded == Outlines({steps.start: each.outline for steps, each in found.items()})
    assert list(found) == [range(1, 2), range(2, 4)]


@pytest.mark.parametrize(
    ("kl", "source", "uses"),
    [
        ({"place": "none"}, "trainer", set()),
        ({"place": "reward"}, "trainer", {"is_on", "is_estimated"}),
        ({"place": "loss"}, "trainer", {"is_on", "is_estimated", "is_read_by_update"}),
        ({"place": "loss"}, "sampler", {"is_on", "is_estimated", "is_read_by_update"}),
        ({"place": "loss"}, "current", {"is_on", "is_estimated", "is_read_by_update", "is_reported_by_update"}),
        ({"place": "reward", "estimator": "full"}, "trainer", {"is_on", "is_full_before"}),
        ({"place": "loss", "estimator": "full"}, "trainer", {"is_on", "is_full_in_update", "is_reported_by_update"}),
        (
            {"place": "loss", "estimator": "full", "adaptive": {"target_per_token": 0.1, "horizon_seqs": 1000}},
            "trainer",
            {"is_on", "is_full_before", "is_full_in_update", "adapts"},
        ),
    ],
    ids=id_in_order,
)
def test_kl_use_of_each_setting(kl: dict[str, Any], source: str, uses: set[str]) -> None:
    table = {"place": "none"} if kl == {"place": "none"} else {"coef": 0.1, **kl}
    recipe = fake_recipe(ppo={"epochs": 1, "minibatch_seqs": 8, "kl": table, "old_logprobs": source})
    assert {name for name, value in asdict(kl_use(recipe)).items() if value} == uses


@pytest.mark.parametrize("critic_only", [0, 1, 3, 4, 9])
def test_traces_of_a_run_equal_the_trace_of_each_step(critic_only: int) -> None:
    recipe = fake_recipe(steps=4, ppo={"minibatch_seqs": 4, "critic_only_steps": critic_only})
    found = traces(recipe)
    assert found == traces(recipe, lambda recipe, step: step_function_at(recipe, step))
    by_step = [each.step_function for steps, each in found.items() for _ in steps]
    assert by_step == [step_function_at(recipe, step).name for step in range(1, 5)]


def test_metrics_are_reported_at_the_steps_of_their_stages() -> None:
    recipe = fake_recipe(steps=1_000_000, ppo={"minibatch_seqs": 4, "critic_only_steps": 2})
    assert reported_at(recipe, "value/loss") == [range(1, 3), range(3, 1_000_001)]
    assert reported_at(recipe, "policy/loss") == [range(3, 1_000_001)]
    assert reported_at(recipe, "time/actor_update_s") == [range(3, 1_000_001)]
    assert [updated_role(recipe, name) for name in ("policy/loss", "value/loss", "reward/score_mean")] == [
        "actor",
        "critic",
        None,
    ]


def test_metric_of_a_stage_that_no_step_runs_names_the_stage() -> None:
    recipe = fake_recipe(ppo={"minibatch_seqs": 4, "advantages": {"kind": "grpo"}}, critic=None)
    lacking = missing(recipe, "value/explained_variance")
    assert lacking is not None
    assert lacking.needs == "belongs to the stage `critic_update`, which no step of this recipe runs"
    time = missing(recipe, "time/values_s")
    assert time is not None
    assert "`values`" in time.needs
    assert missing(recipe, "policy/loss") is None
    assert {stage.name for stage in trace_at(recipe, 1).stages} == {
        ROLLOUT.name,
        REWARD.name,
        LOGPROBS.name,
        ADVANTAGES.name,
        ACTOR_UPDATE.name,
    }
    assert VALUES not in trace_at(recipe, 1).stages


def _trained(body: Any) -> Any:
    def run(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
        body(run_stage, inputs)
        return StepOutputs({}, inputs.carry, ())

    return trace(StepFunction("tried", run))


def test_two_stages_of_one_name_are_refused() -> None:
    def body(run_stage: RunStage, inputs: StepInputs) -> None:
        for _ in range(2):
            run_stage(ROLLOUT, inputs.states["actor"], inputs.prompts)

    with pytest.raises(TypeError, match="two stages of a step function are called `rollout`"):
        _trained(body)


def test_loop_inside_a_loop_is_refused() -> None:
    def body(run_stage: RunStage, inputs: StepInputs) -> None:
        for _ in run_stage.rounds(at_most=2):
            list(run_stage.rounds(at_most=3))

    with pytest.raises(TypeError, match="a loop over rounds inside another one"):
        _trained(body)


def test_loop_that_ends_by_break_is_refused() -> None:
    def body(run_stage: RunStage, inputs: StepInputs) -> None:
        for current in run_stage.rounds(at_most=2):
            current(ROLLOUT, inputs.states["actor"], inputs.prompts)
            break

    with pytest.raises(TypeError, match=r"`tried` leaves a loop over rounds; only `Round\.end_if` may end it"):
        _trained(body)


def test_records_of_the_step_before_have_the_rows_that_its_stages_define() -> None:
    def body(run_stage: RunStage, inputs: StepInputs) -> None:
        rollouts, rewards = inputs.previous(ROLLOUT), inputs.previous(REWARD)
        logprobs = run_stage(LOGPROBS, inputs.states["actor"], rollouts)
        run_stage(ADVANTAGES, rollouts, rewards, None, logprobs, inputs.carry)
        run_stage(REWARD, inputs.prompts, run_stage(ROLLOUT, inputs.states["actor"], inputs.prompts))

    entries = _trained(body).outline.stages
    assert [(entry.name, entry.rows) for entry in entries] == [
        ("logprobs", "rollout@-1"),
        ("advantages", "rollout@-1"),
        ("rollout", None),
        ("reward", None),
    ]
