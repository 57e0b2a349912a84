"""A loss or an estimator of the user: what it receives, what it may return, and errors that name its line."""

import hashlib
import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from estimators.test_estimators import INPUTS
from own_loss_page import written
from ppoctl.algorithms.estimators.python import PythonAdvantages
from ppoctl.algorithms.formulas.policy_loss import PolicyClip, PolicyLossInputs
from ppoctl.algorithms.stages.loss_tables import PythonPolicyLoss
from ppoctl.algorithms.stages.python_loss import PythonLoss
from ppoctl.core.errors import MissingAssetError, NonFiniteError, RecipeError
from ppoctl.core.user_functions import TrainingFunction
from tolerance import EXACT, FLOAT32

FILE = Path(__file__).with_name("users_training.py")

# Two sequences: three tokens with a hole in the middle, and three. Ratios 1.5, -, 0.6 and 2, 1, 4.
LOGPROBS = torch.tensor([[-1 + math.log(1.5), -7.0, -1 + math.log(0.6)], [-2 + math.log(2), -2.0, -2 + math.log(4)]])
OLD = torch.tensor([[-1.0, -3.0, -1.0], [-2.0, -2.0, -2.0]])
ADVANTAGES = torch.tensor([[2.0, 9.0, -1.0], [1.0, -1.0, -0.5]])
MASK = torch.tensor([[True, False, True], [True, True, True]])
SAMPLER = torch.tensor([[-1.5, -9.0, -1.0], [-2.0, -1.0, -3.0]])
ENTROPY = torch.tensor([[0.4, 8.0, 0.8], [1.0, 1.2, 2.0]])


def loss(name: str, *, needs_entropy: bool = False, file: Path = FILE, **options: Any) -> PythonLoss:
    table = PythonPolicyLoss(
        kind="python", function=f"{file}:{name}", options=options, needs_entropy=needs_entropy
    ).build()
    assert isinstance(table, PythonLoss)
    return table


def inputs(**changes: Any) -> PolicyLossInputs:
    grids = {"logprobs": LOGPROBS.clone().requires_grad_(), "old_logprobs": OLD, "advantages": ADVANTAGES}
    return PolicyLossInputs(**{**grids, "mask": MASK, "sampler_logprobs": SAMPLER, **changes})


