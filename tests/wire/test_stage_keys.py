"""Stages that depend on a recipe key: their fingerprints, epochs, schedules and settings."""

from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.fingerprints import STAGES, stage_fingerprint, stages_that_read
from fakes.job import BuiltStages, Witness, open_run, play
from for_each import id_in_order
from ppoctl.algorithms.advantages_spec import ADVANTAGES
from ppoctl.algorithms.formulas.aggregation import SequenceSum
from ppoctl.algorithms.formulas.policy_loss import PolicyClip
from ppoctl.algorithms.pf_ppo import RAW_ADVANTAGES
from ppoctl.algorithms.stages.actor_update import ActorUpdateStage
from ppoctl.algorithms.stages.critic_update import CriticUpdateStage
from ppoctl.algorithms.stages.updates import MinibatchPlan
from ppoctl.core.batch.records import State
from ppoctl.run.loop.steps import run
from ppoctl.store import manifest as manifests
from ppoctl.store.run_paths import RunPaths

PPO = {"epochs": 2, "minibatch_seqs": 4, "kl": {"place": "reward", "coef": 0.05}}
ROLLOUT = {"prompts_per_step": 4, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 6}
DECAYED = {"lr": 1.0, "lr_schedule": "linear"}
BOTH = {"critic_update", "actor_update"}


def ppo(**changes: Any) -> dict[str, Any]:
    return {"ppo": {**PPO, **changes}}


@pytest.mark.parametrize(
    ("tables", "readers"),
    [
        ({"seed": 9}, {"rollout", "resample", "eval", *BOTH}),
        (
            {"model": {"path": "other", "dtype": "float32"}},
            set(STAGES) - {"reward", "correction", "advantages", "resample", "whitening"},
        ),
        ({"data": {"train": {"format": "gsm8k", "path": "other"}}}, {"rollout"}),
        ({"rollout": {**ROLLOUT, "temperature": 0.5}}, {"rollout", "logprobs", "actor_update"}),
        ({"rollout": {**ROLLOUT, "stop_strings": ["x"]}}, {"rollout", "eval"}),
        ({"reward": {"kind": "exact_match", "max_error_frac": 0.5}}, {"reward", "eval"}),
        ({"reward": {"kind": "exact_match", "scale": {"from": [0, 1], "to": [-1, 1]}}}, {"advantages"}),
        (ppo(kl={"place": "reward", "coef": 0.5}), {"logprobs", "advantages", "actor_update"}),
        (ppo(advantages={"kind": "gae", "gamma": 0.9}), {"advantages"}),
        (ppo(advantages={"kind": "monte_carlo"}), {"advantages"}),
        (ppo(critic_only_until={"explained_variance": 0.5, "at_most": 1}), {"advantages"}),
        (ppo(truncated="filter"), {"advantages"}),
        (ppo(whiten_rewards=True), {"advantages"}),
        (ppo(resample={"kind": "max_min"}), {"resample"}),
        (ppo(truncated="bootstrap"), {"values", "advantages"}),
        (ppo(value_loss={"clip": 0.2}), {"critic_update"}),
        (ppo(policy_loss={"clip_low": 0.1}), {"actor_update"}),
        (ppo(policy_loss={"kind": "clip", "clip_low": 0.2}), set()),
        (ppo(policy_loss={"kind": "gspo"}), {"actor_update"}),
        (ppo(policy_loss={"kind": "reinforce"}), {"actor_update"}),
        (ppo(policy_loss={"aggregation": "sequence_mean_token_sum"}), {"actor_update"}),
        (ppo(policy_loss={"positive_nll_coef": 0.1}), {"actor_update"}),
        (ppo(old_logprobs="sampler"), {"logprobs"}),
        (ppo(rollout_correction={"kind": "tis"}), {"correction"}),
        (ppo(rollout_rejection={"kind": "ratio", "level": "token", "max_ratio": 2.0}), {"correction"}),
        (ppo(max_sequence_gap=1.1), {"correction"}),
        (ppo(critic_epochs=3), {"critic_update"}),
        (ppo(minibatch_seqs=2), BOTH),
        (ppo(minibatch_order="in_order"), BOTH),
        ({"critic": {"optimizer": {"lr": 0.1, "lr_ticks": "step"}}}, {"critic_update"}),
        (ppo(critic_minibatch_seqs=8), {"critic_update"}),
        (ppo(value_loss={"aggregation": "fixed_length"}), {"critic_update"}),
        ({"actor": {"optimizer": {"lr": 0.01}}}, {"actor_update"}),
        ({"critic": {"optimizer": {"lr": 0.1, "beta2": 0.9}}}, {"critic_update"}),
        ({"eval": {"samples_per_prompt": 3}}, {"eval"}),
        ({"steps": 30}, set()),
        ({"checkpoint": {"every_steps": 2}}, set()),
    ],
    ids=id_in_order,
)
def test_key_changes_only_the_fingerprints_of_its_reading_stages(tables: dict[str, Any], readers: set[str]) -> None:
    before, after = fake_recipe(), fake_recipe(**tables)
    assert {
        stage for stage in STAGES if stage_fingerprint(stage, before) != stage_fingerprint(stage, after)
    } == readers


