"""A value head on the actor's model: a joint step equals that of the textbook, for two values of each of its keys."""

import json
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from fakes.bigram import experts_in
from ppoctl.algorithms.joint import JOINT_CORRECTED
from ppoctl.algorithms.stages.values import with_extra_token
from ppoctl.algorithms.trace import trace
from ppoctl.core.batch.records import TRUNCATED
from ppoctl.recipe.schema import Recipe
from wiring import harness
from wiring.cases import each_key, holds
from wiring.harness import moved_table, numbers_of, wired_and_textbook, with_keys

HEAD: dict[str, Any] = {
    "critic": {"on": "actor", "head": "linear", "layers_copied": 0},
    "ppo.critic_epochs": None,
    "ppo.critic_only_steps": 0,
    "ppo.value_loss": {"clip": 0.05, "scale": 0.7, "coef": 0.3, "aggregation": "token_mean"},
}
"""Changes of the recipe of the harness. The clip bounds some values of the second epoch."""


def numbers(**changes: Any) -> dict[str, np.ndarray]:
    played, expected = wired_and_textbook(with_keys({**deepcopy(HEAD), **changes}))
    harness.require_equal(numbers_of(played), expected)
    return expected


@each_key(
    "key, value",
    [
        ("ppo.value_loss.coef", 0.9),
        ("ppo.value_loss.scale", 0.2),
        ("ppo.value_loss.clip", None),
        ("ppo.value_loss.aggregation", "sequence_mean_token_sum"),
        ("ppo.value_loss.aggregation", "fixed_length"),
    ],
)
def test_joint_step_with_two_values_of_a_key_equals_the_textbook(key: str, value: Any) -> None:
    as_is, other = numbers(), numbers(**{key: value})
    different = harness.differing(as_is, other)
    assert {"actor table", "policy minibatches loss", "policy/value_loss"} <= different
    assert ("value/loss" in different) or key.endswith("coef")
    assert different.isdisjoint({"values", "returns", "advantages", "logprobs"})
    before, after = (_fingerprints(changes) for changes in ({}, {key: value}))
    assert {stage for stage in before if before[stage] != after[stage]} == {"actor_update"}


@pytest.mark.parametrize(
    "changes",
    [
        {"ppo.truncated": "bootstrap"},
        {"ppo.truncated": "filter", "ppo.advantages.whiten": True},
        {"ppo.rollout_correction": {"kind": "none"}, "ppo.policy_loss.positive_nll_coef": 0.3},
        {"ppo.max_sequence_gap": 1.25, "ppo.minibatch_seqs": 1},
        {"rollout.top_p": 0.7, "ppo.policy_loss.aggregation": "sequence_mean_token_mean"},
    ],
    ids=str,
)
def test_joint_step_equals_the_textbook_with_settings_of_the_policy(changes: dict[str, Any]) -> None:
    expected = numbers(**changes)
    assert 0 < float(expected["value/clip_frac"]) < 1
    assert float(expected["policy/value_loss"]) == pytest.approx(0.3 * float(expected["value/loss"]))


def test_minibatch_without_a_token_of_the_policy_trains_the_value_head() -> None:
    """The correction rejects all tokens of some minibatches, which have one response each."""
    expected = numbers(**{"ppo.max_sequence_gap": 1.25, "ppo.minibatch_seqs": 1})
    assert len(expected["policy minibatches loss"]) > len(expected["policy minibatches ratio_mean"]) > 0


@holds("critic.head", "critic.layers_copied")
@pytest.mark.parametrize(("key", "value"), [("head", "mlp"), ("layers_copied", 1)])
def test_another_value_head_changes_the_fingerprint_of_the_update(key: str, value: Any) -> None:
    before, after = (_fingerprints(changes) for changes in ({}, {f"critic.{key}": value}))
    assert {stage for stage in before if before[stage] != after[stage]} == {"actor_update"}


def test_bootstrap_changes_the_fingerprint_of_the_stage_that_computes_values() -> None:
    before, after = (_fingerprints(changes) for changes in ({}, {"ppo.truncated": "bootstrap"}))
    assert {stage for stage in before if before[stage] != after[stage]} == {"logprobs", "advantages"}


def _fingerprints(changes: dict[str, Any]) -> dict[str, str]:
    recipe = Recipe.model_validate(with_keys({**deepcopy(HEAD), **changes}))
    return {stage.name: stage.fingerprint(recipe) for stage in trace(JOINT_CORRECTED).stages}


@holds("actor.router_replay")
@pytest.mark.parametrize("replay", ["generator", "trainer"])
def test_extra_tokens_of_bootstrap_values_have_no_given_experts(replay: str) -> None:
    """A truncated response is one token longer in the pass that computes its bootstrap value. The record has the
    experts of real inputs only, and the router chooses for the last real token, which becomes an input."""
    changes = {**deepcopy(HEAD), "ppo.truncated": "bootstrap", "actor.router_replay": replay}
    played = harness.played(json.dumps(with_keys(changes)))
    truncated = played.rollouts.finish == TRUNCATED
    assert 0 < int(truncated.sum()) < len(truncated)
    inputs = torch.cat([ids[:-1] for ids in played.rollouts.sequences.unpadded()])
    head = torch.cat([moved_table("actor"), moved_table("critic")[:, None]], dim=1)
    if replay == "trainer":
        assert played.logprobs.experts is not None
        assert torch.equal(played.logprobs.experts.long(), experts_in(head)[inputs])
    else:
        longer = with_extra_token(played.rollouts.routed_sequences, truncated)
        assert longer.experts is not None
        by_row = longer.experts.split(longer.input_lengths.tolist())
        assert [bool((row < 0).any()) for row in by_row] == truncated.tolist()
        assert all(int(row[-1]) == -1 for row, is_longer in zip(by_row, truncated.tolist(), strict=True) if is_longer)
        assert torch.equal(
            torch.cat(by_row)[torch.cat(by_row) >= 0].to(torch.uint8), played.rollouts.experts.flatten()
        )
