"""One value of each formula, worked by hand from the equation of its paper; gradients by finite differences.

No second implementation is used: the comments derive the numbers from the named equation. The examples are
asymmetric, masks have holes, and no setting has its default. KL penalties: test_kl_clamps.py.
"""

import math

import pytest
import torch
from grids import policy_inputs

from ppoctl.ppo.advantages import gae
from ppoctl.ppo.correction import (
    inside_weights,
    kept_by_ratio,
    log_ratios,
    plain_weights,
    truncated_sequence_weights,
    truncated_weights,
)
from ppoctl.ppo.kl_coefficient import KlTarget
from ppoctl.ppo.masking import whiten
from ppoctl.ppo.policy_loss import Cispo, Gspo, PolicyClip
from ppoctl.ppo.rewards import bootstrapped, merged, moments_of, overlong_penalty
from tolerance import FLOAT32

HOLE = -77.0  # must never be read


def test_gae_skips_tool_tokens_by_paper() -> None:
    """Schulman et al. 2016 (arXiv:1506.02438), eq. 16: A_t = sum_l (gamma lambda)^l delta_t+l, with delta_t = r_t +
    gamma V_t+1 - V_t. Tokens 1 and 2 are tool output: t counts tokens 0, 3 and 4 only."""
    # gamma 0.8, lambda 0.5, so gamma lambda = 0.4. Values 2, 1, 5; rewards 0.5, 0, 3.
    # delta: 0.5 + 0.8 x 1 - 2 = -0.7;   0 + 0.8 x 5 - 1 = 3;   3 - 5 = -2.
    # A: -0.7 + 0.4 x 3 + 0.16 x -2 = 0.18;   3 + 0.4 x -2 = 2.2;   -2.
    rewards = torch.tensor([[0.5, HOLE, HOLE, 0.0, 3.0]])
    values = torch.tensor([[2.0, HOLE, HOLE, 1.0, 5.0]])
    mask = torch.tensor([[True, False, False, True, True]])
    advantages, returns = gae(rewards, values, mask, gamma=0.8, lam=0.5)
    FLOAT32.check(advantages, torch.tensor([[0.18, 0.0, 0.0, 2.2, -2.0]]))
    FLOAT32.check(returns, torch.tensor([[2.18, 0.0, 0.0, 3.2, 3.0]]))


def test_truncated_return_includes_bootstrap_value_by_paper() -> None:
    """Pardo et al. 2018 (arXiv:1712.00378), eq. 6: the last return of a truncated episode is r_T + gamma V(s_T+1)."""
    # gamma 0.5, lambda 1, V_T+1 = 6: returns 4 + 0.5 x 6 = 7, 1 + 0.5 x 7 = 4.5. The second row has ended: 4 and 3.
    rewards = torch.tensor([[1.0, 4.0, HOLE], [1.0, HOLE, 4.0]])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    rewards_with = bootstrapped(torch.where(mask, rewards, 0), torch.tensor([6.0, 0.0]), mask, gamma=0.5)
    _, returns = gae(rewards_with, torch.ones(2, 3), mask, gamma=0.5, lam=1.0)
    FLOAT32.check(returns, torch.tensor([[4.5, 7.0, 0.0], [3.0, 0.0, 4.0]]))


def test_whitening_divides_by_sample_standard_deviation() -> None:
    """(x - mean) / sqrt(var + 1e-8) with the unbiased variance, as verl and NeMo-RL compute it."""
    # 1, 2 and 6: mean 3, squares 4 + 1 + 9 = 14 over n - 1 = 2: variance 7 (14 / 3 would be the population's).
    x = torch.tensor([[1.0, HOLE, 2.0], [HOLE, 6.0, HOLE]])
    mask = torch.tensor([[True, False, True], [False, True, False]])
    root = math.sqrt(7)
    expected = torch.tensor([[-2 / root, 0.0, -1 / root], [0.0, 3 / root, 0.0]])
    FLOAT32.check(whiten(x, mask), expected)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (-2.0, 5.0, 6.0),  # min(5 x -2, 1.3 x -2) = -10; max(-10, 3 x -2) = -6
        (-2.0, 2.0, 4.0),  # min(-4, -2.6) = -4; max(-4, -6) = -4
        (-2.0, 0.5, 1.6),  # min(-1, 0.8 x -2) = -1.6
        (2.0, 5.0, -2.6),  # min(10, 1.3 x 2) = 2.6; the dual clip is for negative advantages
    ],
)
def test_dual_clip_by_paper(advantage: float, ratio: float, expected: float) -> None:
    """Ye et al. 2020 (arXiv:1912.09729), dual-clipped PPO: max(min(r A, clip(r) A), c A) if A < 0, here with clips
    0.2 and 0.3 and c = 3; the loss is its negative."""
    one = torch.ones(1, 1)
    kind = PolicyClip(low=0.2, high=0.3, dual=3.0)
    loss = kind.losses(policy_inputs(one * math.log(ratio), 0 * one, one * advantage, one.bool()))
    FLOAT32.check(loss, torch.tensor([[expected]]))


