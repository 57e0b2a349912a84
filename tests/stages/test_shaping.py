"""Each reward shaping step between scores and the rewards that training uses, on hand-made rollouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ppoctl.algorithms.stages.shaping import (
    ApplyClip,
    ApplyScale,
    NormalizeByReferenceStd,
    NormalizeByRunningStd,
    PenalizeLength,
    PenalizeOverlong,
    ScaleTruncated,
    ShapedRewards,
    ShapingStep,
    apply_shaping,
    shaping_steps,
)
from ppoctl.core.batch.records import Carry
from ppoctl.rewards.shaping_tables import RewardShaping
from stages import stub_models


def shaped_rewards(rewards: Any, **changes: Any) -> ShapedRewards:
    """Return rewards of two responses, of two and three tokens."""
    keys = {"rollouts": stub_models.rollouts(), "valid": torch.tensor([True, True]), "carry": Carry()}
    return ShapedRewards(torch.tensor(rewards), **{**keys, **changes})


@pytest.mark.parametrize(
    ("moments", "step"),
    [
        ({"kind": "reference", "std": 2.5, "center": True}, NormalizeByReferenceStd(2.5, center=True)),
        ({"kind": "reference"}, NormalizeByReferenceStd(None, center=False)),
        ({"kind": "running", "center": True}, NormalizeByRunningStd(center=True)),
    ],
)
@pytest.mark.parametrize("max_tokens", [None, 9])
def test_each_table_of_shaping_becomes_its_step_in_order(
    moments: dict[str, Any], step: ShapingStep, max_tokens: int | None
) -> None:
    tables = {
        "scale": {"from": [0.0, 4.0], "to": [-1.0, 2.0]},
        "clip": {"low": -0.5, "high": 0.75, "place": "after_moments"},
        "moments": moments,
        "unfinished_factor": 0.25,
        "overlong": {"buffer_tokens": 3, "penalty": 0.5, "max_tokens": max_tokens, "floor": False},
        "length_penalty": {"per_token": 0.125, "free_tokens": 6},
    }
    assert shaping_steps(RewardShaping.model_validate(tables), max_new_tokens=13) == (
        ApplyScale((0.0, 4.0), (-1.0, 2.0)),
        step,
        ApplyClip(-0.5, 0.75),
        ScaleTruncated(0.25),
        PenalizeOverlong(max_tokens or 13, 3, 0.5, False),
        PenalizeLength(0.125, 6),
    )


def test_response_reward_is_at_last_unmasked_token() -> None:
    mask = torch.tensor([[True, True, False], [True, True, False]])
    rollouts = stub_models.rollouts(mask=mask, sampler_logprobs=stub_models.ACTOR * mask)
    found = shaped_rewards([1.0, 2.0], rollouts=rollouts)
    assert found.per_token.tolist() == [[0.0, 1.0, 0.0], [0.0, 2.0, 0.0]]
    assert found.per_response.tolist() == [1.0, 2.0]


def test_token_rewards_keep_position_and_are_zero_if_masked() -> None:
    found = shaped_rewards([[0.5, 0.25, 9.0], [1.0, 0.0, -3.0]])
    assert found.per_token.tolist() == [[0.5, 0.25, 0.0], [1.0, 0.0, -3.0]]
    assert found.per_response.tolist() == [0.75, -2.0]


@pytest.mark.parametrize("rewards", [[5.0, 2.0], [[5.0, 5.0, 5.0], [0.0, 0.0, 2.0]]])
def test_unscored_response_gets_zero_reward(rewards: Any) -> None:
    found = shaped_rewards(rewards, valid=torch.tensor([False, True]))
    assert found.per_response.tolist() == [0.0, 2.0]
    assert found.per_token.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]]


def test_shaping_steps_run_in_order_and_mean_skips_unscored_rows() -> None:
    # 1 -> -1 + 2 = 1 -> 10; the other has no score.
    steps = (ApplyScale((0.0, 1.0), (-1.0, 1.0)), ApplyScale((-1.0, 1.0), (0.0, 10.0)))
    found = apply_shaping(stub_models.rewards(1.0, 0.0, outcomes=(0, 2)), stub_models.rollouts(), Carry(), steps)
    assert found.per_response.tolist() == [10.0, 0.0]
    assert found.metrics == {"reward/clamped_frac": 0.0, "reward/shaped_mean": 10.0}


def test_token_scores_replace_scores_in_shaping() -> None:
    scores = torch.tensor([[0.5, 1.0, 0.0], [0.0, 0.25, 0.5]])
    found = apply_shaping(
        replace(stub_models.rewards(), token_scores=scores),
        stub_models.rollouts(),
        Carry(),
        (ApplyScale((0.0, 1.0), (0.0, 2.0)),),
    )
    assert found.per_token.tolist() == [[1.0, 2.0, 0.0], [0.0, 0.5, 1.0]]
    assert found.metrics["reward/shaped_mean"] == 2.25


def test_score_of_a_row_without_token_scores_counts_at_its_last_unmasked_token() -> None:
    # The first row has two unmasked tokens. The grid is narrower than the responses of other rounds.
    rewards = replace(stub_models.rewards(3.0, 7.0), token_scores=torch.tensor([[torch.nan, 0.0], [0.5, 0.25]]))
    found = apply_shaping(rewards, stub_models.rollouts(), Carry(), ())
    assert found.per_token.tolist() == [[0.0, 3.0, 0.0], [0.5, 0.25, 0.0]]
    assert found.per_response.tolist() == [3.0, 0.75]


NAN_HERE = [[0.5, 2.0, float("nan")], [0.0, -1.0, 3.0]]
"""Token rewards with garbage where masked out."""


@pytest.mark.parametrize(
    ("step", "rewards", "after", "metric"),
    [
        # One of two is outside; of the five unmasked tokens 2, -1 and 3 are.
        (ApplyScale((0.0, 1.0), (0.0, 4.0)), [0.25, 7.0], [1.0, 4.0], 0.5),
        (ApplyScale((0.0, 1.0), (0.0, 4.0)), NAN_HERE, [[2.0, 4.0, 0.0], [0.0, 0.0, 4.0]], 0.6),
        (ApplyClip(-0.5, 1.0), [0.25, 7.0], [0.25, 1.0], 0.5),
        (ApplyClip(-0.5, 1.0), [-0.5, 1.0], [-0.5, 1.0], 0.0),
        (ApplyClip(-0.5, 1.0), NAN_HERE, [[0.5, 1.0, 0.0], [0.0, -0.5, 1.0]], 0.6),
        # The second is truncated: 2 -> 0.5, so (-1.5 + 0) / 2; its tokens add up to 2, too.
        (ScaleTruncated(0.25), [1.0, 2.0], [1.0, 0.5], -0.75),
        (ScaleTruncated(0.25), NAN_HERE, [[0.5, 2.0, 0.0], [0.0, -0.25, 0.75]], -0.75),
        # Two tokens and three: 0 and -(3 - 2) / 2 * 0.4.
        (PenalizeOverlong(4, 2, 0.4, floor=True), [1.0, 2.0], [1.0, 1.8], -0.1),
        (PenalizeOverlong(4, 2, 0.4, floor=True), NAN_HERE, [[0.5, 2.0, 0.0], [0.0, -1.0, 2.8]], -0.1),
        # -(2 - 1) * 0.5 and -(3 - 1) * 0.5.
        (PenalizeLength(0.5, 1), [1.0, 2.0], [0.5, 1.0], -0.75),
        (PenalizeLength(0.5, 1), NAN_HERE, [[0.5, 1.5, 0.0], [0.0, -1.0, 2.0]], -0.75),
    ],
    ids=str,
)
def test_shaping_step_treats_responses_and_tokens_alike(
    step: ShapingStep, rewards: Any, after: Any, metric: float
) -> None:
    found = step(shaped_rewards(rewards, rollouts=stub_models.rollouts(finish=torch.tensor([0, 1]))))
    assert (found.per_response if found.rewards.ndim == 1 else found.per_token).tolist() == [
        pytest.approx(row) for row in after
    ]
    assert list(found.metrics.values()) == [pytest.approx(metric)]


@pytest.mark.parametrize("step", [ApplyClip(-0.5, 1.0), ApplyScale((-0.5, 1.0), (0.0, 1.0))], ids=str)
@pytest.mark.parametrize("rewards", [[0.25, 7.0], [[0.5, 0.25, 9.0], [3.0, 3.0, 3.0]]])
def test_clamped_fraction_counts_scored_responses_only(step: ShapingStep, rewards: Any) -> None:
    found = step(shaped_rewards(rewards, valid=torch.tensor([True, False])))
    assert list(found.metrics.values()) == [0.0]
    found = step(shaped_rewards(rewards, valid=torch.tensor([False, True])))
    assert list(found.metrics.values()) == [1.0]


def test_running_moments_cover_all_steps() -> None:
    # Step 1: 1, 3: mean 2, std sqrt(2). Step 2: 1, 3, 5, 7: mean 4, m2 = 9 + 1 + 1 + 9 = 20, std sqrt(20 / 3).
    first = NormalizeByRunningStd(center=False)(shaped_rewards([1.0, 3.0]))
    assert first.rewards.tolist() == pytest.approx([1 / 2**0.5, 3 / 2**0.5])
    assert first.metrics == {"reward/moments_mean": 2.0, "reward/moments_std": pytest.approx(2**0.5)}
    second = NormalizeByRunningStd(center=False)(shaped_rewards([5.0, 7.0], carry=first.carry))
    assert second.carry == Carry(reward_count=4.0, reward_mean=4.0, reward_m2=20.0)
    std = (20 / 3) ** 0.5
    assert second.rewards.tolist() == pytest.approx([5 / std, 7 / std])
    centered = NormalizeByRunningStd(center=True)(shaped_rewards([5.0, 7.0], carry=first.carry))
    assert centered.rewards.tolist() == pytest.approx([1 / std, 3 / std])


@pytest.mark.parametrize("center", [False, True])
def test_moments_of_token_rewards_are_per_response(center: bool) -> None:
    # Sums 2.5 and 2: mean 2.25, std 0.5 / sqrt(2). Centering subtracts it from the last token.
    found = NormalizeByRunningStd(center)(shaped_rewards(NAN_HERE))
    std, mean = 0.5 / 2**0.5, 2.25 * center
    assert found.per_token.tolist() == [
        pytest.approx([0.5 / std, (2.0 - mean) / std, 0.0]),
        pytest.approx([0.0, -1.0 / std, (3.0 - mean) / std]),
    ]
    assert found.per_response.tolist() == pytest.approx([(2.5 - mean) / std, (2.0 - mean) / std])


@pytest.mark.parametrize("step", [NormalizeByRunningStd(center=True), NormalizeByReferenceStd(None, center=True)])
def test_constant_rewards_are_not_normalized(step: ShapingStep) -> None:
    found = step(shaped_rewards([3.0, 3.0]))
    assert found.rewards.tolist() == [3.0, 3.0]
    assert found.metrics["reward/moments_std"] == 0.0
    assert found.carry.reward_reference_std == 0.0


@pytest.mark.parametrize("step", [NormalizeByRunningStd(center=False), NormalizeByReferenceStd(None, center=False)])
def test_unscored_responses_are_excluded_from_moments(step: ShapingStep) -> None:
    found = step(shaped_rewards([3.0, 100.0], valid=torch.tensor([True, False])))
    assert found.rewards[0] == 3.0
    assert found.carry.reward_count in (0.0, 1.0)
    assert found.carry.reward_reference_std == 0.0


def test_reference_moments_are_from_first_step_with_varied_rewards() -> None:
    step = NormalizeByReferenceStd(None, center=False)
    first = step(step(shaped_rewards([3.0, 3.0])).with_metrics(rewards=torch.tensor([1.0, 3.0]), metrics={}))
    assert first.carry == Carry(reward_reference_mean=2.0, reward_reference_std=2**0.5)
    assert first.rewards.tolist() == pytest.approx([1 / 2**0.5, 3 / 2**0.5])
    later = step(shaped_rewards([10.0, 30.0], carry=first.carry))
    assert later.carry == first.carry
    assert later.rewards.tolist() == pytest.approx([10 / 2**0.5, 30 / 2**0.5])
    centered = NormalizeByReferenceStd(None, center=True)(shaped_rewards([10.0, 30.0], carry=first.carry))
    assert centered.rewards.tolist() == pytest.approx([8 / 2**0.5, 28 / 2**0.5])


def test_configured_reference_std_divides_rewards() -> None:
    assert NormalizeByReferenceStd(4.0, center=False)(shaped_rewards([1.0, 3.0])).rewards.tolist() == [0.25, 0.75]
    assert NormalizeByReferenceStd(4.0, center=True)(shaped_rewards([1.0, 3.0])).rewards.tolist() == [-0.25, 0.25]
    # Until a mean is known, rewards are unchanged: the targets of the critic would jump otherwise.
    assert NormalizeByReferenceStd(4.0, center=True)(shaped_rewards([3.0, 3.0])).rewards.tolist() == [3.0, 3.0]
    # Without centering, rewards are divided from the first step on.
    assert NormalizeByReferenceStd(4.0, center=False)(shaped_rewards([3.0, 3.0])).rewards.tolist() == [0.75, 0.75]


def test_equal_rewards_set_no_reference_std() -> None:
    step = NormalizeByReferenceStd(None, center=False)
    equal = step(shaped_rewards([3.0, 3.0]))
    assert (equal.carry, equal.metrics["reward/moments_mean"]) == (Carry(), 0.0)
    later = step(shaped_rewards([1.0, 3.0], carry=equal.carry))
    assert later.rewards.tolist() == pytest.approx([1 / 2**0.5, 3 / 2**0.5])
