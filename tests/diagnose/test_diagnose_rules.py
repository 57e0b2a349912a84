"""Rules of `diagnose` at their bounds: a healthy recorded run in which the metrics of one rule are replaced."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from conventions.conftest import ROOT
from diagnose.recorded import changed, recorded
from for_each import for_each
from ppoctl.core.finding import Level
from ppoctl.recipe.loading.load import load
from ppoctl.show.diagnose.causes import RULES, examine, summary
from ppoctl.show.diagnose.curves import Curves
from ppoctl.show.diagnose.limits import limit

GRPO, PPO = recorded("grpo"), recorded("ppo")
KL, SCORE, SPREAD, EQUAL = "policy/approx_kl", "reward/score_mean", "reward/score_std", "advantage/equal_groups_frac"
TRUNCATED, TOKENS, REFERENCE = "rollout/truncated_frac", "rollout/response_tokens_mean", "kl/reference_mean"
TURNS, EXPLAINED = "environment/turn_limit_frac", "value/explained_variance"
EPISODES = {"turns": 4, "tokens": 512}


def kinds(run: Curves) -> list[str]:
    return [each.finding.kind for each in examine(run)]


def steps(*values: float) -> list[float]:
    """Return twelve values: each value is repeated, as often as fits."""
    return [value for value in values for _ in range(12 // len(values))]


CASES: Sequence[tuple[str, str, Curves, Curves]] = (
    # name, hint of the finding, run with the problem, run that is just within the bound
    ("scorer-errors", "--set reward.timeout_s=20",
     changed(PPO, {"reward/timeout_frac": steps(0, 0.02)}), changed(PPO, {"reward/timeout_frac": steps(0, 0.01)})),
    ("learning-rate-high", "--set actor.optimizer.lr=4e-5",
     changed(PPO, {KL: steps(0.001, 0.09)}), changed(PPO, {KL: steps(0.001, 0.05)})),
    ("learning-rate-low", "--set actor.optimizer.lr=0.002",
     changed(GRPO, {KL: steps(9e-6, 1e-9)}), changed(GRPO, {KL: steps(9e-6, 2e-5)})),
    ("learning-rate-low", "--set actor.optimizer.lr=0.2",
     changed(GRPO, {KL: steps(0), REFERENCE: steps(0)}, ppo__minibatch_seqs=128),
     changed(GRPO, {KL: steps(0)}, ppo__minibatch_seqs=128)),
    ("kl-penalty", "--set ppo.kl.adaptive.target_per_token=0.02",
     changed(PPO, {REFERENCE: steps(0.01), "kl/coef": steps(0.6), SCORE: steps(0.4, 0.5)},
             ppo__kl__adaptive={"target_per_token": 0.002, "target_per_sequence": None}),
     changed(PPO, {REFERENCE: steps(0.01), "kl/coef": steps(0.2), SCORE: steps(0.4, 0.5)})),
    ("groups", "--set rollout.temperature=1.0",
     changed(GRPO, {EQUAL: steps(0.8, 0.95), SCORE: steps(0.5)}, rollout__temperature=0.3),
     changed(GRPO, {EQUAL: steps(0.95, 0.9)})),
    ("groups", "--set 'rollout.groups={keep=\"mixed\",when_short=\"use_fewer\"}'",
     changed(GRPO, {EQUAL: steps(0.95), SCORE: steps(0.1)}),
     changed(GRPO, {EQUAL: steps(0.95), SCORE: steps(0.1, 0.9)})),
    ("truncation", "--set rollout.max_new_tokens=64",
     changed(PPO, {TRUNCATED: steps(0, 0.3)}), changed(PPO, {TRUNCATED: steps(0.3, 0.1)})),
    ("truncation", "--set environment.turns=8",
     changed(PPO, {TRUNCATED: [0.66, 0.4], TURNS: [0.65, 0.35], SCORE: [0.2, 0.3]}, environment=EPISODES),
     changed(PPO, {TRUNCATED: steps(0.66, 0.44), TURNS: steps(0.65, 0.43)}, environment=EPISODES)),
    ("truncation", "--set rollout.max_new_tokens=64 --set environment.tokens=1024",
     changed(PPO, {TRUNCATED: steps(0.6), TURNS: steps(0.2)}, environment=EPISODES), PPO),
    ("truncation", "--set environment.turns=8",
     changed(PPO, {TRUNCATED: steps(0.6), TURNS: steps(0.6), SCORE: steps(0), SPREAD: steps(0)},
             environment=EPISODES), PPO),
    ("explained-variance", "--set critic.optimizer.lr=0.004",
     changed(PPO, {"value/explained_variance": steps(-0.009), "value/value_mean": steps(0.3)}),
     changed(PPO, {"value/explained_variance": steps(-0.009), "value/value_mean": steps(0.5)})),
    ("explained-variance", "--set ppo.critic_epochs=6",
     changed(PPO, {"value/explained_variance": steps(0.2, -0.2)}, ppo__epochs=3),
     changed(PPO, {"value/explained_variance": steps(-0.2, -0.1)})),
    ("experts", "--set actor.optimizer.lr=1e-4",
     changed(PPO, {"policy/experts_unused_frac": steps(0, 0.5)}),
     changed(PPO, {"policy/experts_unused_frac": steps(0.5, 0.55)})),
    ("mismatch", "--set 'ppo.rollout_correction={kind=\"tis\"}'",
     changed(PPO, {"mismatch/gap_k3": steps(0.001, 0.02)}), changed(PPO, {"mismatch/gap_k3": steps(0.02, 0.01)})),
    ("mismatch", "--set model.dtype=float32",
     changed(PPO, {"mismatch/gap_mean_abs": steps(0.06)}, ppo__rollout_correction__kind="tis",
             model__dtype="bfloat16"),
     changed(PPO, {"mismatch/gap_mean_abs": steps(0.05)})),
    ("entropy", "--set ppo.policy_loss.clip_high=0.28",
     changed(PPO, {"policy/entropy_mean": steps(0.5, 0.04), SCORE: steps(0.5, 0.8, 0.66), SPREAD: steps(0.5)}),
     changed(PPO, {"policy/entropy_mean": steps(0.5, 0.04), SCORE: steps(0.5, 0.8, 0.68), SPREAD: steps(0.5)})),
    ("clip", "--set actor.optimizer.lr=6e-5",
     changed(GRPO, {"policy/clip_frac": steps(0.2, 0.31)}), changed(GRPO, {"policy/clip_frac": steps(0.4, 0.3)})),
    ("overfitting", "--set ppo.kl.coef=0.003",
     changed(GRPO, {"eval/heldout/pass_at_1": [0.7, 0.5, 0.4], "eval/heldout/pass_at_1_stderr": [0.07] * 3}),
     changed(GRPO, {"eval/heldout/pass_at_1": [0.7, 0.5, 0.41], "eval/heldout/pass_at_1_stderr": [0.07] * 3})),
    ("score-falls", "--set actor.optimizer.lr=6e-5",
     changed(GRPO, {SCORE: steps(0.5, 0.8, 0.6), SPREAD: steps(0.4, 0.6)}, rollout__prompts_per_step=128),
     changed(GRPO, {SCORE: steps(0.5, 0.8, 0.66), SPREAD: steps(0.4, 0.6)}, rollout__prompts_per_step=128)),
    ("score-falls", "--set actor.optimizer.lr=6e-5",  # with 16 prompts, more of a fall may be chance
     changed(GRPO, {SCORE: steps(0.5, 0.8, 0.4), SPREAD: steps(0.5)}),
     changed(GRPO, {SCORE: steps(0.5, 0.8, 0.6), SPREAD: steps(0.5)})),
    ("length", "--set 'reward.length_penalty={per_token=0.01}'",
     changed(PPO, {SCORE: steps(1, 4), "reward/right_mean": steps(0.5, 0.5, 0.35), TOKENS: steps(10, 10, 16)}),
     changed(PPO, {SCORE: steps(1, 4), "reward/right_mean": steps(0.5, 0.5, 0.4), TOKENS: steps(10, 10, 16)})),
    ("scorer", "the scorer; to stop early",
     changed(PPO, {SCORE: steps(1, 4), REFERENCE: steps(0.1, 1.1), TOKENS: steps(10, 14)}),
     changed(PPO, {SCORE: steps(1, 4), REFERENCE: steps(0.1, 0.9), TOKENS: steps(10, 14)})),
    ("scorer", "the scorer; to stop early",
     changed(PPO, {SCORE: steps(1, 4), REFERENCE: steps(0.1, 0.6), "reward/right_mean": steps(0.5, 0.3)}),
     changed(PPO, {SCORE: steps(1, 4), REFERENCE: steps(0.1, 0.6), "reward/right_mean": steps(0.5, 0.4)})),
    ("reward-dead", "ppoctl validate runs/ppo/recipe.toml --reward",
     changed(PPO, {SCORE: steps(1), SPREAD: steps(0)}),
     changed(PPO, {SCORE: steps(0.5), SPREAD: [0.3] * 10 + [0, 0]})),
    ("temperature", "--set rollout.temperature=1.0",
     changed(PPO, {SCORE: [0.2, 0.3]}, rollout__temperature=1.5),
     changed(PPO, {SCORE: [0.22, 0.3]}, rollout__temperature=1.5)),
    ("reward-noise", "ppoctl validate runs/ppo/recipe.toml --reward",
     changed(PPO, {SCORE: steps(0.5, 0.6), SPREAD: steps(0.5), EXPLAINED: steps(-0.02, 0.01, -0.009)}),
     changed(PPO, {SCORE: steps(0.5, 0.6), SPREAD: steps(0.5), EXPLAINED: steps(-0.02, 0.01, -0.011)})),
    ("template", "ppoctl preview runs/ppo/recipe.toml --rows 1",
     changed(PPO, {SCORE: [0.04] * 12, TRUNCATED: [0.95] * 12}),
     changed(PPO, {SCORE: [0.06] * 12, TRUNCATED: [0.95] * 12})),
)  # fmt: skip


@for_each(CASES)
def test_rule_finds_the_problem_and_not_its_neighbour(kind: str, hint: str, broken: Curves, within: Curves) -> None:
    first = examine(broken)[0]
    assert (first.finding.kind, (first.finding.hint or "")[: len(hint)]) == (kind, hint)
    assert kind not in kinds(within)


def test_every_rule_has_a_case() -> None:
    assert len({kind for kind, *_ in CASES}) == len(RULES) + 1  # `gamed` has two kinds


MODES: Mapping[str, tuple[str, Sequence[str]]] = {
    "lora": (
        "quickstart",
        ["actor.train={lora={rank=8,alpha=32}}", "critic.train={lora={rank=8,alpha=32}}", "critic.optimizer.lr=0.1",
         "ppo.critic_only_steps=2", "ppo.kl.adaptive={target_per_token=0.01}",
         "reward.length_penalty={per_token=0.01}"],
    ),
    "value-head": (
        "quickstart",
        ['critic={on="actor",head="mlp"}', "ppo.value_loss.coef=0.5", 'ppo.kl={place="none"}'],
    ),
    "dynamic": (
        "quickstart-grpo",
        ['rollout.groups={keep="mixed"}', 'ppo.policy_loss={kind="gspo"}', "rollout.max_window_tokens=90"],
    ),
    "environment": ("own/calculator-small", ["environment.tokens_per_turn=40", "ppo.old_logprobs=sampler"]),
}  # fmt: skip
"""Name -> recipe and settings, in which a rule's metrics or its suggestion may mean something else."""