# A response of three unmasked tokens with a hole: log-ratios 0.3, -0.06, 0.12; their mean is 0.12.
LOG_RATIOS = [0.3, HOLE, -0.06, 0.12]
GAINS = [1.5, HOLE, -2.0, 0.75]
COUNTED = [0, 2, 3]
# exp(0.12) is above 1 + 0.1: the tokens with A > 0 are clipped at 1.1, the token with A < 0 is not.
LOW, HIGH = 0.05, 0.1


def gspo(log_ratios: list[float], at: list[float], *, by_token: bool) -> float:
    """Return the negative of GSPO's objective for one response (arXiv:2507.18071, eq. 5-7), or of GSPO-token's (eq.
    13-14), summed over tokens. Everything inside a stop-gradient is computed at `at`."""
    total = 0.0
    for t in COUNTED:
        mean = sum((at if by_token else log_ratios)[j] for j in COUNTED) / len(COUNTED)
        s = math.exp(mean + (log_ratios[t] - at[t] if by_token else 0.0))
        clipped = min(max(s, 1 - LOW), 1 + HIGH)
        total -= min(s * GAINS[t], clipped * GAINS[t])
    return total


@pytest.mark.parametrize("gradient", ["token", "sequence"])
def test_gspo_by_paper(gradient: str) -> None:
    s, by_token = math.exp(0.12), gradient == "token"
    logprobs = torch.tensor([LOG_RATIOS], dtype=torch.float64, requires_grad=True)
    gains, mask = torch.tensor([GAINS], dtype=torch.float64), torch.tensor([[True, False, True, True]])
    losses = Gspo(low=LOW, high=HIGH, gradient=gradient).losses(
        policy_inputs(logprobs, torch.zeros_like(logprobs), gains, mask)
    )
    losses.sum().backward()
    # -1.1 x 1.5, +2 s, -1.1 x 0.75.
    FLOAT32.check(losses, torch.tensor([[-1.65, 0.0, 2 * s, -0.825]]))
    # Token form: 2 s for the third alone. Sequence form: d s / d log-ratio = s / 3, so 2 s / 3 for each of them.
    by_hand = [0.0, 0.0, 2 * s, 0.0] if by_token else [2 * s / 3, 0.0, 2 * s / 3, 2 * s / 3]
    FLOAT32.check(logprobs.grad, torch.tensor([by_hand]))
    for t in COUNTED:
        up, down = ([x + sign * 1e-6 * (j == t) for j, x in enumerate(LOG_RATIOS)] for sign in (1, -1))
        slope = (gspo(up, LOG_RATIOS, by_token=by_token) - gspo(down, LOG_RATIOS, by_token=by_token)) / 2e-6
        assert logprobs.grad[0, t].item() == pytest.approx(slope, abs=1e-8)


def test_cispo_by_paper() -> None:
    """MiniMax-M1 (arXiv:2506.13585), eq. 4-5: -sg(clip(r, 1 - low, 1 + high)) A log pi."""
    # Ratios 2, 0.5 and 1.1, clipped to 1.25, 0.7 and 1.1; log-probs -1, -3, -0.5.
    logprobs = torch.tensor([[-1.0, HOLE, -3.0, -0.5]], requires_grad=True)
    old = torch.tensor([[-1 - math.log(2), HOLE, -3 + math.log(2), -0.5 - math.log(1.1)]])
    mask = torch.tensor([[True, False, True, True]])
    losses = Cispo(low=0.3, high=0.25).losses(policy_inputs(logprobs, old, torch.tensor([GAINS]), mask))
    losses.sum().backward()
    # -1.25 x 1.5 x -1 = 1.875;  -0.7 x -2 x -3 = -4.2;  -1.1 x 0.75 x -0.5 = 0.4125.
    FLOAT32.check(losses, torch.tensor([[1.875, 0.0, -4.2, 0.4125]]))
    # The weight is a constant, so a clipped token keeps its gradient: -1.875, 1.4, -0.825.
    FLOAT32.check(logprobs.grad, torch.tensor([[-1.875, 0.0, 1.4, -0.825]]))


# Probabilities of trainer and sampler for two responses of three positions, the second with a hole.
TRAINER = torch.tensor([[0.6, 0.1, 0.3], [0.2, 1.0, 0.05]])
SAMPLER = torch.tensor([[0.2, 0.4, 0.3], [0.25, 1.0, 0.1]])
MASK = torch.tensor([[True, True, True], [True, False, True]])
LOGS = log_ratios(TRAINER.log(), SAMPLER.log(), MASK)  # ratios 3, 1/4, 1; 4/5, -, 1/2


