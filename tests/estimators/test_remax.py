"""ReMax: each response is compared with the greedy response to its prompt, by hand and with numbers of verl."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ppoctl.algorithms.estimators.remax import RemaxAdvantages
from ppoctl.algorithms.stages.advantages import AdvantagesStage
from ppoctl.algorithms.stages.greedy import RemaxAdvantagesStage
from ppoctl.algorithms.stages.shaping import (
    NormalizeByReferenceStd,
    NormalizeByRunningStd,
    PenalizeLength,
    ScaleTruncated,
)
from ppoctl.core.batch.records import Advantages, Carry, GreedyRewards, GreedyRollouts, Logprobs, Rewards, Rollouts
from ppoctl.core.errors import RewardError
from tolerance import EXACT, FLOAT32

SAMPLED = {"prompts": ["a", "a", "b", "b", "c"], "lengths": [3, 2, 1, 3, 2]}
GREEDY = {"prompts": ["b", "c", "a"], "lengths": [4, 1, 2]}
LOGPROBS = Logprobs("actor@1:x", {})


def responses(cls: type[Rollouts], prompts: list[str], lengths: list[int]) -> Any:
    sizes = torch.tensor(lengths)
    mask = torch.arange(max(lengths))[None, :] < sizes[:, None]
    count = len(prompts)
    return cls(
        prompt_tokens=torch.arange(count, dtype=torch.int32) + 5,
        prompt_lengths=torch.ones(count, dtype=torch.int64),
        tokens=(mask * 3).to(torch.int32),
        lengths=sizes,
        mask=mask,
        sampler_logprobs=-0.5 * mask,
        finish=torch.zeros(count, dtype=torch.int64),
        seeds=torch.arange(count),
        prompt_ids=prompts,
        sample_indices=[0] * count,
        texts=["t"] * count,
        stamps=["actor@1:x"] * count,
        sends=[1] * count,
    )


def sampled(**changes: Any) -> Rollouts:
    """Return two responses to the prompts `a` and `b`, one to `c`. The second token of the first is masked out."""
    plain: Rollouts = responses(Rollouts, **SAMPLED)
    mask = plain.mask.clone()
    mask[0, 1] = False
    return replace(plain, mask=mask, sampler_logprobs=-0.5 * mask, **changes)


def scores(cls: type[Rewards], *given: float | None, **changes: Any) -> Any:
    return cls(
        scores=torch.tensor([score or 0.0 for score in given]),
        outcomes=torch.tensor([2 if score is None else 0 for score in given]),
        extras={},
        outcome_messages=["" if score is not None else "boom" for score in given],
        truths=[None] * len(given),
        **changes,
    )


def advantages(
    *,
    carry: Carry | None = None,
    rollouts: Rollouts | None = None,
    of: Any = None,
    greedy: Any = None,
    **changes: Any,
) -> Advantages:
    """Return the record of the stage. By default `a` scores 1 and nothing, `b` 4 and 2, `c` 5; the greedy responses
    score 3 (`b`), nothing (`c`) and 0.25 (`a`)."""
    table = RemaxAdvantages(kind="remax")
    settings = {"reward_steps": (), "truncated": "terminal", "penalty": None, "fingerprint": "f", **changes}
    stage = RemaxAdvantagesStage(AdvantagesStage(estimator=table.estimator(), whitened=table.whiten, **settings))
    return stage.run(
        rollouts or sampled(),
        of or scores(Rewards, 1.0, None, 4.0, 2.0, 5.0),
        LOGPROBS,
        carry or Carry(),
        responses(GreedyRollouts, **GREEDY),
        greedy or scores(GreedyRewards, 3.0, None, 0.25),
    )


def test_advantage_is_score_minus_score_of_greedy_response_to_the_same_prompt() -> None:
    found = advantages()
    # a: 1 - 0.25; b: 4 - 3 and 2 - 3. The second response to a has no score, the greedy response to c neither.
    rows = torch.tensor([[0.75, 0.0, 0.75], [0.0] * 3, [1.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [0.0] * 3])
    EXACT.check(found.advantages, rows)
    EXACT.check(found.mask, rows != 0)
    assert found.shaped is not None
    assert found.shaped.tolist() == [1.0, 0.0, 4.0, 2.0, 0.0]
    assert (found.returns, found.carry.trained_seqs, found.carry.trained_tokens) == (None, 3.0, 6.0)
    metrics = found.metrics()
    assert metrics["advantage/raw_mean"] == pytest.approx((2 * 0.75 + 1.0 - 3.0) / 6)  # six unmasked tokens
    assert metrics["advantage/raw_abs_max"] == 1.0


def test_result_does_not_depend_on_the_order_of_greedy_responses_and_other_prompts() -> None:
    order = torch.tensor([3, 4, 0, 2, 1])
    mixed = sampled()
    mixed = replace(
        mixed,
        **{name: getattr(mixed, name)[order] for name in ("tokens", "lengths", "mask", "sampler_logprobs")},
        prompt_ids=[mixed.prompt_ids[row] for row in order.tolist()],
    )
    found = advantages(rollouts=mixed, of=scores(Rewards, 2.0, 5.0, 1.0, 4.0, None))
    EXACT.check(found.advantages, advantages().advantages[order])


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", [NormalizeByRunningStd, lambda center: NormalizeByReferenceStd(None, center)])
def test_greedy_rewards_are_divided_by_the_moments_of_the_sampled_rewards(kind: Any, center: bool) -> None:
    # Scores 1, 4, 2, 5: mean 3, squared deviations 4 + 1 + 1 + 4. A subtracted mean cancels in the difference.
    found = advantages(reward_steps=(kind(center=center),))
    EXACT.check(found.mask, advantages().mask)
    FLOAT32.check(found.advantages, advantages().advantages / (10 / 3) ** 0.5)
    carry = found.carry
    if kind is NormalizeByRunningStd:
        assert (carry.reward_count, carry.reward_mean, carry.reward_m2) == (4.0, 3.0, pytest.approx(10.0))
    else:
        assert (carry.reward_reference_mean, carry.reward_reference_std) == (3.0, pytest.approx((10 / 3) ** 0.5))


def test_equal_rewards_do_not_take_reference_moments_from_greedy_rewards() -> None:
    found = advantages(
        reward_steps=(NormalizeByReferenceStd(None, center=True),), of=scores(Rewards, 2.0, None, 2.0, 2.0, 2.0)
    )
    assert (found.carry.reward_reference_mean, found.carry.reward_reference_std) == (0.0, 0.0)
    assert found.advantages[:, 0].tolist() == [1.75, 0.0, -1.0, -1.0, 0.0]


def test_moments_of_earlier_steps_apply_to_both_rewards() -> None:
    # Before: 4 rewards, mean 3, m2 20; with 1, 4, 2, 5 (mean 3, m2 10): 8 rewards, std sqrt(30 / 7).
    before = Carry(reward_count=4.0, reward_mean=3.0, reward_m2=20.0)
    found = advantages(carry=before, reward_steps=(NormalizeByRunningStd(center=False),))
    FLOAT32.check(found.advantages, advantages().advantages / (30 / 7) ** 0.5)


def test_greedy_response_is_shaped_by_its_own_length() -> None:
    # Beyond one generated token 0.5 each. a: 1 - 0.5 against 0.25 - 0.5; b: 4 - 0 and 2 - 1 against 3 - 1.5.
    found = advantages(reward_steps=(PenalizeLength(per_token=0.5, free_tokens=1),))
    assert found.advantages[:, 0].tolist() == [0.75, 0.0, 2.5, -0.5, 0.0]


def test_truncated_responses_are_shaped_and_filtered_as_without_baseline() -> None:
    cut = sampled(finish=torch.tensor([0, 0, 1, 0, 0]))
    found = advantages(rollouts=cut, reward_steps=(ScaleTruncated(0.5),))
    assert found.advantages[:, 0].tolist() == [0.75, 0.0, 4.0 * 0.5 - 3.0, -1.0, 0.0]
    found = advantages(rollouts=cut, truncated="filter")
    assert found.advantages[:, 0].tolist() == [0.75, 0.0, 0.0, -1.0, 0.0]


def test_token_scores_are_summed_on_both_sides() -> None:
    # Sums 3, -, 1, 2, 9 of sampled tokens (the masked-out 7 is not counted); 4.5 (b), -, 1 (a) of greedy tokens.
    grid = torch.tensor([[1.0, 7.0, 2.0], [0.0] * 3, [1.0, 0.0, 0.0], [0.5, 0.5, 1.0], [9.0, 0.0, 0.0]])
    of_greedy = torch.tensor([[1.0, 1.5, 1.0, 1.0], [0.0] * 4, [0.25, 0.75, 0.0, 0.0]])
    found = advantages(
        of=scores(Rewards, 0.0, None, 0.0, 0.0, 0.0, token_scores=grid),
        greedy=scores(GreedyRewards, 0.0, None, 0.0, token_scores=of_greedy),
    )
    expected = torch.tensor([[2.0], [0.0], [-3.5], [-2.5], [0.0]]) * found.mask
    EXACT.check(found.advantages, expected)


def test_advantages_equal_those_of_verl() -> None:
    # `compute_remax_outcome_advantage` of verl (August 2026): rewards 1.5, -0.25, 0.75, baselines 0.625 and -1.25.
    of_verl = [[0.875, 0.875, 0.875, 0.0], [-0.875, -0.875, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]
    stage = RemaxAdvantagesStage(
        AdvantagesStage((), RemaxAdvantages(kind="remax").estimator(), False, "terminal", None, "f")
    )
    found = stage.run(
        responses(Rollouts, ["x", "x", "y"], [3, 2, 1]),
        scores(Rewards, 1.5, -0.25, 0.75),
        LOGPROBS,
        Carry(),
        responses(GreedyRollouts, ["y", "x"], [2, 4]),
        scores(GreedyRewards, -1.25, 0.625),
    )
    EXACT.check(found.advantages, torch.tensor(of_verl)[:, :3])


def test_step_without_a_response_that_has_score_and_baseline_is_refused() -> None:
    with pytest.raises(
        RewardError, match="no prompt of step 2 has both a response and a greedy response with a score"
    ):
        advantages(of=scores(Rewards, None, None, None, None, 5.0))


def test_metrics_of_greedy_responses_are_not_those_of_the_rollout() -> None:
    rollouts = replace(responses(GreedyRollouts, **GREEDY), finish=torch.tensor([1, 0, 0]))
    assert rollouts.metrics() == {
        "baseline/response_tokens_mean": pytest.approx(7 / 3),
        "baseline/truncated_frac": pytest.approx(1 / 3),
        "baseline/tokens": 7.0,
    }
    rewards = scores(GreedyRewards, 3.0, None, 0.25, timing={"reward/seconds_mean": 1.0})
    assert rewards.metrics() == {"baseline/score_mean": 1.625, "baseline/error_frac": pytest.approx(1 / 3)}
    assert (rewards.timing_metrics(), replace(rollouts, drawing=(7, 2.0)).timing_metrics()) == ({}, {})