def test_example_of_the_page_has_value_and_gradient_of_sapo(tmp_path: Path) -> None:
    """arXiv:2511.20347. With p = sigmoid(tau (r - 1)): loss -A p 4 / tau, gradient -A 4 p (1 - p) r, by hand for
    tau_pos 1.2 and tau_neg 1.5."""
    sapo = loss("loss", file=written(tmp_path, "my_loss.py"), tau_pos=1.2, tau_neg=1.5)
    given = inputs()
    losses = sapo.losses(given)
    losses.sum().backward()
    gates = {1.5: 0.645656, 0.6: 0.354344, 2.0: 0.768525, 1.0: 0.5, 4.0: 0.989013}  # 1 / (1 + exp(-tau (r - 1)))
    rows = [[(1.5, 2.0), None, (0.6, -1.0)], [(2.0, 1.0), (1.0, -1.0), (4.0, -0.5)]]

    def grid(of: Callable[[float, float, float], float]) -> torch.Tensor:
        tokens = [[0.0 if t is None else of(*t, gates[t[0]]) for t in row] for row in rows]
        return torch.tensor(tokens)

    tau = {True: 1.2, False: 1.5}
    torch.testing.assert_close(losses, grid(lambda r, a, p: -a * p * 4 / tau[a > 0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(given.logprobs.grad, grid(lambda r, a, p: -a * 4 * p * (1 - p) * r), atol=2e-5, rtol=0)
    # Values of verl's compute_policy_loss_sapo (August 2026) for the same numbers: the mean over two responses of the
    # mean over their tokens, and its gradient.
    means = losses.detach().sum(1) / MASK.sum(1)
    assert float(means.mean()) == pytest.approx(-0.82482002, abs=1e-6)
    verl = torch.tensor([[-0.68635272, 0.0, 0.13727054], [-0.23719259, 0.16666667, 0.01448831]])
    assert given.logprobs.grad is not None
    FLOAT32.check(given.logprobs.grad / MASK.sum(1, keepdim=True) / 2, verl)
    # The metric of the page is 4 p (1 - p).
    weight = grid(lambda r, a, p: 4 * p * (1 - p)).sum() / 5
    assert sapo.metrics(given)["custom_weight"] == pytest.approx(float(weight), abs=1e-5)


def test_function_receives_every_grid_and_0_where_masked_out() -> None:
    given = inputs(entropy=ENTROPY.clone().requires_grad_())
    mine = loss("every_grid", needs_entropy=True, scale=2.0)
    losses = mine.losses(given)
    losses.sum().backward()
    new = LOGPROBS.tolist()
    # -2 A (new - sampler / 2) + 1 - entropy / 4; exactly 0 at the hole.
    expected = [
        [-4 * (new[0][0] + 0.75) + 0.9, 0.0, 2 * (new[0][2] + 0.5) + 0.8],
        [-2 * (new[1][0] + 1.0) + 0.75, 2 * (-2.0 + 0.5) + 0.7, 1 * (new[1][2] + 1.5) + 0.5],
    ]
    FLOAT32.check(losses.detach(), torch.tensor(expected))
    EXACT.check(given.logprobs.grad, torch.tensor([[-4.0, 0.0, 2.0], [-2.0, 2.0, 1.0]]))
    assert given.entropy is not None
    EXACT.check(given.entropy.grad, -0.25 * MASK)
    gaps = (new[0][0] + 1.5) + (new[0][2] + 1.0) + (new[1][0] + 2.0) + (-2.0 + 1.0) + (new[1][2] + 3.0)
    assert mine.metrics(given) == pytest.approx({"custom_gap": gaps / 5, "custom_tokens": 1.0})


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_masked_out_numbers_reach_no_loss_and_no_gradient(garbage: float) -> None:
    grids = {"logprobs": LOGPROBS, "old_logprobs": OLD, "advantages": ADVANTAGES, "sampler_logprobs": SAMPLER}
    poisoned = {name: torch.where(MASK, grid, garbage) for name, grid in grids.items()}
    poisoned["logprobs"].requires_grad_()
    losses = loss("unclamped").losses(inputs(**poisoned))
    losses.sum().backward()
    assert poisoned["logprobs"].grad is not None
    assert bool(losses.isfinite().all())
    assert bool(poisoned["logprobs"].grad.isfinite().all())
    assert not bool(poisoned["logprobs"].grad[0, 1])


def test_python_copy_of_the_clip_loss_equals_the_clip_loss() -> None:
    mine, ours = inputs(), inputs()
    losses = [loss("clip", high=0.5).losses(mine), PolicyClip(0.2, 0.5, None).losses(ours)]
    for each in losses:
        each.sum().backward()
    EXACT.check(losses[0].detach(), losses[1].detach())
    EXACT.check(mine.logprobs.grad, ours.logprobs.grad)
    assert (mine.old_logprobs.requires_grad, mine.advantages.requires_grad) == (False, False)


def test_function_receives_the_mask_which_may_be_empty() -> None:
    EXACT.check(loss("times_tokens").losses(inputs()).detach(), 5 * loss("clip").losses(inputs()).detach())
    empty = loss("times_tokens").losses(inputs(mask=torch.zeros_like(MASK)))
    assert (empty.count_nonzero(), empty.requires_grad) == (0, False)


def test_current_logprobs_as_old_ones_carry_no_gradient() -> None:
    given = inputs()
    losses = loss("clip").losses(inputs(logprobs=given.logprobs, old_logprobs=given.logprobs))
    losses.sum().backward()
    EXACT.check(given.logprobs.grad, torch.where(MASK, -ADVANTAGES, 0.0))


WRONG: Mapping[str, str] = {
    "raises": r"it failed: RuntimeError: The size of tensor a \(3\) must match .* "
    r"\(users_training.py:28, in `raises`: `return batch.logprobs \+ torch.zeros\(7, 7\)`\)",
    "no_gradient": r"it returned losses without a gradient: compute them from `logprobs`, without `detach`, `item` ",
    "one_number": r"it returned a tensor of shape \[\] as losses; the shape must be \[2, 3\]",
    "a_list": r"it returned a list as losses; it must be a tensor of floats of shape \[2, 3\]",
    "whole_numbers": r"it returned a tensor of torch.int64 as losses; it must be a tensor of floats of shape \[2, 3",
    "three": r"it returned a tuple of 3; it must return losses, or \(losses, metrics\)",
    "misnamed": r"it returned a metric named `per token`: a name consists of letters, digits and underscores",
    "metric_of_rows": r"it returned a tensor of shape \[2\] as `mean`; the shape must be \[2, 3\]",
    "two_arguments": r"it failed: TypeError: `two_arguments\(batch, other\)` is called with a `PolicyLossInputs` "
    r"alone: missing a required argument: 'other'$",
    "missing": r"it cannot be imported: AttributeError: `.*users_training.py` has no `missing`; it defines a_l",
}


@pytest.mark.parametrize("name", WRONG)
def test_error_of_a_loss_names_function_and_reason(name: str) -> None:
    with pytest.raises(RecipeError, match=WRONG[name]) as caught:
        loss(name).losses(inputs())
    assert caught.value.message.startswith(f"`ppo.policy_loss.function` is `{FILE}:{name}`: ")
    hint = (
        f"python -m ppoctl.core.user_functions {FILE}:{name}"
        if name == "missing"
        else "ppoctl validate RECIPE --loss"
    )
    assert (caught.value.hint, caught.value.exit_code) == (hint, 2)
    pickle.loads(pickle.dumps(caught.value))


def test_loss_that_is_not_finite_names_the_first_token() -> None:
    # A is -1 at token 2 of row 0 and at token 1 of row 1.
    with pytest.raises(NonFiniteError) as caught:
        loss("not_finite").losses(inputs())
    assert caught.value.message.endswith(
        "it returned `-inf` as the loss of token 2 of row 0 (2 of 5 tokens are not finite)"
    )
    assert caught.value.exit_code == 5


def test_only_the_name_of_a_loss_is_sent_to_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "other.py"
    sent = pickle.dumps(loss("ours", file=file))
    file.write_text("def ours(batch):\n    return 2 * batch.logprobs\n")  # imported at the first call only
    EXACT.check(pickle.loads(sent).losses(inputs()).detach(), torch.where(MASK, 2 * LOGPROBS, 0.0))


def test_file_that_differs_from_the_recipe_is_not_called(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def ours(batch):\n    return batch.logprobs\n")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    table = PythonPolicyLoss(kind="python", function=f"{file}:ours", digest=digest)
    table.called.require_there()
    file.write_text("def ours(batch):\n    return -batch.logprobs\n")
    says = f"the `ppo.policy_loss` function has changed: `{file}` differs from the file that the recipe was read with"
    for call in (table.called.require_there, lambda: table.build().losses(inputs())):
        with pytest.raises(RecipeError, match=re.escape(says)) as caught:
            call()
        setting = f"ppo.policy_loss.function={file}:ours"
        assert caught.value.hint == f"restore the file, or accept it: `ppoctl resume RUN --set {setting}`"
    file.unlink()
    with pytest.raises(MissingAssetError, match="does not exist"):
        table.called.require_there()


# --- estimators -----------------------------------------------------------------------------------------------------


def advantages(name: str, **keys: Any) -> PythonAdvantages:
    return PythonAdvantages(kind="python", function=f"{FILE}:{name}", **keys)


def test_estimator_receives_the_whole_step() -> None:
    # Scores 2.5 and 1 of one prompt: torch's median is the lower one, 1. The last token of row 0 is masked out.
    table = advantages("median", options={"scale": 2.0})
    found = table.estimator()(replace(INPUTS, scores=torch.tensor([2.5, 1.0])))
    EXACT.check(found.advantages, torch.tensor([[3.0, 3.0, 0.0], [0.0, 0.0, 0.0]]))
    assert (found.returns, found.metrics) == (None, {"advantage/custom_baseline": 1.0})
    assert (table.trains_critic, table.reads_values, table.whiten, table.compares_groups) == (False,) * 4


def test_estimator_with_a_critic_returns_what_it_learns() -> None:
    table = advantages("rewards_to_go", trains_critic=True)
    found = table.estimator()(INPUTS)
    # Rewards 0, 1 and 0.5, 0, 2; values 0.2, 0.4 and 0.1, 0.3, 0.7. The last token of row 0 is masked out.
    FLOAT32.check(found.returns, torch.tensor([[1.0, 1.0, 0.0], [2.5, 2.0, 2.0]]))
    FLOAT32.check(found.advantages, torch.tensor([[0.8, 0.6, 0.0], [2.4, 1.7, 1.3]]))
    assert found.metrics == {"advantage/custom_words": 3.0}
    assert (table.trains_critic, table.reads_values) == (True, True)


@pytest.mark.parametrize(
    ("name", "keys", "says"),
    [
        (
            "median",
            {"trains_critic": True},
            r"it returned a dict as returns; it must be a tensor of floats",
        ),
        ("rewards_to_go", {}, r"it returned a tuple of 3; it must return advantages, or \(advantages, metrics\)"),
        ("one_number", {}, r"it failed: AttributeError: .* \(users_training.py:36, in `one_number`: "),
        ("infinite_metric", {}, r"it returned `inf` as `ratio`, which is not a finite number"),
        ("word_metric", {}, r"it returned `high` as `ratio`, which is not a finite number"),
    ],
)
def test_error_of_an_estimator_names_function_and_reason(name: str, keys: dict[str, Any], says: str) -> None:
    with pytest.raises(RecipeError, match=says) as caught:
        advantages(name, **keys).estimator()(INPUTS)
    assert caught.value.message.startswith(f"`ppo.advantages.function` is `{FILE}:{name}`: ")


def test_function_of_a_module_is_called_with_the_argument() -> None:
    assert TrainingFunction("key", "math:sqrt", {}, "")(4.0) == 2.0