def test_truncated_importance_sampling_by_paper() -> None:
    """Yao et al. 2025: min(pi_trainer / pi_sampler, C) by token, C = 2, here with an additional lower bound of 0.4;
    verl's sequence form: the product, bounded."""
    found = truncated_weights(LOGS, MASK, min_ratio=0.4, max_ratio=2.0)
    FLOAT32.check(found.weights, torch.tensor([[2.0, 0.4, 1.0], [0.8, 0.0, 0.5]]))
    # Products 3 x 1/4 x 1 = 0.75 and 4/5 x 1/2 = 0.4, clipped to 0.45 and 0.7.
    found = truncated_sequence_weights(LOGS, MASK, min_ratio=0.45, max_ratio=0.7)
    FLOAT32.check(found.weights, torch.tensor([[0.7, 0.7, 0.7], [0.45, 0.0, 0.45]]))


def test_icepop_keeps_ratios_at_bounds_by_paper() -> None:
    """Zhao et al. 2025: the ratio k if alpha <= k <= beta, otherwise 0."""
    found = inside_weights(LOGS, MASK, min_ratio=0.45, max_ratio=2.0)
    FLOAT32.check(found.weights, torch.tensor([[0.0, 0.0, 1.0], [0.8, 0.0, 0.5]]))
    assert found.outside.tolist() == [[True, True, False], [False, False, False]]
    # A ratio of exactly 1 is within bounds that are 1.
    upper, lower = (
        inside_weights(LOGS, MASK, min_ratio=low, max_ratio=high) for low, high in ((0.1, 1.0), (1.0, 9.0))
    )
    assert upper.outside.tolist() == [[True, False, False], [False, False, False]]
    assert lower.outside.tolist() == [[False, True, False], [True, False, True]]


def test_sequence_masking_uses_geometric_mean() -> None:
    """NeMo-RL's seq-mask-tis: a sequence is kept if its geometric mean is within the bounds, and then weighted by the
    ratio."""
    # (3 x 1/4 x 1)^(1/3) = 0.909 and (4/5 x 1/2)^(1/2) = 0.632: only the first is between 0.9 and 1.1.
    kept = kept_by_ratio(LOGS, MASK, level="sequence_mean", min_ratio=0.9, max_ratio=1.1)
    assert kept.tolist() == [[True, True, True], [False, False, False]]
    FLOAT32.check(
        plain_weights(LOGS, MASK).weights.where(kept, 0.0), torch.tensor([[3.0, 0.25, 1.0], [0.0, 0.0, 0.0]])
    )


@pytest.mark.parametrize(
    ("per", "expected"),
    [
        # Per token: means (0.2 + 0.4) / 2 = 0.3 and 0.5, together 0.4. e = 0.4 / 0.5 - 1 = -0.2, at its bound.
        ("token", 0.1 * (1 - 0.2 * 0.1)),
        # Per sequence: sums 0.6 and 0.5, together 0.55. e = 0.55 / 0.5 - 1 = 0.1.
        ("sequence", 0.1 * (1 + 0.1 * 0.1)),
    ],
)
def test_adaptive_kl_coefficient_by_paper(per: str, expected: float) -> None:
    """Ziegler et al. 2019 (arXiv:1909.08593), section 2.2: e = clip((KL - target) / target, -0.2, 0.2) and beta_next
    = beta (1 + K e). Their K = 0.1 is 512 sequences over a horizon of 5120."""
    kl = torch.tensor([[0.2, HOLE, 0.4], [0.5, HOLE, HOLE]])
    mask = torch.tensor([[True, False, True], [True, False, False]])
    target = KlTarget(0.5, per, 5120)
    assert target.next_coef(0.1, target.measured(kl, mask), num_seqs=512) == pytest.approx(expected)


def test_overlong_penalty_by_paper() -> None:
    """DAPO (arXiv:2503.14476), eq. 13: 0 up to L_max - L_cache, ((L_max - L_cache) - n) / L_cache, -1 above L_max."""
    # L_max 100, L_cache 40, penalty 2: 60 -> 0; 70 -> -10/40; 95 -> -35/40; 100 -> -1; 130 -> -1, all twice.
    lengths = torch.tensor([60, 70, 95, 100, 130])
    found = overlong_penalty(lengths, max_tokens=100, buffer_tokens=40, penalty=2.0, floor=True)
    FLOAT32.check(found, torch.tensor([0.0, -0.5, -1.75, -2.0, -2.0]))


def test_running_reward_moments_by_paper() -> None:
    """Chan, Golub and LeVeque 1979, the pairwise update, by which trlX scales rewards; sample standard deviation."""
    # 2, 5 then 1, 3, 9: mean 20 / 5 = 4; squares 4 + 1 + 9 + 1 + 25 = 40; std sqrt(40 / 4).
    both = merged(moments_of(torch.tensor([2.0, 5.0])), moments_of(torch.tensor([1.0, 3.0, 9.0])))
    assert (both.count, both.mean, both.m2) == (5.0, pytest.approx(4.0), pytest.approx(40.0))
    assert both.std == pytest.approx(math.sqrt(10))
