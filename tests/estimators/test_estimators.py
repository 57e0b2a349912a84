"""Estimators: what each table declares is what its estimator returns, and group advantages in the stage."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo.grids import estimator_inputs, holey_mask, normal
from ppoctl.algorithms.estimators.gae import GaeAdvantages
from ppoctl.algorithms.estimators.gdpo import GdpoAdvantages
from ppoctl.algorithms.estimators.grpo import GrpoAdvantages
from ppoctl.algorithms.estimators.grpo_passk import GrpoPasskAdvantages
from ppoctl.algorithms.estimators.kinds import ESTIMATORS, metrics_of
from ppoctl.algorithms.estimators.monte_carlo import MonteCarloAdvantages
from ppoctl.algorithms.estimators.opo import OpoAdvantages
from ppoctl.algorithms.estimators.python import PythonAdvantages
from ppoctl.algorithms.estimators.raw_reward import RawRewardAdvantages
from ppoctl.algorithms.estimators.reinforce_plus_plus import ReinforcePlusPlusAdvantages
from ppoctl.algorithms.estimators.reinforce_plus_plus_baseline import ReinforcePlusPlusBaselineAdvantages
from ppoctl.algorithms.estimators.remax import RemaxAdvantages
from ppoctl.algorithms.estimators.rloo import RlooAdvantages
from ppoctl.algorithms.estimators.table import EstimatorTable
from ppoctl.algorithms.formulas.estimator import EstimatorInputs
from ppoctl.algorithms.formulas.masking import whiten
from ppoctl.algorithms.stages.advantages import AdvantagesStage
from ppoctl.algorithms.stages.critic_update import returns_of
from ppoctl.algorithms.stages.logprobs import KlPenalty
from ppoctl.algorithms.stages.shaping import ApplyScale
from ppoctl.cli.manual.algorithm_pages import algorithms
from ppoctl.core.batch.records import Carry, Rewards, Rollouts, decode
from ppoctl.core.metric_registry import find
from ppoctl.recipe.docstring_fields import parse_docstring
from stages import stub_models
from tolerance import EXACT, FLOAT32

USERS = Path(__file__).parents[1] / "stages" / "users_training.py"
TABLES: tuple[EstimatorTable, ...] = (
    GaeAdvantages(kind="gae"),
    GaeAdvantages(kind="gae", length_adaptive_alpha=0.5),
    MonteCarloAdvantages(kind="monte_carlo", gamma=0.5),
    GrpoAdvantages(kind="grpo"),
    GrpoAdvantages(kind="grpo", scale="none"),
    RawRewardAdvantages(kind="raw_reward", gamma=0.5),
    GrpoAdvantages(kind="grpo", scale="batch", leave_one_out=True),
    RlooAdvantages(kind="rloo"),
    OpoAdvantages(kind="opo"),
    GrpoPasskAdvantages(kind="grpo_passk"),
    GdpoAdvantages(kind="gdpo"),
    ReinforcePlusPlusBaselineAdvantages(kind="reinforce_plus_plus_baseline"),
    ReinforcePlusPlusAdvantages(kind="reinforce_plus_plus", gamma=0.5),
    PythonAdvantages(kind="python", function=f"{USERS}:median"),
    PythonAdvantages(kind="python", function=f"{USERS}:rewards_to_go", trains_critic=True),
    RemaxAdvantages(kind="remax"),
)
INPUTS = EstimatorInputs(
    token_rewards=torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 2.0]]),
    values=torch.tensor([[0.2, 0.4, 0.0], [0.1, 0.3, 0.7]]),
    mask=stub_models.MASK,
    scores=torch.tensor([1.0, 2.5]),
    valid=torch.tensor([True, True]),
    groups=torch.tensor([0, 0]),
    weights={"a": 1.0, "b": -0.5},
    prompt_ids=["a", "a"],
    lengths=torch.tensor([2, 3]),
    truths=["7", None],
    extras={"right": [1.0, 0.0], "a": [0.0, 3.0], "b": [1.0, 0.5]},
    baselines=torch.tensor([0.5, 2.75]),
)


@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_estimates_have_what_the_table_declares(table: EstimatorTable) -> None:
    estimate = table.estimator()(INPUTS)
    assert (estimate.returns is not None) == table.trains_critic
    # The registry has one entry for all metrics of a user's function.
    assert {find(name) for name in estimate.metrics} == {added.metric for added in metrics_of(table) if added.is_on}
    if isinstance(table, GaeAdvantages):
        with pytest.raises(AssertionError, match="requires the critic's values, which were not computed"):
            table.estimator()(replace(INPUTS, values=None))
    elif not table.reads_values:
        EXACT.check(table.estimator()(replace(INPUTS, values=None)).advantages, estimate.advantages)


def test_every_kind_is_checked() -> None:
    assert {type(table) for table in TABLES} == set(ESTIMATORS)


def batch(seed: int) -> EstimatorInputs:
    """Return 6 prompts x 5 samples with holes; one response in ten has no score, another is filtered."""
    valid = torch.rand(30, generator=torch.Generator().manual_seed(seed)) < 0.9
    mask = holey_mask(30, 7, seed=seed) & valid[:, None] & (torch.arange(30) != int(valid.nonzero()[3]))[:, None]
    columns = [torch.where(valid, normal(30, seed=seed + k).round(decimals=1), 0) for k in range(3)]
    grids = [normal(30, 7, seed=seed + k) * mask for k in (3, 4)]
    components, weights = {"a": columns[1], "b": columns[2]}, {"a": 1.0, "b": -0.5}
    groups = torch.arange(6).repeat_interleave(5)
    inputs = estimator_inputs(columns[0], valid, groups, mask, components=components, weights=weights)
    return replace(inputs, token_rewards=grids[0], values=grids[1], baselines=columns[1])


def whitened(table: EstimatorTable, inputs: EstimatorInputs) -> torch.Tensor:
    """Return the advantages as the stage computes them."""
    advantages = table.estimator()(inputs).advantages
    return whiten(advantages, inputs.mask) if table.whiten else advantages  # type: ignore[attr-defined]


@pytest.mark.parametrize("table", TABLES, ids=repr)
@pytest.mark.parametrize("seed", range(3))
def test_padding_and_order_of_rows_do_not_change_advantages(table: EstimatorTable, seed: int) -> None:
    inputs = batch(seed)
    expected = whitened(table, inputs)
    assert expected.any()
    assert not expected[~inputs.mask].any()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))

    def moved(grid: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(grid[order], (0, 4)) if grid.ndim == 2 else grid[order]

    changes: dict[str, Any] = {
        name: moved(getattr(inputs, name))
        for name in ("token_rewards", "values", "mask", "scores", "valid", "groups", "lengths", "baselines")
    }
    changes["prompt_ids"] = [inputs.prompt_ids[row] for row in order.tolist()]
    changes["extras"] = {name: [column[row] for row in order.tolist()] for name, column in inputs.extras.items()}
    FLOAT32.check(whitened(table, replace(inputs, **changes)), moved(expected))


def test_raw_reward_is_whitened_as_monte_carlo() -> None:
    tables = (RawRewardAdvantages(kind="raw_reward"), MonteCarloAdvantages(kind="monte_carlo"))
    assert [table.whiten for table in tables] == [True, True]
    plus_plus = ReinforcePlusPlusAdvantages(kind="reinforce_plus_plus", gamma=0.5)
    assert plus_plus.whiten
    assert plus_plus.estimator() == RawRewardAdvantages(kind="raw_reward", gamma=0.5).estimator()
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


def test_groups_of_one_prompt_that_began_in_different_steps_stay_apart() -> None:
    """An epoch ended between steps 3 and 4, in which two groups of a prompt began; both end in step 5."""
    lengths = rollouts().lengths.tolist()
    stamps = [["actor@2:x", "actor@4:z"], ["actor@2:x"], ["actor@3:y", "actor@4:z"], ["actor@3:y"]]
    tokens = [[1, length - 1] if len(of) == 2 else [length] for length, of in zip(lengths, stamps, strict=True)]
    both = replace(rollouts(), prompt_ids=["a"] * 4, segment_stamps=stamps, segment_tokens=tokens)
    given = rewards(1.0, 3.0, 5.0, 4.0)
    found = stage(GrpoAdvantages(kind="grpo", scale="none")).run(both, given, None, LOGPROBS, Carry(0.0))
    assert found.advantages[:, 0].tolist() == [-1.0, 1.0, 0.5, -0.5]


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


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (GrpoAdvantages(kind="grpo", scale="none"), [0.0, 1.0, 0.5, -0.5]),
        (RlooAdvantages(kind="rloo"), [0.0, 2.0, 1.0, -1.0]),
        (GrpoPasskAdvantages(kind="grpo_passk", scale="none"), [0.0, 2.0, 1.0, 0.0]),
        # Lengths 0, 3: the mean is 3. Lengths 2, 3: (10 + 12) / 5 = 4.4.
        (OpoAdvantages(kind="opo"), [0.0, 0.0, 0.6, -0.4]),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_filtered_response_stays_in_its_group(table: EstimatorTable, expected: list[float]) -> None:
    given = rewards(1.0, 3.0, 5.0, 4.0)
    cut = rollouts()
    cut = replace(cut, finish=torch.tensor([1, 0, 0, 0]))
    found = stage(table, truncated="filter").run(cut, given, None, LOGPROBS, Carry(0.0))
    FLOAT32.check(found.advantages[:, 0], torch.tensor(expected))
    assert not found.mask[0].any()


def test_baseline_is_whitened_over_unmasked_tokens() -> None:
    # Deviations -1, 1 | 0.5 and no score: tokens -1, -1, 1, 1, 1 and, alone in its group, 0, 0. Mean 1/7, squares 5;
    # variance (5 - 1/7) / 6 = 17/21.
    given = rewards(1.0, 3.0, 5.0, 0.0, outcomes=(0, 0, 0, 2))
    table = ReinforcePlusPlusBaselineAdvantages(kind="reinforce_plus_plus_baseline")
    found = stage(table).run(rollouts(), given, None, LOGPROBS, Carry(0.0))
    std = (17 / 21 + 1e-8) ** 0.5
    rows = torch.tensor([-8 / 7, 6 / 7, -1 / 7, 0.0]) / std
    FLOAT32.check(found.advantages, rows[:, None] * found.mask)
    assert found.metrics()["advantage/equal_groups_frac"] == 0.5


def test_equal_scores_stay_zero_after_whitening() -> None:
    given, table = (
        rewards(0.35, 0.35, 0.4, 0.4),
        ReinforcePlusPlusBaselineAdvantages(kind="reinforce_plus_plus_baseline"),
    )
    found = stage(table).run(rollouts(), given, None, LOGPROBS, Carry(0.0))
    EXACT.check(found.advantages, torch.zeros(4, 3))
    # With equal scores in the whole step, all returns of REINFORCE++ are equal.
    given, plus_plus = rewards(0.4, 0.4, 0.4, 0.4), ReinforcePlusPlusAdvantages(kind="reinforce_plus_plus")
    EXACT.check(stage(plus_plus).run(rollouts(), given, None, LOGPROBS, Carry(0.0)).advantages, torch.zeros(4, 3))


def test_components_come_from_the_extras_without_shaping() -> None:
    # a: 1, 3 | 2: deviations -1, 1, std sqrt(2). b: 4, 0 | 7: deviations 2, -2, std sqrt(8). Standardized, both are
    # 1 / sqrt(2), so D is proportional to -(1 - w), 1 - w, 0 with the weight w of b.
    extras: dict[str, list[float | None]] = {
        "a": [1.0, 3.0, 2.0, 0.0],
        "b": [4.0, 0.0, 7.0, 0.0],
        "other": [None] * 4,
    }
    given = replace(rewards(9.0, 9.0, 9.0, 0.0, outcomes=(0, 0, 0, 2)), extras=extras)
    table = GdpoAdvantages(kind="gdpo")
    # Tokens -1, -1, 1, 1, 1, 0, 0: mean 1/7, variance 17/21, as above; with a weight of 3 all signs are reversed.
    size = (17 / 21) ** 0.5
    for weight, sign in ((0.5, 1.0), (3.0, -1.0)):
        found = stage(table, component_weights={"a": 1.0, "b": weight}).run(
            rollouts(), given, None, LOGPROBS, Carry(0.0)
        )
        rows = sign * torch.tensor([-8 / 7, 6 / 7, -1 / 7, 0.0]) / size
        FLOAT32.check(found.advantages, rows[:, None] * found.mask)


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


def test_every_estimator_is_in_the_table_of_the_algorithms_page() -> None:
    missing = [kind.__name__ for kind in ESTIMATORS if not parse_docstring(kind.__doc__ or "").equal_scores]
    assert not missing, f"the docstrings of {missing} have no field `Equal scores`"
    rows = algorithms().partition("\n## Advantages\n")[2].partition("\n### ")[0]
    assert rows.count("\n| `") == len(ESTIMATORS)
    assert "| rloo, rloo_vectorized | grpo (normalize_rewards = false) | rloo | RLOOTrainer | 0 |" in rows