SUM = {"kind": "python", "path": "env:Sum", "turns": 3, "tokens": 20}


@pytest.mark.parametrize(
    ("changes", "readers"),
    [
        ({"turns": 4}, {"rollout", "eval"}),
        ({"tokens_per_turn": 5}, {"rollout", "eval"}),
        ({"options": {"level": 2}}, {"rollout", "eval"}),
        ({"on_failure": {"score": -1.0}}, {"reward", "eval"}),
        ({"workers": 3, "seconds": 2.0}, set()),
    ],
    ids=id_in_order,
)
def test_key_of_the_environment_changes_only_the_fingerprints_of_its_reading_stages(
    changes: dict[str, Any], readers: set[str]
) -> None:
    before, after = fake_recipe(environment=SUM), fake_recipe(environment={**SUM, **changes})
    assert stages_that_read(before, after) == readers


def test_rate_depends_on_run_length_only_if_its_schedule_does() -> None:
    def read(steps: int, **schedule: Any) -> str:
        return stage_fingerprint(
            "actor_update", fake_recipe(steps=steps, actor={"optimizer": {"lr": 1.0, **schedule}})
        )

    for schedule, is_other in (
        ({}, False),
        ({"lr_warmup_updates": 4}, False),
        ({"lr_warmup_frac": 0.2}, True),
        ({"lr_schedule": "linear"}, True),
        ({"lr_schedule": "linear", "lr_decay_updates": 5}, False),
    ):
        assert (read(10, **schedule) != read(20, **schedule)) is is_other


def test_step_ticked_rate_reads_first_step_and_updates_per_step() -> None:
    def read(ticks: str, **changes: Any) -> str:
        return stage_fingerprint(
            "actor_update", fake_recipe(actor={"optimizer": {"lr": 1.0, "lr_ticks": ticks}}, **changes)
        )

    as_is = {**ppo(), "rollout": ROLLOUT}
    for changed in (ppo(critic_only_steps=1), {"rollout": {**ROLLOUT, "samples_per_prompt": 4}}):
        assert read("step", **{**as_is, **changed}) != read("step", **as_is)
        assert read("update", **{**as_is, **changed}) == read("update", **as_is)


def test_only_fixed_length_losses_read_the_maximum_length() -> None:
    longer = {**ROLLOUT, "max_new_tokens": 7}
    for kind, loss, readers in (
        ("token_mean", "value_loss", {"rollout"}),
        ("fixed_length", "value_loss", {"rollout", "critic_update"}),
        ("fixed_length", "policy_loss", {"rollout", "actor_update"}),
    ):
        before, after = (
            fake_recipe(**ppo(**{loss: {"aggregation": kind}}), rollout=each) for each in (ROLLOUT, longer)
        )
        assert {
            stage for stage in STAGES if stage_fingerprint(stage, before) != stage_fingerprint(stage, after)
        } == readers


def test_advantages_that_a_later_stage_whitens_have_another_fingerprint() -> None:
    recipe = fake_recipe()
    assert RAW_ADVANTAGES.fingerprint(recipe) != ADVANTAGES.fingerprint(recipe)


def test_overlong_penalty_reads_the_rollout_length_by_default() -> None:
    longer, overlong = {**ROLLOUT, "max_new_tokens": 7}, {"buffer_tokens": 2}
    for own, readers in (({}, {"rollout", "advantages"}), ({"max_tokens": 5}, {"rollout"})):
        reward = {"kind": "exact_match", "overlong": {**overlong, **own}}
        before, after = (fake_recipe(reward=reward, rollout=each) for each in (ROLLOUT, longer))
        assert {
            stage for stage in STAGES if stage_fingerprint(stage, before) != stage_fingerprint(stage, after)
        } == readers


def test_sampling_filters_apply_to_rollout_and_logprobs_not_eval(tmp_path: Path) -> None:
    rollout = {**ROLLOUT, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.125}
    job = open_run(tmp_path / "run", fake_recipe(rollout=rollout), Witness()).job
    stages = BuiltStages(job, 1)
    sampling, scored = stages.rollout.params, stages.logprobs.scored
    measured = stages.eval.sampled
    for settings in (sampling, scored):
        assert (settings.temperature, settings.top_p, settings.top_k, settings.min_p) == (0.5, 0.9, 3, 0.125)
    assert (measured.top_p, measured.top_k, measured.min_p) == (1.0, None, 0.0)


