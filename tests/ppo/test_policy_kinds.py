"""Every kind of policy loss: values by hand, gradients compared with finite differences, and invariances."""

import math

import pytest
import torch
from grids import GARBAGE, holey_mask, normal, poisoned, policy_inputs
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.algorithms.formulas.diagnostics import policy_diagnostics
from ppoctl.algorithms.formulas.policy_loss import Cispo, Gspo, PolicyClip, Reinforce
from tolerance import EXACT, FLOAT32

KINDS = {
    "clip": PolicyClip(low=0.2, high=0.3, dual=3.0),
    "gspo by token": Gspo(low=0.2, high=0.3, gradient="token"),
    "gspo by sequence": Gspo(low=0.2, high=0.3, gradient="sequence"),
    "cispo": Cispo(low=0.6, high=0.3),
    "reinforce": Reinforce(),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)

# Two sequences: three tokens with a hole in the middle, and three. Old log-probs -1 and -2.
LOGPROBS = torch.tensor([[-1 + math.log(1.5), -7.0, -1 + math.log(0.6)], [-2 + math.log(2), -2.0, -2 + math.log(4)]])
OLD = torch.tensor([[-1.0, -3.0, -1.0], [-2.0, -2.0, -2.0]])
ADVANTAGES = torch.tensor([[2.0, 9.0, -1.0], [1.0, -1.0, -0.5]])
MASK = torch.tensor([[True, False, True], [True, True, True]])


def losses_and_gradient(kind, logprobs, old, advantages, mask):
    logprobs = logprobs.detach().clone().requires_grad_()
    losses = kind.losses(policy_inputs(logprobs, old, advantages, mask))
    losses.sum().backward()
    return losses.detach(), logprobs.grad


@pytest.mark.parametrize("gradient", ["token", "sequence"])
def test_gspo_has_one_ratio_per_sequence(gradient):
    kind = Gspo(low=0.2, high=0.3, gradient=gradient)
    # Row 0 without the hole: (1.5 x 0.6)^(1/2) = sqrt(0.9), inside 0.8 to 1.3. Row 1: (2 x 1 x 4)^(1/3) = 2, above.
    first = math.sqrt(0.9)
    ratios = kind.ratios(LOGPROBS, OLD, MASK)
    FLOAT32.check(ratios, torch.tensor([[first, 1.0, first], [2.0, 2.0, 2.0]]))
    losses, found = losses_and_gradient(kind, LOGPROBS, OLD, ADVANTAGES, MASK)
    # -A s; in row 1 the good token is clipped at 1.3, the bad tokens are not clipped.
    FLOAT32.check(losses, torch.tensor([[-2 * first, 0.0, first], [-1.3, 2.0, 1.0]]))
    # Token form: -A s of each token that is not clipped.
    # Sequence form: d s / d logprob = s / n, of the sum of those: row 0: s (-2 + 1) / 2 each;
    # row 1: 2 x (1 + 0.5) / 3 = 1 each, the clipped token too.
    by_token = [[-2 * first, 0.0, first], [0.0, 2.0, 1.0]]
    by_sequence = [[-first / 2, 0.0, -first / 2], [1.0, 1.0, 1.0]]
    FLOAT32.check(found, torch.tensor(by_token if gradient == "token" else by_sequence))


def test_gspo_gradients_agree_for_one_advantage_per_response():
    advantages = torch.tensor([[2.0, 2.0, 2.0], [-1.0, -1.0, -1.0]])
    found = [
        losses_and_gradient(KINDS[f"gspo by {how}"], LOGPROBS, OLD, advantages, MASK) for how in ("token", "sequence")
    ]
    EXACT.check(found[0][0], found[1][0])
    FLOAT32.check(found[0][1], found[1][1])


def test_cispo_weighs_logprobs_by_bounded_ratio():
    kind = Cispo(low=0.3, high=0.5)
    # Ratios 1.5, 0.6 | 2, 1, 4, bounded by 0.7 and 1.5: 1.5, 0.7 | 1.5, 1, 1.5. l = -A w logprob.
    weights = torch.tensor([[1.5, 0.0, 0.7], [1.5, 1.0, 1.5]])
    losses, gradient = losses_and_gradient(kind, LOGPROBS, OLD, ADVANTAGES, MASK)
    FLOAT32.check(gradient, -ADVANTAGES * weights)
    FLOAT32.check(losses, -ADVANTAGES * weights * LOGPROBS)
    unbounded = Cispo(low=1.0, high=0.5)
    FLOAT32.check(losses_and_gradient(unbounded, LOGPROBS, OLD, ADVANTAGES, MASK)[1][0, 2], 0.6)


