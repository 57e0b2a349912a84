"""Metrics of an update: each by hand, and independent of masked positions."""

import math

import pytest
import torch
from grids import GARBAGE, holey_mask, normal, poisoned, policy_inputs

from ppoctl.algorithms.formulas.diagnostics import nearest_rank, policy_diagnostics, sampler_gap, value_diagnostics
from ppoctl.algorithms.formulas.policy_loss import PolicyClip
from ppoctl.core.metric_registry import find
from tolerance import EXACT, FLOAT32

CLIP = PolicyClip(low=0.2, high=0.3, dual=3.0)


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float32)


def every(x):
    return torch.ones_like(x, dtype=torch.bool)


def check(found, **expected):
    for name, number in expected.items():
        FLOAT32.check(found[name], number)


def test_policy_metrics_by_hand():
    ratio = row(1.5, 1.5, 0.5, 0.5, 4.0, 1.0, 1.25, 1.0)
    advantages = row(1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 1.0, 0.0)
    found = policy_diagnostics(ratio.log(), 0 * ratio, advantages, every(ratio), loss=CLIP)
    # high: token 0 alone (1.25 is inside); low: token 3 alone; dual: token 4 alone
    check(found, clip_frac_high=1 / 8, clip_frac_low=1 / 8, clip_frac=2 / 8, dual_clip_frac=1 / 8)
    # sorted: 0.5 0.5 1 1 1.25 1.5 1.5 4; ranks round(0.07), round(3.5) = 4 (ties to even), round(6.93), 7
    check(found, ratio_mean=11.25 / 8, ratio_p01=0.5, ratio_p50=1.25, ratio_p99=4.0, ratio_max=4.0)
    # mean of (r - 1 - ln r): (11.25 - 8 - ln(1.5^2 0.5^2 4 1.25)) / 8
    check(found, approx_kl=(3.25 - math.log(1.5**2 * 0.5**2 * 4 * 1.25)) / 8)


def test_dual_clip_frac_is_zero_without_dual_clip():
    clip = PolicyClip(low=0.2, high=0.2, dual=None)
    found = policy_diagnostics(row(9.0), row(0.0), row(-1.0), every(row(0.0)), loss=clip)
    check(found, dual_clip_frac=0.0)


def test_clip_fractions_equal_fraction_of_zero_gradients():
    logprobs, old, advantages = (normal(8, 9, seed=i) for i in range(3))
    mask = holey_mask(8, 9, seed=3)
    found = policy_diagnostics(logprobs, old, advantages, mask, loss=CLIP)
    logprobs.requires_grad_()
    CLIP.losses(policy_inputs(logprobs, old, advantages, mask)).sum().backward()
    stopped = ((logprobs.grad == 0) & mask).sum() / mask.sum()
    FLOAT32.check(found["clip_frac"] + found["dual_clip_frac"], stopped.item())


def test_zero_advantage_token_is_not_clipped():
    ratio = torch.tensor([[0.1, 2.0, 9.0]])
    found = policy_diagnostics(ratio.log(), 0 * ratio, 0 * ratio, every(ratio), loss=CLIP)
    check(found, clip_frac=0.0, clip_frac_high=0.0, clip_frac_low=0.0, dual_clip_frac=0.0)


def test_ratio_percentiles_use_unmasked_tokens():
    ratio = torch.arange(1.0, 102.0)[None].flip(1)  # 1 .. 101: rank q of 100 is q + 1
    mask = torch.nn.functional.pad(every(ratio), (0, 99))
    logprobs = torch.nn.functional.pad(ratio.log(), (0, 99))
    found = policy_diagnostics(logprobs, 0 * logprobs, logprobs, mask, loss=CLIP)
    check(found, ratio_p01=2.0, ratio_p50=51.0, ratio_p99=100.0, ratio_max=101.0)


def test_nearest_rank_handles_more_tokens_than_torch_quantile():
    FLOAT32.check(nearest_rank(torch.ones(2**24 + 2), share=0.5), 1.0)


def test_value_metrics_by_hand():
    values, old, returns = row(1.0, 1.0, 0.2, -1.0), row(0.0, 0.0, 0.0, 1.0), row(2.0, 0.0, 1.0, 1.0)
    found = value_diagnostics(values, old, returns, every(values), clip=0.5)
    # G - V_old = 2, 0, 1, 0: mean 3/4, squares 4 + 1 - 4 x 9/16 = 2.75; G: mean 1, squares 1 + 1 = 2; both by 3
    check(found, explained_variance=1 - 2.75 / 2, return_mean=1.0, return_std=math.sqrt(2 / 3))
    # clipped errors: 2.25 > 1; 0.25 < 1; 0.64 = 0.64; (0.5 - 1)^2 < 4
    check(found, clip_frac=1 / 4, value_mean=0.3, value_error=(1 + 1 + 0.8 + 2) / 4)