def stages_of(folder: Path, **tables: Any) -> tuple[ActorUpdateStage, CriticUpdateStage]:
    stages = BuiltStages(open_run(folder / "run", fake_recipe(**tables), Witness()).job, 1)
    assert isinstance(stages.actor_update, ActorUpdateStage)
    assert isinstance(stages.critic_update, CriticUpdateStage)
    return stages.actor_update, stages.critic_update


def test_each_role_has_its_own_epochs_and_decay_length(tmp_path: Path) -> None:
    tables = {**ppo(critic_epochs=3, critic_only_steps=1), "steps": 4}
    tables |= {"actor": {"optimizer": DECAYED}, "critic": {"optimizer": {**DECAYED, "lr": 2.0}}}
    actor, critic = (stage.plan for stage in stages_of(tmp_path, **tables))
    assert (actor.epochs, critic.epochs) == (2, 3)
    # Two minibatches in an epoch: the actor trains in 3 of the 4 steps, the critic in all.
    assert (actor.schedule.rate.total_ticks, critic.schedule.rate.total_ticks) == (3 * 2 * 2, 4 * 3 * 2)
    assert [rate_at(plan, update) for plan, update in ((actor, 0), (actor, 6), (actor, 12))] == [1.0, 0.5, 0.0]
    assert [rate_at(critic, update) for update in (0, 12, 24)] == [2.0, 1.0, 0.0]


def rate_at(plan: MinibatchPlan, update: int) -> float:
    return plan.schedule.at(State("actor", 1, update, "parent"), 0).lr


def test_losses_and_corrections_follow_the_recipe(tmp_path: Path) -> None:
    changes = {
        "policy_loss": {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0, "entropy_coef": 0.01},
        "value_loss": {"clip": 0.4, "scale": 0.5, "aggregation": "fixed_length"},
    }
    actor, critic = stages_of(tmp_path, **ppo(**changes))
    assert (actor.loss, actor.entropy_coef) == (PolicyClip(0.1, 0.3, 3.0), 0.01)
    assert (critic.clip, critic.scale, critic.aggregation) == (0.4, 0.5, SequenceSum(6))


CORRECTED = {
    "weights": {"rollout_correction": {"kind": "icepop"}},
    "rejection": {"rollout_rejection": {"kind": "ratio", "level": "token", "max_ratio": 2.0}},
    "gap": {"max_sequence_gap": 1.5},
}


@pytest.mark.parametrize("tables", [{}, *CORRECTED.values()], ids=["none", *CORRECTED])
def test_correction_stage_runs_only_with_a_configured_correction(tmp_path: Path, tables: dict[str, Any]) -> None:
    job = open_run(tmp_path / "run", fake_recipe(**ppo(**tables)), Witness()).job
    assert ("correction" in job.outlines.at(1).names) is bool(tables)


def test_evaluation_length_defaults_to_the_rollout_length(tmp_path: Path) -> None:
    found: dict[str, list[str]] = {"as rollouts": [], "own": []}
    for length in (6, 5):
        for name, table in (("as rollouts", {}), ("own", {"max_new_tokens": 3})):
            recipe = fake_recipe(rollout={**ROLLOUT, "max_new_tokens": length}, eval=table)
            stage = BuiltStages(open_run(tmp_path / f"{name} {length}", recipe, Witness()).job, 1).eval
            assert stage is not None
            found[name].append(stage.fingerprint)
    assert [len(set(fingerprints)) for fingerprints in found.values()] == [2, 1]


def test_evaluation_stage_uses_the_recipe_of_its_step(tmp_path: Path) -> None:
    first = fake_recipe(steps=2, eval={"every_steps": 1})
    play(tmp_path / "run", first)
    second = fake_recipe(steps=3, eval={"every_steps": 1, "max_new_tokens": 2})
    wiring = open_run(tmp_path / "run", first, Witness(), recipes={1: first, 3: second})
    run(wiring.job)
    job = wiring.job
    found = [BuiltStages(job, step).eval for step in (0, 1, 2, 3)]
    assert [stage.fingerprint == found[0].fingerprint for stage in found if stage and found[0]] == [True] * 3 + [
        False
    ]
    committed = manifests.read(RunPaths(tmp_path / "run").stage(3, "eval"))
    assert committed is not None
    assert found[3] is not None
    assert committed.fingerprint == found[3].fingerprint
    assert committed.figures["eval/held/response_tokens_mean"] <= 2
