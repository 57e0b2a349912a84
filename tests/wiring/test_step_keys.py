"""Two values of a recipe key give two steps, each as the textbook computes it: from the recipe through the wired
stages."""

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fakes.bigram import END, experts_in
from fakes.components import OTHER_EXPERT
from fakes.fingerprints import STAGES, stage_fingerprint
from own_loss_page import written
from ppoctl.core.batch.scores import Score
from ppoctl.core.errors import RecipeError, RewardError
from ppoctl.recipe.schema import Recipe
from wiring import harness, textbook
from wiring.cases import each_key, holds
from wiring.harness import (
    BASE,
    STEP_NUMBER,
    moved_table,
    numbers_of,
    open_harness,
    play_step,
    wired_and_textbook,
    with_keys,
)

CLAMPS = {"input_clamp": None, "output_clamp": None}
LOSS = {"place": "loss", "estimator": "k3", **CLAMPS, "gradient": "estimator", "coef": 0.4, "adaptive": None}
PLACES = {"reward": BASE["ppo"]["kl"], "loss": LOSS}
WEIGHTS = {"min_ratio": 0.8, "max_ratio": 1.3, "normalize": False, "normalize_over": "kept_tokens"}
WEIGHT_KINDS = ("tis_sequence", "icepop", "icepop_sequence", "sequence_mask")
POWER = {"kind": "pow", "power": 2.0, "order": "after_whitening"}
RATIO = {"kind": "ratio", "statistic": "k1", "level": "token", "min_ratio": None, "max_ratio": 1.2, "max": None}

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length")
SHARED = {"aggregation": "token_mean", "entropy_coef": 0.02, "positive_nll_coef": 0.0}
GSPO = {"kind": "gspo", "clip_low": 0.02, "clip_high": 0.03, "ratio_gradient": "token", **SHARED}
CISPO = {"kind": "cispo", "clip_low": 0.1, "clip_high": 0.15, **SHARED}
POLICY_LOSSES: tuple[dict[str, Any], ...] = (GSPO, CISPO, {"kind": "reinforce", **SHARED})

USERS = Path(__file__).parents[1] / "stages" / "users_training.py"
"""Losses and estimators of a user."""

CLIP = {"low": -0.5, "high": 1.2, "place": "before_moments"}
RUNNING = {"kind": "running", "center": False}
REFERENCE = {"kind": "reference", "std": None, "center": False}
OVERLONG = {"buffer_tokens": 3, "penalty": 0.7, "max_tokens": None, "floor": True}
LENGTH = {"per_token": 0.2, "free_tokens": 1}
ALL_STEPS = {
    "clip": CLIP,
    "moments": RUNNING,
    "unfinished_factor": 0.3,
    "overlong": OVERLONG,
    "length_penalty": LENGTH,
}