def test_reinforce_reads_no_old_logprobs():
    losses, gradient = losses_and_gradient(Reinforce(), LOGPROBS, OLD * math.nan, ADVANTAGES, MASK)
    FLOAT32.check(gradient, torch.tensor([[-2.0, 0.0, 1.0], [-1.0, 1.0, 0.5]]))
    FLOAT32.check(losses, torch.where(MASK, -ADVANTAGES * LOGPROBS, 0))


@every_kind
def test_unchanged_policy_gives_policy_gradient_for_every_loss(kind):
    """At ratio 1 the gradient is minus the advantage, for GSPO by sequence minus its mean. This is the case if the
    old log-probs are the current ones."""
    _, found = losses_and_gradient(kind, LOGPROBS, LOGPROBS, ADVANTAGES, MASK)
    by_sequence = torch.tensor([[-0.5, 0.0, -0.5], [1 / 6, 1 / 6, 1 / 6]])
    expected = by_sequence if kind == KINDS["gspo by sequence"] else torch.where(MASK, -ADVANTAGES, 0)
    FLOAT32.check(found, expected)


def test_clip_metrics_use_the_clipped_ratio():
    def of(kind):
        return policy_diagnostics(LOGPROBS, OLD, ADVANTAGES, MASK, loss=kind)

    # Tokens: A and ratio (2, 1.5) (-1, 0.6) | (1, 2) (-1, 1) (-0.5, 4).
    clip = of(PolicyClip(low=0.2, high=0.3, dual=3.0))
    assert (clip["clip_frac_high"], clip["clip_frac_low"], clip["dual_clip_frac"]) == pytest.approx((0.4, 0.2, 0.2))
    # The ratio of row 1 is 2: one good token above.
    gspo = of(KINDS["gspo by token"])
    assert (gspo["clip_frac_high"], gspo["clip_frac_low"], gspo["clip_frac"]) == pytest.approx((0.2, 0.0, 0.2))
    FLOAT32.check(gspo["ratio_mean"], (2 * math.sqrt(0.9) + 3 * 2) / 5)
    # Weights, for either sign of A: 1.5, 2 and 4 above 1.3; 0.6 below 0.7.
    cispo = of(Cispo(low=0.3, high=0.3))
    assert (cispo["clip_frac_high"], cispo["clip_frac_low"], cispo["clip_frac"]) == pytest.approx((0.6, 0.2, 0.8))
    assert not [name for name in of(Reinforce()) if "clip" in name]
    assert "dual_clip_frac" not in {**gspo, **cispo}
    assert gspo["approx_kl"] == cispo["approx_kl"] == of(Reinforce())["approx_kl"] == clip["approx_kl"]


def test_clamped_ratios_stay_within_the_clip_range():
    ratios = torch.tensor([[0.1, 0.75, 1.0, 1.25, 9.0]])
    for kind in (PolicyClip(low=0.2, high=0.3, dual=None), Gspo(0.2, 0.3, "token"), Cispo(low=0.2, high=0.3)):
        FLOAT32.check(kind.clamped(ratios), torch.tensor([[0.8, 0.8, 1.0, 1.25, 1.3]]))
    FLOAT32.check(Cispo(low=1.0, high=0.3).clamped(ratios)[0, 0], 0.1)
    assert Reinforce().clamped(ratios) is None