@pytest.mark.parametrize("mode", MODES)
def test_suggested_setting_is_valid_and_new_in_every_kind_of_training(mode: str) -> None:
    name, sets = MODES[mode]
    file = ROOT / "recipes" / f"{name}.toml"
    resolved = load([file], sets).resolved()
    cases = [case for *_, case, _ in CASES if resolved["environment"] or TURNS not in case.series]
    runs = [Curves("run", resolved, case.series, limits=cut) for case in cases for cut in LIMITED]
    hints = {each.finding.hint for run in runs for each in examine(run) if each.finding.hint}
    assert len(hints) > 8
    tried = {tuple(settings(hint)) for hint in hints}
    for suggested in sorted(tried):
        new = load([file], [*sets, *suggested]).resolved()
        for key in (word.partition("=")[0] for word in suggested):
            assert Curves("", new, {}).key(key) != Curves("", resolved, {}).key(key), suggested


LIMITED: Sequence[Mapping[str, int]] = (
    {}, {"environment.turns": 3}, {"environment.tokens_per_turn": 3}, {"rollout.max_new_tokens": 3},
    {"environment.tokens": 3}, {"rollout.max_window_tokens": 3},
)  # fmt: skip


def settings(hint: str) -> list[str]:
    return [word.rstrip(";") for option, word in pairwise(shlex.split(hint)) if option == "--set"]


