"""Estimators: what each table declares is what its estimator returns, and group advantages in the stage."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ppoctl.batch.records import Carry, Rewards, Rollouts, decode
from ppoctl.estimators.gae import GaeAdvantages
from ppoctl.estimators.grpo import GrpoAdvantages
from ppoctl.estimators.kinds import ESTIMATORS, metrics_of
from ppoctl.estimators.monte_carlo import MonteCarloAdvantages
from ppoctl.estimators.raw_reward import RawRewardAdvantages
from ppoctl.estimators.remax import RemaxAdvantages
from ppoctl.estimators.table import EstimatorTable
from ppoctl.ppo.estimator import EstimatorInputs
from ppoctl.stages.advantages import AdvantagesStage
from ppoctl.stages.critic_update import returns_of
from ppoctl.stages.logprobs import KlPenalty
from ppoctl.stages.shaping import ApplyScale
from stages import stub_models
from tolerance import EXACT, FLOAT32

TABLES: tuple[EstimatorTable, ...] = (
    GaeAdvantages(kind="gae"),
    GaeAdvantages(kind="gae", length_adaptive_alpha=0.5),
    MonteCarloAdvantages(kind="monte_carlo", gamma=0.5),
    GrpoAdvantages(kind="grpo"),
    GrpoAdvantages(kind="grpo", scale="none"),
    RawRewardAdvantages(kind="raw_reward", gamma=0.5),
    RemaxAdvantages(kind="remax"),
)
INPUTS = EstimatorInputs(
    token_rewards=torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 2.0]]),
    values=torch.tensor([[0.2, 0.4, 0.0], [0.1, 0.3, 0.7]]),
    mask=stub_models.MASK,
    scores=torch.tensor([1.0, 2.5]),
    valid=torch.tensor([True, True]),
    groups=torch.tensor([0, 0]),
    baselines=torch.tensor([0.5, 2.75]),
)


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_estimates_have_what_the_table_declares(table: EstimatorTable) -> None:
    estimate = table.estimator()(INPUTS)
    assert (estimate.returns is not None) == table.trains_critic
    assert set(estimate.metrics) == {added.metric.name for added in metrics_of(table) if added.is_on}
    if table.reads_values:
        with pytest.raises(AssertionError, match="requires the critic's values, which were not computed"):
            table.estimator()(replace(INPUTS, values=None))
    else:
        EXACT.check(table.estimator()(replace(INPUTS, values=None)).advantages, estimate.advantages)


def test_every_kind_is_checked() -> None:
    assert {type(table) for table in TABLES} == set(ESTIMATORS)


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_raw_reward_equals_monte_carlo_without_returns(gamma: float) -> None:
    alone = RawRewardAdvantages(kind="raw_reward", gamma=gamma).estimator()(replace(INPUTS, values=None))
    with_critic = MonteCarloAdvantages(kind="monte_carlo", gamma=gamma).estimator()(INPUTS)
    EXACT.check(alone.advantages, with_critic.advantages)
    assert alone.returns is None


def test_raw_reward_is_whitened_as_monte_carlo() -> None:
    tables = (RawRewardAdvantages(kind="raw_reward"), MonteCarloAdvantages(kind="monte_carlo"))
    assert [table.whiten for table in tables] == [True, True]
    assert not GrpoAdvantages(kind="grpo").whiten
    assert not RemaxAdvantages(kind="remax").whiten


# --- in the stage ---------------------------------------------------------------------------------------------------


def stage(table: Any, **changes: Any) -> AdvantagesStage:
    settings = {"reward_steps": (), "truncated": "terminal", "penalty": None, "fingerprint": "", **changes}
    return AdvantagesStage(estimator=table.estimator(), whitened=table.whiten, **settings)


def rollouts(**changes: Any) -> Rollouts:
    """Return two prompts x two samples: rows of 2, 3, 2 and 3 tokens."""
    two = stub_models.rollouts()
    tensors = {
        name: torch.cat([getattr(two, name)] * 2) for name in ("tokens", "lengths", "mask", "sampler_logprobs")
    }
    tensors |= {name: torch.cat([getattr(two, name)] * 2) for name in ("prompt_tokens", "prompt_lengths", "finish")}
    lists = {"texts": ["t"] * 4, "stamps": [""] * 4, "sends": [1] * 4, "sample_indices": [0, 1, 0, 1]}
    return replace(two, **tensors, **lists, seeds=torch.arange(4), prompt_ids=["b", "b", "a", "a"], **changes)


def rewards(*scores: float, outcomes: tuple[int, ...] = (0, 0, 0, 0), **changes: Any) -> Rewards:
    return Rewards(torch.tensor(scores), torch.tensor(outcomes), {}, [""] * 4, [""] * 4, **changes)


LOGPROBS = replace(
    stub_models.logprobs(),
    **{name: torch.cat([getattr(stub_models.logprobs(), name)] * 2) for name in ("actor", "entropy", "reference")},
)


def test_stage_compares_responses_to_the_same_prompt() -> None:
    # Prompt b: 1 - 2 = -1 and 3 - 2 = 1. Prompt a: one score, so 0.
    given = rewards(1.0, 3.0, 5.0, 0.0, outcomes=(0, 0, 0, 2))
    found = stage(GrpoAdvantages(kind="grpo", scale="none")).run(rollouts(), given, None, LOGPROBS, Carry(0.0))
    expected = torch.tensor([[-1.0, -1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    EXACT.check(found.advantages, expected)
    assert found.metrics()["advantage/equal_groups_frac"] == 0.5
    assert found.returns is None
    assert not found.mask[3].any()
    with pytest.raises(AssertionError, match="which the estimator did not compute"):
        returns_of(found)


def test_record_without_returns_is_read_back() -> None:
    given = rewards(1.0, 3.0, 5.0, 4.0)
    found = stage(GrpoAdvantages(kind="grpo")).run(rollouts(), given, None, LOGPROBS, Carry(0.0))
    assert b"returns" not in found.encoded
    again = decode(found.encoded)
    assert again.identity == found.identity
    assert again.returns is None  # type: ignore[attr-defined]


def test_groups_are_prompts_in_any_order_of_rows() -> None:
    mixed = replace(rollouts(), prompt_ids=["b", "a", "a", "b"])
    given = rewards(1.0, 3.0, 5.0, 4.0)
    found = stage(GrpoAdvantages(kind="grpo", scale="none")).run(mixed, given, None, LOGPROBS, Carry(0.0))
    assert found.advantages[:, 0].tolist() == [-1.5, -1.0, 1.0, 1.5]


def test_group_scores_are_shaped_and_without_penalty() -> None:
    # Scores 0 .. 4 become 0 .. 8: 2, 6 | 8, 4 with means 4 and 6. The penalty in the loss changes no advantage.
    given = rewards(1.0, 3.0, 4.0, 2.0)
    shaping = (ApplyScale((0.0, 4.0), (0.0, 8.0)),)
    penalty = KlPenalty(place="loss", estimator="k2", coef=0.1)
    table = GrpoAdvantages(kind="grpo", scale="none")
    found = stage(table, reward_steps=shaping, penalty=penalty).run(rollouts(), given, None, LOGPROBS, Carry(0.0))
    assert found.advantages[:, 0].tolist() == [-2.0, 2.0, 2.0, -2.0]


def test_token_scores_are_summed_over_the_response() -> None:
    # Sums 3, 1 | 0, 4 with means 2 and 2, at every token of the response.
    grid = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 0.0], [0.5, -0.5, 0.0], [1.0, 1.0, 2.0]])
    given = rewards(0.0, 0.0, 0.0, 0.0, token_scores=grid)
    found = stage(GrpoAdvantages(kind="grpo", scale="none")).run(rollouts(), given, None, LOGPROBS, Carry(0.0))
    EXACT.check(found.advantages, torch.tensor([[1.0], [-1.0], [-2.0], [2.0]]) * rollouts().mask)


def test_filtered_response_stays_in_mean_of_its_group() -> None:
    given = rewards(1.0, 3.0, 5.0, 4.0)
    cut = rollouts()
    cut = replace(cut, finish=torch.tensor([1, 0, 0, 0]))
    found = stage(GrpoAdvantages(kind="grpo", scale="none"), truncated="filter").run(
        cut, given, None, LOGPROBS, Carry(0.0)
    )
    assert found.advantages[:, 0].tolist() == [0.0, 1.0, 0.5, -0.5]


def test_raw_reward_includes_penalty_in_reward() -> None:
    given, table = rewards(1.0, 3.0, 5.0, 4.0), RawRewardAdvantages(kind="raw_reward", whiten=False)
    penalty = KlPenalty(place="reward", estimator="k1", coef=0.1)
    found = stage(table, penalty=penalty).run(rollouts(), given, None, LOGPROBS, Carry(0.0))
    # Row 0: d = actor - reference = 0.5, -0.5: rewards -0.05, 1 + 0.05.
    FLOAT32.check(found.advantages[0], torch.tensor([1.0, 1.05, 0.0]))


def test_bootstrap_without_critic_raises() -> None:
    given = rewards(1.0, 3.0, 5.0, 4.0)
    with pytest.raises(AssertionError, match="bootstrap values come from a critic"):
        stage(RawRewardAdvantages(kind="raw_reward"), truncated="bootstrap").run(
            rollouts(), given, None, LOGPROBS, Carry(0.0)
        )