CASES: list[tuple[str, Any]] = [
    ("seed", 6),
    ("rollout.prompts_per_step", 9),
    ("rollout.samples_per_prompt", 3),
    ("rollout.max_new_tokens", 3),
    ("rollout.temperature", 0.8),
    ("rollout.top_p", 0.7),
    ("rollout.top_k", 4),
    ("rollout.min_p", 0.2),
    ("rollout.stop_strings", ["11 2"]),
    ("reward.scale", None),
    ("reward.scale.from", [-0.1, 0.7]),
    ("reward.scale.to", [3.0, -0.5]),
    ("reward.clip", CLIP),
    ("reward.moments", RUNNING),
    ("reward.moments", REFERENCE),
    ("reward.unfinished_factor", 0.3),
    ("reward.overlong", OVERLONG),
    ("reward.length_penalty", LENGTH),
    ("ppo.truncated", "bootstrap"),
    ("ppo.truncated", "filter"),
    ("ppo.epochs", 3),
    ("ppo.epochs", 1),
    ("ppo.critic_epochs", 1),
    ("ppo.critic_epochs", None),
    ("ppo.minibatch_seqs", 4),
    ("ppo.minibatch_seqs", 1),
    ("ppo.minibatch_order", "in_order"),
    ("ppo.critic_minibatch_seqs", 3),
    ("ppo.advantages.gamma", 0.6),
    ("ppo.advantages.gae_lambda", 0.2),
    ("ppo.advantages.gae_lambda_value", 0.1),
    ("ppo.advantages.gae_lambda_value", 0.0),
    ("ppo.advantages.length_adaptive_alpha", 0.6),
    ("ppo.advantages.whiten", True),
    ("ppo.advantages", {"kind": "monte_carlo", "gamma": 0.9, "whiten": False}),
    ("ppo.advantages", {"kind": "monte_carlo", "gamma": 0.4, "whiten": True}),
    ("ppo.kl", {"place": "none"}),
    ("ppo.kl", LOSS),
    ("ppo.kl", {**LOSS, "estimator": "k2"}),
    ("ppo.kl", {**LOSS, "coef": 0.1}),
    ("ppo.kl.estimator", "k1"),
    ("ppo.kl.estimator", "k2"),
    ("ppo.kl.estimator", "abs"),
    ("ppo.kl.estimator", "full"),
    ("ppo.kl", {**LOSS, "estimator": "full"}),
    ("ppo.kl", {**LOSS, "estimator": "full", "output_clamp": 0.1}),
    ("ppo.kl", {**LOSS, "estimator": "full", "adaptive": {"target_per_token": 0.2, "horizon_seqs": 300}}),
    ("ppo.kl.input_clamp", 0.3),
    ("ppo.kl.output_clamp", 0.05),
    ("ppo.kl.coef", 0.6),
    ("ppo.kl.adaptive", {"target_per_token": 0.2, "horizon_seqs": 300}),
    ("ppo.kl.adaptive", {"target_per_sequence": 0.6, "horizon_seqs": 300}),
    ("ppo.policy_loss.clip_low", 0.4),
    ("ppo.policy_loss.clip_high", 0.05),
    ("ppo.policy_loss.dual_clip", 1.7),
    ("ppo.policy_loss.dual_clip", None),
    ("ppo.policy_loss.entropy_coef", 0.3),
    ("ppo.policy_loss.entropy_coef", 0.0),
    ("ppo.policy_loss.positive_nll_coef", 0.3),
    *(("ppo.policy_loss.aggregation", kind) for kind in AGGREGATIONS[1:]),
    *(("ppo.policy_loss", table) for table in POLICY_LOSSES),
    ("ppo.value_loss.clip", 0.05),
    ("ppo.value_loss.clip", None),
    ("ppo.value_loss.scale", 0.3),
    ("ppo.value_loss.aggregation", "sequence_mean_token_mean"),
    ("ppo.value_loss.aggregation", "sequence_mean_token_sum"),
    ("ppo.value_loss.aggregation", "fixed_length"),
    ("ppo.rollout_correction", {"kind": "none"}),
    ("ppo.rollout_correction.max_ratio", 1.05),
    ("ppo.rollout_correction.min_ratio", 0.9),
    ("ppo.rollout_correction.normalize", True),
    *(("ppo.rollout_correction", {"kind": kind, **WEIGHTS}) for kind in WEIGHT_KINDS),
    ("ppo.whiten_rewards", True),
    ("ppo.resample", POWER),
    ("ppo.resample", {"kind": "max_min", "order": "after_whitening"}),
    ("ppo.resample", {"kind": "max_random", "order": "after_whitening"}),
    ("ppo.rollout_rejection", RATIO),
    ("ppo.max_sequence_gap", 1.25),
    *(
        (f"{role}.optimizer.{key}", value)
        for role in ("actor", "critic")
        for key, value in {
            "lr": 0.07,
            "weight_decay": 0.5,
            "beta1": 0.4,
            "beta2": 0.5,
            "eps": 0.05,
            "grad_clip": 0.0,
            "lr_schedule": "constant",
            "lr_warmup_updates": 1,
            "lr_warmup_frac": 0.4,
            "lr_warmup_init_frac": 0.1,
            "lr_decay_updates": None,
            "lr_min_frac": 0.6,
        }.items()
    ),
    ("actor.optimizer.lr_schedule", "cosine"),
    ("critic.optimizer.lr_schedule", "linear"),
    ("actor.optimizer.grad_clip", 0.01),
    ("critic.optimizer.grad_clip", 0.02),
]

MAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rollout": ((), ("drawn",)),
    "reward": (("drawn",), ("scores",)),
    "values": (("drawn",), ("values", "behind")),
    "logprobs": (("drawn",), ("logprobs", "entropy", "reference")),
    "correction": (("drawn", "logprobs"), ("weights", "kept")),
    "advantages": (
        ("drawn", "scores", "values", "behind", "logprobs", "reference"),
        ("shaped", "advantages", "returns", "kl/coef", "next kl/coef"),
    ),
    "resample": (("drawn", "shaped"), ("resampled",)),
    "critic_update": (("drawn", "values", "advantages", "returns", "resampled"), ("critic table",)),
    "actor_update": (
        ("drawn", "logprobs", "reference", "weights", "kept", "advantages", "kl/coef", "resampled"),
        ("actor table",),
    ),
}
"""Stage -> (its inputs, its outputs)."""