def test_what_a_broken_run_shows_later_is_a_consequence() -> None:
    run = changed(PPO, {SCORE: steps(0.5, 0), KL: steps(0.1), SPREAD: steps(0.5, 0), TRUNCATED: steps(0.2, 0.9)})
    root, *others = examine(run)
    assert (root.finding.kind, root.finding.level) == ("learning-rate-high", Level.ERROR)
    assert [(each.finding.kind, each.finding.where, each.finding.level) for each in others] == [
        ("truncation", "step 1", Level.WARNING),  # the responses of step 1 are older than its update
        ("reward-dead", "step 7", Level.NOTE),
        ("score-falls", "step 5", Level.NOTE),
    ]
    assert others[0].finding.what.endswith(
        "is `0.2`, and 0.9 in steps 9 to 12, above 0.1 (rollout.max_new_tokens is 32)"
    )
    assert others[1].finding.what.endswith("; a consequence of `learning-rate-high`")
    assert others[1].finding.hint is None


def test_nothing_before_the_first_update_follows_from_it() -> None:
    run = changed(PPO, {SCORE: [0.097, 0.05], SPREAD: [0.296, 0.22], KL: [0.9, 0.9]})
    assert [(each.finding.kind, "consequence" in each.finding.what) for each in examine(run)] == [
        ("learning-rate-high", False),
        ("template", False),
    ]


