"""The gradient of the KL loss for every estimator, every form of the gradient, and every clamp that may be active.

The oracle is the rule of docs/algorithms.md in plain Python numbers: a loss of one log-prob, in which every constant
of the rule is computed at `at` and held fixed. Its central difference is the gradient.
"""

import math
from collections.abc import Callable

import pytest
import torch

from ppoctl.algorithms.formulas.kl import KlEstimator
from ppoctl.algorithms.stages.kl_table import KlInLoss
from ppoctl.recipe.docstring_fields import parse_docstring
from tolerance import FLOAT32

KINDS = ("k1", "k2", "k3", "abs")
GRADIENTS = ("estimator", "k2", "score_function", "importance")
LOGP = -1.5

# The clamps, and d = ref - logp with the clamp that is active. 1.5 clamps |d|; the estimates of -0.7, 0.6 and 1.2 are
# at most 0.9 in k2 (0.245, 0.18, 0.72), and those of 2.2 are all above.
STATES = {
    "free": ((None, None), (-0.7, 0.6, 2.2)),
    "inside both": ((3.0, 8.0), (-0.7, 0.6, 2.2)),
    "input": ((1.5, None), (-2.2, 2.2)),
    "output": ((None, 0.3), (-2.2, 2.2)),
    "both": ((1.5, 0.3), (-2.2, 2.2)),
}
FORMULAS: dict[str, Callable[[float], float]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
    "abs": abs,
}


def written(logp: float, at: float, ref: float, old: float, keys: tuple[str, str, str]) -> float:
    """Return the loss that has the rule's gradient at `at`: each stop-gradient reads `at` in place of `logp`."""
    kind, gradient, state = keys
    (a, b), _ = STATES[state]
    formula, a, b = FORMULAS[kind], a or math.inf, b or math.inf

    def value(at_logp: float, weight: float) -> float:
        d = min(max(ref - at_logp, -a), a)
        return min(max(weight * formula(d), -b), b)

    if gradient == "estimator":
        return value(logp, 1.0)
    if gradient == "k2":
        return value(at, 1.0) + (ref - logp) ** 2 / 2 - (ref - at) ** 2 / 2
    is_held = abs(ref - at) > a
    weighs = at if is_held else logp
    return value(logp, math.exp(weighs - (at if gradient == "score_function" else old)))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("kind", KINDS)
def test_kl_value_and_gradient_follow_documented_rule(kind: str, gradient: str, state: str) -> None:
    (a, b), distances = STATES[state]
    # Ratios new / old of 0.8, 1 and 1.25: small enough that no weight moves a token across a clamp.
    for d in distances:
        for log_weight in (-0.22, 0.0, 0.22):
            ref, old, step = LOGP + d, LOGP - log_weight, 1e-6
            logprobs = torch.tensor([[LOGP]], dtype=torch.float64, requires_grad=True)
            others = [torch.tensor([[number]], dtype=torch.float64) for number in (ref, old)]
            found = KlEstimator(kind, a, b).losses(logprobs, *others, torch.tensor([[True]]), gradient=gradient)
            found.sum().backward()
            keys = (kind, gradient, state)
            up, down = (written(LOGP + sign * step, LOGP, ref, old, keys) for sign in (1, -1))
            assert found.item() == pytest.approx(written(LOGP, LOGP, ref, old, keys), abs=1e-12), (d, log_weight)
            assert logprobs.grad.item() == pytest.approx((up - down) / (2 * step), abs=1e-7), (d, log_weight)
            if gradient != "k2" and state in ("input", "output", "both"):
                assert logprobs.grad.item() == 0.0, (d, log_weight)


def loss_and_gradient(kl: KlEstimator, gradient: str, d: list[float], weight: float = 1.0) -> tuple:
    logprobs = torch.full((1, len(d)), LOGP, requires_grad=True)
    mask, old = torch.ones(1, len(d), dtype=torch.bool), logprobs.detach() - math.log(weight)
    found = kl.losses(logprobs, logprobs.detach() + torch.tensor([d]), old, mask, gradient=gradient)
    found.sum().backward()
    return found.detach(), logprobs.grad


@pytest.mark.parametrize("gradient", ["score_function", "importance"])
def test_built_in_k3_limit_acts_as_input_clamp(gradient: str) -> None:
    value, slope = loss_and_gradient(KlEstimator("k3"), gradient, [20.5, 30.0, 2.0])
    FLOAT32.check(value[0, :2], torch.full((2,), math.exp(20) - 21))
    assert slope[0, :2].tolist() == [0.0, 0.0]
    FLOAT32.check(slope[0, 2], torch.tensor(-2.0))


def test_importance_weight_below_1_moves_token_inside_output_clamp() -> None:
    # |w k1| = 0.4 x 2 = 0.8 is within 1 although k1 itself is not: gradient w (1 + k1) = 0.4 (1 - 2).
    value, slope = loss_and_gradient(KlEstimator("k1", None, 1.0), "importance", [2.0], weight=0.4)
    FLOAT32.check(value, torch.tensor([[-0.8]]))
    FLOAT32.check(slope, torch.tensor([[-0.4]]))


def test_token_at_input_clamp_is_not_clamped() -> None:
    # d = 0.5 and -0.5 with k1: gradient 1 + k1; slightly further out: no gradient.
    _, slope = loss_and_gradient(KlEstimator("k1", 0.5), "score_function", [0.5, -0.5, 0.5001, -0.5001])
    FLOAT32.check(slope, torch.tensor([[0.5, 1.5, 0.0, 0.0]]))