def test_rounding_is_not_value_clipping():
    # old + (V - old) differs from V in float32: a clip computed that way would find a larger error at some positions.
    values, old, returns = (normal(50, 50, seed=seed) for seed in range(3))
    found = value_diagnostics(values, old, returns, every(values), clip=100.0)
    check(found, clip_frac=0.0)


def test_explained_variance_is_1_if_perfect_and_0_if_constant():
    returns = row(1.0, 2.0, 3.0)
    for old, targets, expected in ((returns, returns, 1.0), (0 * returns, returns, 0.0), (returns, 0 * returns, 0.0)):
        found = value_diagnostics(old, old, targets, every(old), clip=None)
        check(found, explained_variance=expected, clip_frac=0.0)


def test_explained_variance_is_0_for_returns_equal_up_to_rounding():
    returns = torch.full((7, 13), 0.1)
    returns[2, 5:9] += 2**-27  # the next float32
    old = normal(7, 13, seed=1)
    check(value_diagnostics(old, old, returns, every(old), clip=None), explained_variance=0.0, return_std=0.0)


def test_sampler_gap_by_hand():
    # trainer - sampler = ln 2, 0, -ln 4; w = 2, 1, 1/4; k3 = (w - 1 - ln w): 3.25 - 3 + ln 2 in all
    logprobs, sampler = row(-1.0, -1.0, -1.0), row(-1.0 - math.log(2), -1.0, -1.0 + math.log(4))
    found = sampler_gap(logprobs, sampler, every(logprobs))
    check(found, gap_mean_abs=math.log(2), gap_max_abs=math.log(4), gap_k3=(0.25 + math.log(2)) / 3)
    check(found, ess_frac=3.25**2 / (3 * 5.0625))
    # exp|d| = 2, 1, 4 in the one sequence.
    check(found, sequence_gap_mean=7 / 3, sequence_gap_max=7 / 3)


def test_sequence_gap_uses_unmasked_tokens():
    # exp|trainer - sampler|: 2, (8), 4 and 1, (8), (8); a row without tokens is in neither mean nor maximum.
    logs = torch.tensor([[2.0, 8.0, 4.0], [1.0, 8.0, 8.0], [8.0, 8.0, 8.0]]).log()
    signs = torch.tensor([[1.0, 1.0, -1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, False, True], [True, False, False], [False, False, False]])
    found = sampler_gap(logs * signs, torch.zeros(3, 3), mask)
    check(found, sequence_gap_mean=(3 + 1) / 2, sequence_gap_max=3.0)


def test_equal_sampler_has_zero_gap():
    found = sampler_gap(row(-1.0, -2.0), row(-1.0, -2.0), every(row(0.0, 0.0)))
    check(found, gap_mean_abs=0.0, gap_max_abs=0.0, gap_k3=0.0, ess_frac=1.0)


def diagnostics_of(mask, garbage):
    """Return all metrics of a fixed example, with garbage where masked out."""
    first, second, third = (poisoned(normal(5, 7, seed=i), mask, garbage) for i in range(3))
    return {
        **of("policy", policy_diagnostics(first, second, third, mask, loss=CLIP)),
        **of("value", value_diagnostics(first, second, third, mask, clip=0.2)),
        **of("mismatch", sampler_gap(first, second, mask)),
    }


def of(group, found):
    return {f"{group}/{name}": number for name, number in found.items()}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_diagnostics_ignore_masked_garbage(garbage):
    mask = holey_mask(5, 7, seed=3)
    clean, dirty = diagnostics_of(mask, 0.0), diagnostics_of(mask, garbage)
    assert all(type(number) is float and math.isfinite(number) for number in clean.values())
    EXACT.check(torch.tensor(list(dirty.values())), torch.tensor(list(clean.values())))


def test_diagnostics_have_registered_metric_names():
    found = diagnostics_of(holey_mask(5, 7, seed=3), 0.0)
    assert len(found) == 10 + 6 + 6
    assert all(find(name) is not None for name in found)


def test_diagnostics_require_an_unmasked_token():
    zeros, nothing = row(0.0, 0.0), torch.zeros(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match="0 unmasked tokens"):
        policy_diagnostics(zeros, zeros, zeros, nothing, loss=CLIP)
    with pytest.raises(ValueError, match="0 unmasked tokens"):
        value_diagnostics(zeros, zeros, zeros, nothing, clip=None)
    with pytest.raises(ValueError, match="0 unmasked tokens"):
        sampler_gap(zeros, zeros, nothing)