@every_kind
def test_policy_loss_gradients_match_finite_differences(kind):
    """In float64. GSPO by token and CISPO hold ratios constant, so they are not functions with this derivative: they
    are checked with their ratios frozen."""
    mask = holey_mask(3, 4, seed=1)
    mask[2] = False
    logprobs, old, advantages = (normal(3, 4, seed=seed).double() / 4 for seed in (2, 3, 4))
    logprobs.requires_grad_()
    found = torch.autograd.grad(kind.losses(policy_inputs(logprobs, old, advantages, mask)).sum(), logprobs)[0]
    assert found.dtype == torch.float64
    ratios = kind.ratios(logprobs, old, mask).detach()
    if isinstance(kind, Cispo):
        weights = ratios.clamp(0.4, 1.3)
        expected = torch.where(mask, -advantages * weights, 0)
        torch.testing.assert_close(found, expected)
    elif kind == KINDS["gspo by token"]:
        is_free = ~(kind.clipped(ratios, advantages)["clip_frac"])
        torch.testing.assert_close(found, torch.where(mask & is_free, -advantages * ratios, 0))
    else:
        assert torch.autograd.gradcheck(
            lambda new: kind.losses(policy_inputs(new, old, advantages, mask)), (logprobs,)
        )


@given(
    kind=st.sampled_from(list(KINDS.values())),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.0, 0.3, 30.0, 1e4]),
    empty=st.sets(st.integers(0, 3), max_size=4),
    width=st.integers(1, 5),
    garbage=st.sampled_from([0.0, *GARBAGE]),
)
def test_policy_losses_are_finite_for_masked_rows_and_huge_ratios(kind, seed, spread, empty, width, garbage):
    mask = holey_mask(4, width, seed=seed) & ~torch.tensor([row in empty for row in range(4)])[:, None]
    grids = [normal(4, width, seed=seed + place) * size for place, size in enumerate((spread, spread, 1.0))]
    clean = losses_and_gradient(kind, *grids, mask)
    # Anomaly mode: intermediate gradients are not NaN either.
    with torch.autograd.set_detect_anomaly(True):
        found = losses_and_gradient(kind, *(poisoned(grid, mask, garbage) for grid in grids), mask)
    for one, expected in zip(found, clean, strict=True):
        assert bool(one.isfinite().all())
        assert not bool(one[~mask].any())
        EXACT.check(one, expected)


@every_kind
@pytest.mark.parametrize("nats", [300.0, -300.0])
def test_policy_losses_are_finite_for_sequences_300_nats_away(kind, nats):
    far, mask = torch.full((2, 3), nats), torch.ones(2, 3, dtype=torch.bool)
    for found in losses_and_gradient(kind, far, OLD, ADVANTAGES, mask):
        assert bool(found.isfinite().all())


@every_kind
def test_policy_losses_ignore_padding_row_order_and_split(kind):
    mask = holey_mask(6, 5, seed=3)
    grids = [*(normal(6, 5, seed=seed) / 2 for seed in range(3)), mask]
    losses, gradient = losses_and_gradient(kind, *grids)
    moved = losses_and_gradient(kind, *(torch.nn.functional.pad(grid.flip(0), (0, 4)) for grid in grids))
    FLOAT32.check(moved[0].flip(0)[:, :5], losses)
    FLOAT32.check(moved[1].flip(0)[:, :5], gradient)
    parts = [losses_and_gradient(kind, *(grid[rows] for grid in grids)) for rows in (slice(0, 1), slice(1, 6))]
    FLOAT32.check(torch.cat([part[0] for part in parts]), losses)


@every_kind
def test_advantage_weights_scale_every_policy_loss(kind):
    weights = torch.tensor([[2.0, 5.0, 0.0], [1.0, 3.0, 0.5]])
    plain = kind.losses(policy_inputs(LOGPROBS, OLD, ADVANTAGES, MASK))
    FLOAT32.check(kind.losses(policy_inputs(LOGPROBS, OLD, ADVANTAGES * weights, MASK)), plain * weights)


@every_kind
def test_only_new_logprobs_receive_gradient_in_every_loss(kind):
    old, advantages = OLD.clone().requires_grad_(), ADVANTAGES.clone().requires_grad_()
    kind.losses(policy_inputs(LOGPROBS.clone().requires_grad_(), old, advantages, MASK)).sum().backward()
    assert (old.grad, advantages.grad) == (None, None)


@pytest.mark.parametrize("made", [lambda *of: Gspo(*of, "token"), Cispo])
@pytest.mark.parametrize(("bounds", "name"), [((-0.1, 0.2), "low"), ((1.1, 0.2), "low"), ((0.2, -0.1), "high")])
def test_gspo_and_cispo_reject_impossible_bounds(made, bounds, name):
    with pytest.raises(ValueError, match=f"{name} is"):
        made(*bounds)