# d -> (value, gradient) as computed in float64 by NeMo-RL's code (`calculate_kl` of 2026-08-22, with the weights of
# its importance sampling), logp -1.5. NeMo-RL has neither abs nor a straight-through form.
DISTANCES = [3.0, -3.0, 0.5, -0.7, 1.2, 2.5]
NEMO_RL = [
    ("k1", 1.0, None, 2.5, [-2.5, 2.5, -1.25, 1.75, -2.5, -2.5], [0.0, 0.0, 1.25, 4.25, 0.0, 0.0]),
    ("k1", None, 0.9, 0.4, [-0.9, 0.9, -0.2, 0.28, -0.48, -0.9], [0.0, 0.0, 0.2, 0.68, -0.08, 0.0]),
    ("k2", 2.0, 1.5, 0.4, [0.8, 0.8, 0.05, 0.098, 0.288, 0.8], [0.0, 0.0, -0.15, 0.378, -0.192, 0.0]),
    (
        "k2", None, None, 2.5,
        [11.25, 11.25, 0.3125, 0.6125, 1.8, 7.8125],
        [3.75, 18.75, -0.9375, 2.3625, -1.2, 1.5625],
    ),
    (
        "k3", 20.0, 10.0, 1.0,
        [10.0, 2.049787068, 0.148721271, 0.196585304, 1.120116923, 8.682493961],
        [0.0, 3.0, -0.5, 0.7, -1.2, -2.5],
    ),
    (
        "k3", 20.0, 10.0, 2.5,
        [10.0, 5.124467671, 0.371803177, 0.491463259, 2.800292307, 10.0],
        [0.0, 7.5, -1.25, 1.75, -3.0, 0.0],
    ),
    (
        "k3", 2.0, 1.5, 0.4,
        [1.5, 0.454134113, 0.059488508, 0.078634122, 0.448046769, 1.5],
        [0.0, 0.0, -0.2, 0.28, -0.48, 0.0],
    ),
    (
        "k3", 1.0, None, 0.4,
        [0.287312731, 0.147151776, 0.059488508, 0.078634122, 0.287312731, 0.287312731],
        [0.0, 0.0, -0.2, 0.28, 0.0, 0.0],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "a", "b", "weight", "values", "slopes"), NEMO_RL)
def test_importance_gradient_equals_nemo_rl(kind, a, b, weight, values, slopes) -> None:
    value, slope = loss_and_gradient(KlEstimator(kind, a, b), "importance", DISTANCES, weight)
    FLOAT32.check(value, torch.tensor([values]))
    FLOAT32.check(slope, torch.tensor([slopes]))
    if weight == 1.0:
        value, slope = loss_and_gradient(KlEstimator(kind, a, b), "score_function", DISTANCES)
        FLOAT32.check(value, torch.tensor([values]))
        FLOAT32.check(slope, torch.tensor([slopes]))


def test_held_marks_tokens_changed_by_clamp() -> None:
    logprobs, mask = torch.full((1, 5), LOGP), torch.tensor([[True, True, False, True, True]])
    others = logprobs + torch.tensor([[2.5, -2.5, 2.5, 1.0, 0.5]])
    assert KlEstimator("k1", 2.0).held(logprobs, others, mask).tolist() == [[True, True, False, False, False]]
    # k1: |d| above 0.8. k3: e - 2 = 0.72 and 0.15 are below, e^2.5 - 3.5 and e^-2.5 + 1.5 above.
    assert KlEstimator("k1", None, 0.8).held(logprobs, others, mask).tolist() == [[True, True, False, True, False]]
    assert KlEstimator("k3", None, 0.8).held(logprobs, others, mask).tolist() == [[True, True, False, False, False]]
    assert not KlEstimator("k3").held(logprobs, others, mask).any()
    assert KlEstimator("k3").held(logprobs, logprobs + 20.5, mask).tolist() == [mask[0].tolist()]
    assert not KlEstimator("k3").held(logprobs, logprobs - 20.5, mask).any()


TABLE = parse_docstring(KlInLoss.model_fields["gradient"].description or "").table


@pytest.mark.parametrize("row", TABLE[1:], ids=lambda row: "-".join(row[:2]))
def test_documented_kl_gradient_table_equals_computed_slopes(row: tuple[str, ...]) -> None:
    """docs/algorithms.md prints this table: each cell is a formula of d = logp - ref and w."""
    gradient, estimator, free, input_held, output_held = row
    cells = {(None, None): free, (0.5, None): input_held, (None, 1e-3): output_held}
    for kind in KINDS if estimator == "any" else (estimator,):
        for (a, b), cell in cells.items():
            for d in (-1.3, 0.7):
                weight = 1.6 if gradient == "importance" else 1.0
                _, slope = loss_and_gradient(KlEstimator(kind, a, b), gradient, [-d], weight)
                names = {"d": d, "w": weight, "exp": math.exp, "abs": abs, "sign": lambda x: math.copysign(1.0, x)}
                python = cell.replace("^", "**").replace("w (", "w * (").replace("w d", "w * d")
                FLOAT32.check(slope, torch.tensor([[float(eval(python, names))]]))


def test_documented_kl_gradient_table_has_every_combination() -> None:
    rows = {(gradient, kind) for gradient, named, *_ in TABLE[1:] for kind in (KINDS if named == "any" else (named,))}
    assert rows == {(gradient, kind) for gradient in GRADIENTS for kind in KINDS}