def test_steps_that_train_only_the_critic_are_not_judged_as_training() -> None:
    still = {REFERENCE: steps(0), SCORE: steps(0.5), EXPLAINED: steps(-0.005)}
    values = changed(PPO, {**still, KL: [], "policy/lr": []}, ppo__minibatch_seqs=256)
    assert kinds(values) == []  # the actor does not change, and no score rises, because it is not trained
    late = {**values.series, KL: [(12, 0.002)], "policy/lr": [(12, 4e-4)]}
    assert kinds(replace(values, series=late)) == []


def test_learning_rate_is_that_of_the_step() -> None:
    rates = {KL: steps(0.2), "policy/lr": [4e-5] * 12}
    assert examine(changed(PPO, rates))[0].finding.hint == "--set actor.optimizer.lr=3e-6"
    lowered = changed(PPO, {**rates, "policy/lr": steps(4e-3, 4e-5)}, actor__optimizer__lr=4e-5)
    assert examine(lowered)[0].finding.hint is None


def test_one_update_per_step_is_judged_by_the_reference() -> None:
    values = {KL: steps(0), REFERENCE: [0, 0.6, *steps(2)[2:]], SCORE: steps(0.5, 0.1)}
    first = examine(changed(PPO, values, ppo__minibatch_seqs=256))[0]
    assert (first.finding.kind, first.finding.where) == ("learning-rate-high", "step 1")
    assert "kl/reference_mean is `0.6` in step 2" in first.finding.what


def test_difference_between_sampler_and_trainer_is_not_a_change_of_the_actor() -> None:
    values = {KL: steps(0.09), "mismatch/gap_k3": steps(0.08)}
    assert kinds(changed(PPO, values, ppo__old_logprobs="sampler")) == ["mismatch"]
    assert kinds(changed(PPO, values)) == ["learning-rate-high", "mismatch"]


