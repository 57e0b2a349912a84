"""The trial of `validate --loss`: every kind of loss passes, and each fault of a user's function has its sentence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from own_loss_page import written
from ppoctl.algorithms.estimators.grpo import GrpoAdvantages
from ppoctl.algorithms.estimators.kinds import ESTIMATORS
from ppoctl.algorithms.estimators.python import PythonAdvantages
from ppoctl.algorithms.formulas.aggregation import AggregationKind
from ppoctl.algorithms.formulas.policy_loss import PolicyLoss
from ppoctl.algorithms.stages.estimator_trial import random_step, try_estimator
from ppoctl.algorithms.stages.loss_on_batch import COLUMNS, ROWS, random_inputs, try_loss
from ppoctl.algorithms.stages.loss_tables import CispoLoss, ClippedLoss, GspoLoss, PythonPolicyLoss, ReinforceLoss
from ppoctl.core.finding import Finding

FILE = Path(__file__).with_name("users_training.py")
KINDS = {
    "clip": ClippedLoss(dual_clip=3.0),
    "gspo": GspoLoss(kind="gspo", ratio_gradient="sequence", clip_low=0.1, clip_high=0.2),
    "gspo by token": GspoLoss(kind="gspo", clip_low=0.1, clip_high=0.2),
    "cispo": CispoLoss(kind="cispo"),
    "reinforce": ReinforceLoss(kind="reinforce"),
}
IN_DIRECTION = "of the tokens in the direction of their advantage"
ALL_OF_A_LOSS = 9
ALL_OF_AN_ESTIMATOR = 4


def own(name: str, file: Path = FILE, *, needs_entropy: bool = False, **options: Any) -> PolicyLoss:
    function = f"{file}:{name}"
    return PythonPolicyLoss(kind="python", function=function, options=options, needs_entropy=needs_entropy).build()


def faults(checks: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(check.level, check.what) for check in checks if check.level != "ok"]


@pytest.mark.parametrize("aggregation", get_args(AggregationKind))
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_loss_passes_every_check(kind: str, aggregation: AggregationKind) -> None:
    checks = try_loss(KINDS[kind].build(), aggregation)
    assert (faults(checks), len(checks)) == ([], ALL_OF_A_LOSS)


def test_right_losses_of_a_user_pass_every_check(tmp_path: Path) -> None:
    sapo = try_loss(own("loss", written(tmp_path, "my_loss.py")), "sequence_mean_token_mean")
    assert (faults(sapo), len(sapo)) == ([], ALL_OF_A_LOSS)
    assert sapo[0].what == "losses are finite numbers of shape [8, 12]; metric `policy/custom_weight`"
    assert (
        sapo[-1].what
        == "a first update moves the log-probs of 100% of the tokens in the direction of their advantage"
    )
    with_entropy = try_loss(own("every_grid", needs_entropy=True), "token_mean")
    assert (faults(with_entropy), len(with_entropy)) == ([], ALL_OF_A_LOSS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("other_rows", "the gradient differs in 2 and 4 microbatches: the loss of a row depends on other rows"),
        ("by_width", "5 columns of padding change the gradient: the loss depends on the width of the grid"),
        ("random", "a second call returns other numbers"),
        ("constant", "every gradient is 0: the loss does not depend on the log-probs"),
        ("no_gradient", f"`ppo.policy_loss.function` is `{FILE}:no_gradient`: it returned losses without a gradient: "
         "compute them from `logprobs`, without `detach`, `item` or numpy"),
    ],
)  # fmt: skip
def test_fault_of_a_loss_is_found(name: str, expected: str) -> None:
    found = faults(try_loss(own(name), "token_mean"))
    assert ("error", expected) in found
    assert len(found) == 1 or name in ("random", "other_rows")


def test_loss_of_the_wrong_sign_is_a_warning() -> None:
    says = f"a first update moves the log-probs of 0% {IN_DIRECTION}: check the sign of the loss"
    assert faults(try_loss(own("ascent"), "token_mean")) == [("warning", says)]


def test_random_inputs_have_what_a_loss_must_bear() -> None:
    inputs = random_inputs(needs_entropy=False)
    lengths = inputs.mask.sum(1).tolist()
    assert (inputs.mask.shape, lengths[1:3], inputs.entropy) == ((ROWS, COLUMNS), [1, 0], None)
    holes = inputs.mask[:, 1:] & ~inputs.mask[:, :-1]
    assert bool(holes.any())
    log_ratio = inputs.logprobs - inputs.old_logprobs
    assert float(log_ratio.abs().max()) > 1
    assert bool((inputs.advantages > 0).any() & (inputs.advantages < 0).any())
    for name in ("logprobs", "old_logprobs", "advantages", "sampler_logprobs"):
        torch.testing.assert_close(getattr(random_inputs(needs_entropy=True), name), getattr(inputs, name))


# --- estimators -----------------------------------------------------------------------------------------------------


def own_estimator(name: str, file: Path = FILE, *, samples: int = 3, **keys: Any) -> tuple[Finding, ...]:
    table = PythonAdvantages(kind="python", function=f"{file}:{name}", **keys)
    return try_estimator(table.estimator(), samples=samples, has_values=table.reads_values)


def test_right_estimators_of_a_user_pass_every_check(tmp_path: Path) -> None:
    checks = own_estimator("estimate", written(tmp_path, "my_estimator.py"))
    assert (faults(checks), len(checks)) == ([], ALL_OF_AN_ESTIMATOR)
    assert checks[0].what == "advantages are finite numbers of shape [12, 12]; metric `advantage/custom_baseline`"
    for samples in (1, 2, 8):
        assert faults(own_estimator("estimate", tmp_path / "my_estimator.py", samples=samples)) == []
    # Sums over the rest of the response read the last columns first, and differ by rounding only.
    with_critic = own_estimator("rewards_to_go", trains_critic=True)
    assert (faults(with_critic), len(with_critic)) == ([], ALL_OF_AN_ESTIMATOR + 1)


def test_estimator_that_reads_the_order_of_rows_is_found() -> None:
    says = "the advantages depend on the order of the prompts, or of the responses to a prompt"
    assert faults(own_estimator("by_rank")) == [("error", says)]


def test_trial_of_an_estimator_fits_the_estimators_that_need_nothing_else() -> None:
    assert GrpoAdvantages in ESTIMATORS
    checks = try_estimator(GrpoAdvantages(kind="grpo").estimator(), samples=3, has_values=False)
    assert faults(checks) == []
    step = random_step(3, has_values=True)
    assert not step.mask[~step.valid].any()
    assert step.groups.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert step.values is not None
    assert step.values.isfinite().all()
    assert not step.values[~step.mask].any()
    torch.testing.assert_close(step.token_rewards.sum(1), step.scores * step.mask.any(1))