def numbers(tables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return _numbers(json.dumps(tables))


@cache
def _numbers(written: str) -> dict[str, np.ndarray]:
    played, expected = wired_and_textbook(json.loads(written))
    harness.require_equal(numbers_of(played), expected)
    return expected | {"drawn": played.rollouts.tokens.double().numpy()}


SEEN_BY: dict[str, tuple[Any, ...]] = {
    "ppo.epochs": (1,),
    "ppo.critic_epochs": (1,),
    "ppo.minibatch_seqs": (1,),
    "ppo.advantages.gae_lambda_value": (0.0,),
    "ppo.kl": ({**LOSS, "estimator": "k2"}, {**LOSS, "coef": 0.1}),
    "ppo.kl.adaptive": ({"target_per_sequence": 0.6, "horizon_seqs": 300},),
    "ppo.policy_loss.entropy_coef": (0.3,),
    "ppo.value_loss.aggregation": ("sequence_mean_token_sum", "fixed_length"),
    "ppo.rollout_correction": tuple({"kind": kind, **WEIGHTS} for kind in ("icepop", "icepop_sequence")),
}
"""Values of keys whose other values stay."""


def stays(key: str, value: Any) -> str:
    """Return what sees the same as a case. The base gives each role its own value of each key, so that every step
    shows a mistaken role."""
    if key.startswith("critic.optimizer.") and not key.endswith((".lr", ".lr_schedule")):
        return key.replace("critic", "actor")
    return f"other values of {key}" if value in SEEN_BY.get(key, ()) else ""


@each_key("key, value", CASES, stays)
def test_two_values_of_a_key_give_two_steps_equal_to_the_textbook(key: str, value: Any) -> None:
    as_is, other = numbers(BASE), numbers(with_keys({key: value}))
    different = harness.differing(as_is, other)
    assert different, f"the case is too weak: nothing depends on `{key}`"
    recipes = [Recipe.model_validate(tables) for tables in (BASE, with_keys({key: value}))]
    for stage, (reads, makes) in MAKES.items():
        if different & set(makes) and not different & set(reads):
            before, after = (stage_fingerprint(stage, recipe) for recipe in recipes)
            assert before != after, f"{stage} makes something else of the same, and its fingerprint does not tell"


ARITHMETIC_CASES: list[tuple[str, Any]] = [
    ("reward.clip.low", 0.2),
    ("reward.clip.high", 0.7),
    ("reward.clip.place", "after_moments"),
    ("reward.moments.kind", "reference"),
    ("reward.moments.center", True),
    ("reward.moments.std", 3.0),
    ("reward.unfinished_factor", 0.8),
    ("reward.overlong.buffer_tokens", 5),
    ("reward.overlong.penalty", 1.5),
    ("reward.overlong.max_tokens", 4),
    ("reward.overlong.floor", False),
    ("reward.length_penalty.per_token", 0.5),
    ("reward.length_penalty.free_tokens", 3),
]


@each_key("key, value", ARITHMETIC_CASES)
def test_each_reward_shaping_step_follows_its_table_with_all_others(key: str, value: Any) -> None:
    tables = with_keys({f"reward.{name}": table for name, table in ALL_STEPS.items()})
    table, name = key.split(".")[1:] if key.count(".") == 2 else (None, key.split(".")[1])
    if key == "reward.moments.std":
        tables["reward"]["moments"] = REFERENCE
    if key == "reward.overlong.floor":
        tables["reward"]["overlong"] = {**OVERLONG, "max_tokens": 4}
    other = deepcopy(tables)
    (other["reward"] if table is None else other["reward"][table])[name] = value
    different = harness.differing(numbers(tables), numbers(other))
    assert {"shaped", "returns", "actor table", "critic table"} <= different
    assert "scores" not in different
    before, after = (Recipe.model_validate(each) for each in (tables, other))
    assert {stage for stage in STAGES if stage_fingerprint(stage, before) != stage_fingerprint(stage, after)} == {
        "advantages"
    }


KL_KEYS = [f"ppo.kl.{name}" for name in ("place", "estimator", "coef")]


@holds(*KL_KEYS, "ppo.rollout_correction.kind")
@pytest.mark.parametrize("place", ["reward", "loss"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_penalty_is_in_the_loss_or_reward_as_configured(place: str, estimator: str) -> None:
    coefs = (0.2, 0.7)
    kls = [{**PLACES[place], "estimator": estimator, "coef": coef} for coef in coefs]
    found = [numbers(with_keys({"ppo.kl": kl})) for kl in kls]
    different = harness.differing(*found)
    assert ("token_rewards" in different) == (place == "reward")
    assert "policy minibatches loss" in different
    assert [float(expected["kl/coef"]) for expected in found] == list(coefs)


@holds("ppo.advantages.kind")
def test_advantages_have_the_kind_of_the_recipe() -> None:
    kept = {"gamma": 0.9, "whiten": False}
    found = [numbers(with_keys({"ppo.advantages": {"kind": "monte_carlo", **kept}}))]
    whole = {"kind": "gae", "gae_lambda": 1.0, "gae_lambda_value": None, "length_adaptive_alpha": None, **kept}
    found.append(numbers(with_keys({"ppo.advantages": whole})))
    # With lambda 1 the returns are the discounted rewards, independent of the critic.
    assert harness.differing(*found) >= {"advantages", "actor table"}
    assert "returns" not in harness.differing(*found)


GROUPS: tuple[dict[str, Any], ...] = (
    {"kind": "grpo", "scale": "group", "leave_one_out": False},
    {"kind": "grpo", "scale": "batch", "leave_one_out": False},
    {"kind": "grpo", "scale": "none", "leave_one_out": False},
    {"kind": "grpo", "scale": "group", "leave_one_out": True},
    {"kind": "rloo"},
    {"kind": "opo"},
    {"kind": "grpo_passk", "scale": "group"},
    {"kind": "grpo_passk", "scale": "none"},
    {"kind": "reinforce_plus_plus_baseline"},
)
"""Estimators that compare groups; all pairs have different advantages."""


@holds("ppo.advantages.kind", "ppo.advantages.scale", "ppo.advantages.leave_one_out")
def test_group_advantages_follow_their_table() -> None:
    # Without the clamp of `scale`, one response of the last prompt is best.
    sizes = {"rollout.samples_per_prompt": 4, "rollout.prompts_per_step": 3}
    changes = {**sizes, "reward.scale": None, "ppo.kl": LOSS}
    found = [numbers(with_keys({"ppo.advantages": table, **changes})) for table in GROUPS]
    for one, other in combinations(found, 2):
        assert harness.differing(one, other) >= {"advantages", "actor table"}
    assert found[0]["advantage/equal_groups_frac"] < 1


def test_decoupled_advantages_read_components_and_their_weights() -> None:
    def tables(second: float, table: Mapping[str, Any]) -> dict[str, Any]:
        parts = {"right": {"kind": "exact_match", "weight": 1.0}, "form": {"kind": "exact_match", "weight": second}}
        reward = {**BASE["reward"], "kind": "sum", "parts": parts, "scale": None}
        changes = {"rollout.samples_per_prompt": 4, "rollout.prompts_per_step": 3, "ppo.kl": LOSS}
        return with_keys({**changes, "ppo.advantages": table, "reward": reward})

    weights = (0.5, -2.0)
    found = [numbers(tables(second, {"kind": "gdpo"})) for second in weights]
    found.append(numbers(tables(0.5, {"kind": "reinforce_plus_plus_baseline"})))
    for one, other in combinations(found, 2):
        assert harness.differing(one, other) >= {"advantages", "actor table"}
    recipes = [Recipe.model_validate(tables(second, {"kind": "gdpo"})) for second in weights]
    assert len({stage_fingerprint("advantages", recipe) for recipe in recipes}) == 2


@holds("ppo.advantages.kind")
@pytest.mark.parametrize("changes", [{}, {"reward.overlong": OVERLONG, "reward.unfinished_factor": 0.3}])
def test_remax_compares_each_response_with_the_greedy_one(changes: dict[str, Any]) -> None:
    changes = {**changes, "ppo.kl": LOSS, "rollout.temperature": 1.6, "rollout.top_p": 0.9}
    tables = with_keys({**changes, "ppo.advantages": {"kind": "remax"}})
    found = [numbers(tables), numbers(with_keys({**changes, "ppo.advantages": {"kind": "raw_reward", **PLAIN}}))]
    assert harness.differing(*found) >= {"advantages", "actor table", "baseline/score_mean", "mask"}
    # The responses at position 3 and 6, and the greedy response to the prompt at position 3, have no score.
    assert found[0]["mask"].any(1).tolist() == [row not in (3, 6, 7) for row in range(12)]
    played = wired_and_textbook(tables)[0]
    assert played.greedy is not None
    assert len(set(played.greedy[0].lengths.tolist())) > 1
    assert sorted(set(played.rollouts.seeds.tolist()) & set(played.greedy[0].seeds.tolist())) == []


PLAIN = {"gamma": 1.0, "whiten": False}


def test_raw_rewards_are_monte_carlo_returns_without_critic() -> None:
    kept = {"gamma": 0.9, "whiten": True}
    found = [numbers(with_keys({"ppo.advantages": {"kind": kind, **kept}})) for kind in ("monte_carlo", "raw_reward")]
    different = harness.differing(*found)
    assert {"values", "returns", "critic table"} <= different
    assert not different & {"advantages", "token_rewards", "actor table"}


@holds("ppo.policy_loss.kind", "ppo.policy_loss.ratio_gradient")
@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        (GSPO, "clip_low", 0.2),
        (GSPO, "clip_high", 0.3),
        (GSPO, "ratio_gradient", "sequence"),
        (CISPO, "clip_low", 1.0),
        (CISPO, "clip_high", 0.02),
    ],
    ids=str,
)
def test_each_policy_loss_has_its_own_bounds_and_gradient(table: dict[str, Any], key: str, value: Any) -> None:
    found = [numbers(with_keys({"ppo.policy_loss": each})) for each in (table, {**table, key: value})]
    assert "actor table" in harness.differing(*found)


@pytest.mark.parametrize("table", POLICY_LOSSES, ids=lambda table: table["kind"])
@pytest.mark.parametrize("kind", AGGREGATIONS[1:])
def test_policy_loss_includes_entropy_and_penalty_terms(table: dict[str, Any], kind: str) -> None:
    changes = {"ppo.kl": LOSS, "ppo.policy_loss": {**table, "aggregation": kind, "positive_nll_coef": 0.2}}
    numbers(with_keys(changes))


@holds("ppo.policy_loss.function", "ppo.policy_loss.options.*")
def test_loss_of_the_user_has_its_options_and_all_terms(tmp_path: Path) -> None:
    """The example of docs/your-own-loss.md, with entropy bonus, KL penalty and correction."""
    sapo = {
        "kind": "python",
        "function": f"{written(tmp_path, 'my_loss.py')}:loss",
        **SHARED,
        "positive_nll_coef": 0.2,
    }
    options: list[dict[str, float]] = [{"tau_pos": 1.0, "tau_neg": 1.05}, {"tau_pos": 0.5, "tau_neg": 3.0}]
    found = [
        numbers(with_keys({"ppo.kl": LOSS, "ppo.policy_loss": {**sapo, "options": each, "aggregation": kind}}))
        for each, kind in zip(options, AGGREGATIONS[:2], strict=True)
    ]
    assert harness.differing(*found) >= {"actor table", "policy minibatches loss"}
    other = {**sapo, "function": f"{USERS}:clip", "options": {}, "needs_entropy": False}
    tables = with_keys({"ppo.kl": LOSS, "ppo.policy_loss": other})
    ours = {"kind": "clip", "clip_low": 0.2, "clip_high": 0.2, **SHARED, "positive_nll_coef": 0.2}
    builtin = with_keys({"ppo.kl": LOSS, "ppo.policy_loss": ours})
    theirs, clip = (harness.played(json.dumps(each)) for each in (tables, builtin))
    # A copy of the clip loss trains bit-identically.
    assert torch.equal(theirs.tables["actor"], clip.tables["actor"])


@holds("ppo.policy_loss.needs_entropy")
def test_loss_of_the_user_receives_entropies_if_it_needs_them() -> None:
    mine = {"kind": "python", "function": f"{USERS}:every_grid", **SHARED}
    needed = with_keys({"ppo.policy_loss": {**mine, "needs_entropy": True}})
    metrics = harness.played(json.dumps(needed)).actor_update.metrics()
    assert metrics["policy/custom_tokens"] == 1.0
    assert metrics["policy/custom_gap"] != 0.0
    with pytest.raises(RecipeError, match=r"failed: TypeError: unsupported .*'NoneType'.*users_training.py"):
        harness.played(json.dumps(with_keys({"ppo.policy_loss": mine})))


@holds("ppo.advantages.function", "ppo.advantages.options.*", "ppo.advantages.trains_critic")
def test_estimator_of_the_user_has_its_options_and_its_critic() -> None:
    mine = {"kind": "python", "function": f"{USERS}:median", "whiten": False}
    tables: list[dict[str, Any]] = [{**mine, "options": {"scale": scale}} for scale in (1.0, 3.0)]
    tables.append({**mine, "options": {"scale": 1.0}, "whiten": True})
    with_critic = {**mine, "function": f"{USERS}:rewards_to_go", "trains_critic": True}
    found = [numbers(with_keys({"ppo.advantages": table})) for table in (*tables, with_critic)]
    for one, other in combinations(found, 2):
        assert harness.differing(one, other) >= {"advantages", "actor table"}
    assert "critic table" in found[3]
    assert "critic table" not in found[0]


@holds("ppo.policy_loss.digest", "ppo.advantages.digest")
@pytest.mark.parametrize(("table", "stage"), [("policy_loss", "actor_update"), ("advantages", "advantages")])
def test_changed_file_changes_the_fingerprint_of_the_stage_that_calls_it(table: str, stage: str) -> None:
    named = {"kind": "python", "function": f"{USERS}:clip"}
    one, other = (
        Recipe.model_validate(with_keys({f"ppo.{table}": {**named, "digest": digest}})) for digest in ("", "0" * 64)
    )
    differing = {name for name in STAGES if stage_fingerprint(name, one) != stage_fingerprint(name, other)}
    assert differing == {stage}
    with pytest.raises(RecipeError, match=f"the `ppo.{table}` function has changed"):
        getattr(other.ppo, table).called.require_there()


@holds("ppo.old_logprobs")
def test_old_logprobs_come_from_the_configured_source() -> None:
    plain = {"ppo.rollout_correction": {"kind": "none"}}
    trainer, sampler = (numbers(with_keys({**plain, "ppo.old_logprobs": by})) for by in ("trainer", "sampler"))
    assert harness.differing(trainer, sampler) >= {"logprobs", "entropy", "actor table", "token_rewards"}
    once = {**plain, "ppo.kl": LOSS, "ppo.epochs": 1, "ppo.minibatch_seqs": 12}
    trainer, current = (numbers(with_keys({**once, "ppo.old_logprobs": by})) for by in ("trainer", "current"))
    # With a single update the old log-probs are the current ones, so nothing else changes.
    assert harness.differing(trainer, current) == {"logprobs", "entropy"}
    assert current["policy/ratio_max"] == 1.0


AS_IN_K3 = pytest.mark.ci("k1, k3; two values of a key")


@holds("ppo.kl.gradient", "ppo.kl.estimator", "ppo.kl.input_clamp", "ppo.kl.output_clamp")
@pytest.mark.parametrize("estimator", ["k1", "k3", *(pytest.param(kind, marks=AS_IN_K3) for kind in ("k2", "abs"))])
def test_loss_penalty_gradient_follows_the_recipe(estimator: str) -> None:
    kinds = ["k2", "score_function", "importance", *(["estimator"] if estimator != "k1" else [])]
    found = []
    # Each clamp changes some tokens and leaves others; a clamped token has no gradient.
    tight = {"input_clamp": 0.4, "output_clamp": 0.3 if estimator in ("k1", "abs") else 0.05}
    for clamps in (CLAMPS, tight):
        for gradient in kinds:
            kl = {**LOSS, **clamps, "estimator": estimator, "gradient": gradient, "coef": 2.0}
            # The k2 gradient ignores clamps. Without clamps it equals the gradient of the k2 estimator, and of k3
            # with the score function: 1 - exp(-d) + (exp(-d) - 1 + d) = d.
            by_itself = (estimator, gradient) in (("k2", "estimator"), ("k3", "score_function"))
            is_k2 = gradient == "k2" or (by_itself and clamps == CLAMPS)
            found.append((is_k2, numbers(with_keys({"ppo.kl": kl}))))
    for (one_is_k2, one), (other_is_k2, other) in combinations(found, 2):
        assert ("actor table" in harness.differing(one, other)) != (one_is_k2 and other_is_k2)


@holds("ppo.kl.adaptive.target_per_token", "ppo.kl.adaptive.target_per_sequence", "ppo.kl.adaptive.horizon_seqs")
@pytest.mark.parametrize(
    "place", ["reward", pytest.param("loss", marks=pytest.mark.ci("reward; two values of a key"))]
)
def test_adaptive_coefficient_is_carried_to_the_next_step(place: str) -> None:
    # Some targets are within a fifth of the measured KL, others are not.
    followed = []
    for unit, targets in (("token", (0.01, 9.0)), ("sequence", (0.01, 90.0))):
        near = float(numbers(with_keys({"ppo.kl": adapting(place, unit, 1.0, 300)}))["kl/measured"])
        cases = [(near / 1.1, 300), (near / 1.1, 100), (near / 0.95, 300), *((target, 300) for target in targets)]
        for target, horizon in cases:
            expected = numbers(with_keys({"ppo.kl": adapting(place, unit, target, horizon)}))
            assert expected["kl/coef"] == harness.CARRIED_COEF
            followed.append(float(expected["next kl/coef"]) / harness.CARRIED_COEF)
    # 12 sequences: e = 0.1, 0.1, -0.05, 0.2, -0.2.
    changes = [1 + 0.1 * 12 / 300, 1 + 0.1 * 12 / 100, 1 - 0.05 * 12 / 300, 1 + 0.2 * 12 / 300, 1 - 0.2 * 12 / 300]
    assert followed == pytest.approx(changes * 2, abs=1e-4)


def adapting(place: str, unit: str, target: float, horizon: int) -> dict[str, Any]:
    return {**PLACES[place], "adaptive": {f"target_per_{unit}": target, "horizon_seqs": horizon}}


LEVELS = ("token", "sequence_sum", "sequence_mean", "sequence_max")


@holds(*(f"ppo.rollout_rejection.{key}" for key in ("kind", "statistic", "level", "min_ratio", "max_ratio", "max")))
@pytest.mark.parametrize(
    "all_limits", [False, pytest.param(True, marks=pytest.mark.ci("one limit of each statistic"))]
)
def test_rejection_follows_the_recipe(all_limits: bool) -> None:
    limits = {
        "token": (0.05, 0.03),
        "sequence_sum": (0.1, 0.05),
        "sequence_mean": (0.041, 0.025),
        "sequence_max": (0.075, 0.049),
    }
    kept = []
    for level in LEVELS:
        for low, high in ((None, 1.2), (0.9, None), (0.85, 1.25))[0 if all_limits else 2 :]:
            kept.append({**RATIO, "level": level, "min_ratio": low, "max_ratio": high})
        for statistic, own_limits in (("k2", limits[level][:1]), ("k3", limits[level][1:])):
            own = {"statistic": statistic, "level": level, "max_ratio": None}
            kept += [{**RATIO, **own, "max": limit} for limit in (limits[level] if all_limits else own_limits)]
    found = [numbers(with_keys({"ppo.rollout_rejection": rejection})) for rejection in kept]
    fractions = [float(expected["correction/rejected_frac"]) for expected in found]
    assert all(0 < fraction < 1 for fraction in fractions), dict(zip(map(str, kept), fractions, strict=True))
    # Advantages and returns are the same as without rejection: a rejected token keeps its terminal reward.
    as_is = numbers(BASE)
    for expected in found:
        assert not harness.differing(as_is, expected) & {"advantages", "returns", "critic table", "token_rewards"}
        assert {"kept", "actor table"} <= harness.differing(as_is, expected)


def test_all_corrections_apply_together() -> None:
    changes = {
        "ppo.rollout_correction": {"kind": "icepop", **WEIGHTS, "normalize": True},
        "ppo.rollout_rejection": RATIO,
    }
    found = [numbers(with_keys({**changes, "ppo.max_sequence_gap": gap})) for gap in (None, 1.2)]
    assert {"kept", "weights", "actor table"} <= harness.differing(*found)
    trusted = {"kind": "none"}
    alone = numbers(with_keys({"ppo.rollout_correction": trusted, "ppo.max_sequence_gap": 1.2}))
    assert set(np.unique(alone["weights"])) == {0.0, 1.0}


@holds("ppo.rollout_correction.normalize_over")
@pytest.mark.parametrize("kind", ["tis", "icepop_sequence"])
def test_weights_are_divided_by_the_configured_mean(kind: str) -> None:
    table = {"kind": kind, **WEIGHTS, "max_ratio": 1.2, "normalize": True}
    changes = [
        {"ppo.rollout_correction": {**table, "normalize_over": over}, "ppo.rollout_rejection": RATIO}
        for over in ("kept_tokens", "tokens", "sequences")
    ]
    found = [numbers(with_keys(each)) for each in changes]
    means = [float(each["correction/weight_mean"]) for each in found]
    assert means[0] == pytest.approx(1.0)
    for one, other in combinations(found, 2):
        assert "weights" in harness.differing(one, other)
        assert "kept" not in harness.differing(one, other)


def test_whitened_rewards_do_not_include_the_bootstrap_value() -> None:
    plain = {"ppo.truncated": "bootstrap", "ppo.kl": LOSS, "ppo.advantages.whiten": True}
    found = [numbers(with_keys({**plain, "ppo.whiten_rewards": on})) for on in (False, True)]
    assert {"token_rewards", "returns", "critic table", "actor table"} <= harness.differing(*found)
    assert not harness.differing(*found) & {"shaped", "values", "behind"}


@holds(*(f"ppo.resample.{key}" for key in ("kind", "power", "order")))
@pytest.mark.parametrize(("key", "value"), [("power", 0.4), ("order", "before_whitening"), ("seed", 6)])
def test_updates_train_on_the_rows_that_the_recipe_samples(key: str, value: Any) -> None:
    """The penalty is in the loss, and good responses have a term of their own: both are read with the rows."""
    changes = {"ppo.advantages.whiten": True, "ppo.kl": LOSS, "ppo.policy_loss.positive_nll_coef": 0.2}
    other = {"seed": value, "ppo.resample": POWER} if key == "seed" else {"ppo.resample": {**POWER, key: value}}
    found = [numbers(with_keys({**changes, **each})) for each in ({"ppo.resample": POWER}, other)]
    differing = harness.differing(*found)
    assert {"taken advantages", "actor table"} <= differing
    assert ("resampled" in differing) == (key != "order")
    assert ("critic table" in differing) == (key != "order")
    rows = found[1]["resampled"].astype(int).tolist()
    assert len(set(rows)) < len(rows), "no row is repeated: the case is too weak"
    assert not {3, 6} & set(rows), "rows without a score are never sampled"


@holds("ppo.critic_only_steps")
def test_actor_decay_ends_with_its_last_update() -> None:
    for decay in ("linear", "cosine"):
        open_end = {"actor.optimizer.lr_decay_updates": None, "actor.optimizer.lr_schedule": decay}
        found = [numbers(with_keys({**open_end, "ppo.critic_only_steps": waits})) for waits in (1, 2)]
        # Four updates a step, warm-up of three steps: it ends after (4 - 1) * 4 and (4 - 2) * 4 updates.
        assert harness.differing(*found) >= {"policy minibatches lr", "actor table"}
        assert "critic table" not in harness.differing(*found)


@holds("ppo.critic_only_until.explained_variance", "ppo.critic_only_until.at_most")
def test_actor_waits_until_the_critic_explains_the_returns() -> None:
    plain = numbers(BASE)
    reached = float(plain["value/explained_variance"])
    found = {
        (bound, most): numbers(with_keys({"ppo.critic_only_until": {"explained_variance": bound, "at_most": most}}))
        for bound, most in ((reached - 0.01, 3), (reached + 0.01, 3), (reached + 0.01, 2), (reached + 0.01, 1))
    }
    assert [float(step["policy/trained"]) for step in found.values()] == [1.0, 0.0, 0.0, 1.0]
    for step in found.values():
        different = harness.differing(plain, step)
        assert "critic table" not in different
        assert ("actor table" in different) == (not step["policy/trained"])


@holds("actor.router_replay")
def test_old_logprobs_and_update_use_the_experts_of_the_generator() -> None:
    """For one token, the generator chooses another expert than the trainer."""
    off, replayed = (
        harness.played(json.dumps(with_keys({"actor.router_replay": how}))) for how in ("off", "generator")
    )
    assert torch.equal(replayed.rollouts.tokens, off.rollouts.tokens)
    inputs = torch.cat([ids[:-1] for ids in replayed.rollouts.sequences.unpadded()])
    experts = replayed.rollouts.experts
    assert experts is not None
    own = experts_in(moved_table("actor"))[inputs]
    assert torch.equal((own != experts)[:, 0], inputs == OTHER_EXPERT)
    assert 0 < int((inputs == OTHER_EXPERT).sum()) < len(inputs)
    assert replayed.logprobs.experts is None
    assert harness.differing(numbers_of(off), numbers_of(replayed)) >= {"logprobs", "actor table"}
    rows = replayed.rollouts.sequences.unpadded()
    changed = replayed.logprobs.actor != off.logprobs.actor
    for row, (ids, length) in enumerate(zip(rows, replayed.rollouts.lengths.tolist(), strict=True)):
        follows = ids[len(ids) - length - 1 : -1] == OTHER_EXPERT
        assert torch.equal(changed[row, :length], follows & replayed.rollouts.mask[row, :length])
    assert changed.any()


@holds("actor.router_replay")
def test_update_uses_the_experts_of_the_old_logprobs() -> None:
    """The first minibatch chooses the same experts anyway, later ones would choose others."""
    off, replayed = (
        numbers_of(harness.played(json.dumps(with_keys({"actor.router_replay": how})))) for how in ("off", "trainer")
    )
    changed = harness.differing(off, replayed)
    assert changed >= {"actor table", "policy minibatches loss"}
    assert not changed & {"logprobs", "entropy", "critic table"}
    losses = [found["policy minibatches loss"] for found in (off, replayed)]
    assert losses[0][0] == losses[1][0]
    assert all(losses[0][1:] != losses[1][1:])


@holds("actor.optimizer.lr_ticks", "critic.optimizer.lr_ticks")
@pytest.mark.parametrize("decay", ["linear", pytest.param("cosine", marks=pytest.mark.ci("linear"))])
def test_step_ticked_rate_is_constant_within_a_step(decay: str) -> None:
    # The actor has four updates a step, the critic six; the harness is at step 2, the actor's first.
    lengths = {"actor.optimizer.lr_warmup_updates": 8, "actor.optimizer.lr_decay_updates": 12}
    lengths |= {"critic.optimizer.lr_warmup_updates": 6, "critic.optimizer.lr_decay_updates": None}
    lengths |= {f"{role}.optimizer.lr_schedule": decay for role in ("actor", "critic")}
    for waits, rate in ((1, 0.2), (0, 0.4)):
        moving = {**lengths, "ppo.critic_only_steps": waits}
        ticked = {**moving, "actor.optimizer.lr_ticks": "step", "critic.optimizer.lr_ticks": "step"}
        found = [numbers(with_keys(keys)) for keys in (moving, ticked)]
        assert harness.differing(*found) >= {"policy minibatches lr", "value minibatches lr", "actor table"}
        # The actor's rate reaches its peak 0.4 after two ticks of warm-up, the critic's 0.2 after one.
        assert found[1]["policy minibatches lr"].tolist() == [rate] * 4
        assert found[1]["value minibatches lr"].tolist() == [0.2] * 6


def test_decay_without_a_length_ends_with_the_run() -> None:
    open_end = {"critic.optimizer.lr_decay_updates": None}
    found = [numbers(with_keys({**open_end, "steps": steps})) for steps in (4, 6)]
    assert harness.differing(*found) >= {"value minibatches lr", "critic table"}


@holds("reward.max_error_frac")
def test_step_fails_above_the_allowed_reward_error_fraction(tmp_path: Path) -> None:
    # Two of twelve samples have no score.
    for fraction, stops in ((0.2, False), (0.15, True)):
        played = open_harness(tmp_path / f"{fraction}", with_keys({"reward.max_error_frac": fraction}))
        if stops:
            with pytest.raises(RewardError, match=r"2 of 12 samples .*16\.7%.*15\.0%.*`riddle 13` error no number"):
                play_step(played)
        else:
            play_step(played)


def test_step_without_any_score_always_fails(tmp_path: Path) -> None:
    lost = {place: Score(None, "timeout", "10 s") for place in range(12)}
    played = open_harness(tmp_path, with_keys({"reward.max_error_frac": 1.0}), lost=lost)
    with pytest.raises(RewardError, match=r"none of the 12 samples of step 2 has a score.*`riddle 12` timeout") as e:
        play_step(played)
    assert (e.value.exit_code, "ppoctl resume" in str(e.value.hint)) == (4, True)


def test_samples_have_their_prompt_and_seeds_of_the_run(tmp_path: Path) -> None:
    for seed in (5, 6):
        played = open_harness(tmp_path / f"{seed}", with_keys({"seed": seed}))
        rollouts = play_step(played).rollouts
        prompt_rows = played.prompt_source.prompts_for(STEP_NUMBER).rows
        owners = [(prompt, index) for prompt in prompt_rows for index in range(2)]
        assert rollouts.prompt_ids == [prompt.id for prompt, _ in owners]
        assert rollouts.sample_indices == [index for _, index in owners]
        assert rollouts.prompt_tokens.tolist() == [token for prompt, _ in owners for token in prompt.token_ids]
        assert rollouts.seeds.tolist() == [textbook.derived(seed, 2, "rollout", p.id, index) for p, index in owners]
        requests = {request.key: (request, params) for request, params, _ in played.generator.requests}
        assert list(requests) == [f"{prompt.id}#{index}" for prompt, index in owners]
        for row, (request, params) in enumerate(requests.values()):
            assert (request.seed, request.prompt_tokens) == (int(rollouts.seeds[row]), owners[row][0].token_ids)
            assert (params.temperature, params.max_new_tokens, params.stop_strings) == (1.25, 6, ("7 3",))
            assert (params.top_p, params.top_k) == (1.0, None)


def test_responses_end_as_configured(tmp_path: Path) -> None:
    for length, stops in ((6, ["7 3"]), (3, ["7 3"]), (6, ["11 2"]), (6, ["2"])):
        tables = with_keys({"rollout.max_new_tokens": length, "rollout.stop_strings": stops})
        rollouts = wired_and_textbook(tables)[0].rollouts
        for row, size in enumerate(rollouts.lengths.tolist()):
            ids = rollouts.tokens[row, :size].tolist()
            words = " ".join(map(str, ids))
            by_itself = ids[-1] == END or stops[0] in words
            assert bool(rollouts.finish[row] == 0) == by_itself
            assert by_itself or size == length
            assert rollouts.texts[row] == words.partition(stops[0])[0]


def test_unscored_rows_and_masked_tokens_do_not_affect_the_step() -> None:
    """Values at unscored rows and masked tokens may be anything: the step is the same."""
    played, _ = wired_and_textbook(BASE)
    counted = played.advantages.mask
    assert counted.sum() < played.rollouts.mask.sum() < (played.rollouts.tokens > 0).sum()
    for lost in (3, 6):
        assert not counted[lost].any()
        assert played.rollouts.mask[lost].any()
    for grid in (played.advantages.advantages, played.advantages.returns, played.advantages.token_rewards):
        assert not grid[~counted].any()
    for grid in (played.values.values, played.logprobs.actor, played.logprobs.entropy, played.logprobs.reference):
        assert grid is not None
        assert not grid[~played.rollouts.mask].any()
        assert grid[3].any()


def test_reference_is_not_computed_without_a_kl_penalty() -> None:
    played, _ = wired_and_textbook(with_keys({"ppo.kl": {"place": "none"}}))
    assert played.logprobs.reference is None
    assert not [name for name in played.advantages.metrics() if name.startswith("kl/")]


def test_harness_step_exercises_every_feature() -> None:
    """Every feature that a key turns on is active in the step of the harness."""
    played, expected = wired_and_textbook(BASE)
    assert (expected["policy minibatches clip_frac_high"] > 0).any()
    assert (expected["policy minibatches clip_frac_low"] > 0).any()
    assert (expected["policy minibatches dual_clip_frac"] > 0).any()
    assert played.critic_update.summary["value/loss"] > 0
    assert len(expected["policy minibatches loss"]) == 4
    assert len(expected["value minibatches loss"]) == 6
    assert sorted(set(played.rollouts.lengths.tolist())) == [1, 2, 3, 5, 6]
    assert (expected["policy minibatches grad_norm"] > 0.05).any()
    assert (expected["value minibatches grad_norm"] > 0.06).all()
    holes = (played.rollouts.lengths - played.rollouts.mask.sum(1)).tolist()
    assert holes == [2, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0]


def test_textbook_comparison_detects_permuted_advantages() -> None:
    played, expected = wired_and_textbook(BASE)
    with pytest.raises(AssertionError, match="advantages"):
        harness.require_equal(numbers_of(played), {"advantages": expected["advantages"][::-1].copy()})