def test_metric_that_may_better_be_low_is_only_noted() -> None:
    found = examine(changed(PPO, {"reward/wrong_calls_mean": steps(0.5, 0.1)}))
    assert [(each.finding.kind, each.finding.level) for each in found] == [("scorer", Level.NOTE)]
    assert kinds(changed(PPO, {"reward/wrong_mean": steps(0.5, 0.1), "reward/right_mean": steps(0.3, 0.9)})) == []


@pytest.mark.parametrize(
    ("tokens", "turns", "end", "key"),
    [
        (32, None, None, "rollout.max_new_tokens"),
        (20, None, None, "rollout.max_window_tokens"),
        (30, [10, 10], "turns", "environment.turns"),
        (40, [22, 10], "tokens", "rollout.max_new_tokens"),
        (40, [2, 16], "tokens", "environment.tokens_per_turn"),
        (45, [9, 9], "tokens", "environment.tokens"),
    ],
)
def test_limit_of_a_response_is_known_from_its_record(
    tokens: int, turns: list[int] | None, end: str | None, key: str
) -> None:
    table = {"turns": 2, "tokens": 48, "tokens_per_turn": 16}
    run = changed(PPO, {}, environment=table, rollout__max_window_tokens=60)
    episode = {"turns": [{"generated": each} for each in turns], "end": end} if turns else None
    assert limit(run, 10, tokens, episode) == key


def test_earlier_of_two_causes_is_first() -> None:
    dead = {SCORE: steps(0), SPREAD: steps(0), KL: [0.0] * 11 + [0.7]}
    assert kinds(changed(PPO, dead)) == ["reward-dead", "learning-rate-high"]


def test_learned_task_is_not_a_problem() -> None:
    run = changed(PPO, {SCORE: steps(0.5, 1), SPREAD: steps(0.5, 0)})
    assert [(each.finding.kind, each.finding.level) for each in examine(run)] == [("reward-dead", Level.NOTE)]
    assert [each.level for each in summary(run, examine(run))] == [Level.OK]


def test_broken_run_returns_to_the_newest_state_before_the_damage() -> None:
    values = {KL: [0.001] * 7 + [0.9] * 5, SCORE: steps(0.6, 0.1)}
    run = Curves(PPO.run, changed(PPO, values).recipe, changed(PPO, values).series, saved=(3, 6, 9))
    assert examine(run)[0].finding.hint == (
        "--set actor.optimizer.lr=1e-5; continue from before: ppoctl resume runs/ppo --back-to 6"
    )


@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_clipped_sequences_and_bounded_weights_are_not_judged_as_clipped_tokens(loss: str) -> None:
    assert kinds(changed(GRPO, {"policy/clip_frac": steps(0.6)}, ppo__policy_loss__kind=loss)) == []


def test_value_head_on_the_actor_is_changed_by_its_coefficient() -> None:
    values = {"value/explained_variance": steps(-0.009), "value/value_mean": steps(0.3)}
    run = changed(PPO, values, critic__on="actor", ppo__value_loss={"coef": 0.5})
    assert examine(run)[0].finding.hint == "--set ppo.value_loss.coef=2.0"


def test_actor_in_warmup_is_not_judged() -> None:
    slow = {KL: [1e-7, 2e-7], "policy/lr": [1e-5, 2e-5]}
    assert kinds(changed(GRPO, slow)) == []
    assert kinds(changed(GRPO, {**slow, "policy/lr": [1e-4, 1.1e-4]})) == ["learning-rate-low"]


def test_one_step_is_judged_by_what_one_step_shows() -> None:
    run = Curves(PPO.run, PPO.recipe, {name: points[:1] for name, points in PPO.series.items()})
    assert kinds(run) == []
    assert [(each.level, each.what[:3]) for each in summary(run, [])] == [(Level.NOTE, "`1`"), (Level.OK, "18 ")]
    assert kinds(changed(run, {KL: [0.17]})) == ["learning-rate-high"]
