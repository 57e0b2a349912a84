"""Trial of the policy loss on random responses before a run (`validate --loss`).

The trial computes the gradient of the actor's update with respect to the log-probs, as a trainer does, and checks
what training relies on: a loss reads only its own row and its unmasked tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ppoctl.algorithms.formulas.aggregation import AggregationKind, aggregation
from ppoctl.algorithms.formulas.policy_loss import PolicyLoss, PolicyLossInputs
from ppoctl.algorithms.stages.actor_update import Surrogate
from ppoctl.algorithms.stages.objective import Term, Terms
from ppoctl.core.errors import PpoctlError
from ppoctl.core.finding import Finding, ok, problem, warning
from ppoctl.core.ports import TokenOutputs

ROWS, COLUMNS = 8, 12
"""Number of responses, and of tokens of the longest response."""
MICROBATCHES = (1, 2, 4)
PADDING = 5
"""Number of columns that are added at the end of the grid."""
ROUNDING = 1e-4
"""Largest relative difference that counts as rounding."""


@dataclass(frozen=True)
class _Case:
    """A loss with inputs, and how its token losses are aggregated."""

    loss: PolicyLoss
    inputs: PolicyLossInputs
    aggregation: AggregationKind

    def gradient(self, microbatches: int = 1) -> Float[Tensor, "b R"]:
        """Return the gradient of the minibatch's loss with respect to the log-probs, and to the entropies if the loss
        reads them, next to each other."""
        inputs, rows = self.inputs, torch.arange(ROWS)
        logprobs = inputs.logprobs.clone().requires_grad_()
        entropy = torch.ones_like(logprobs) if inputs.entropy is None else inputs.entropy.clone()
        entropy.requires_grad_()
        surrogate = Surrogate(inputs.old_logprobs, inputs.advantages, self.loss, inputs.sampler_logprobs)
        how = aggregation(self.aggregation, max_new_tokens=COLUMNS)
        objective = Terms((Term(surrogate, inputs.mask, aggregation=how),))
        totals = objective.totals(rows)
        for part in rows.chunk(microbatches):
            objective(part, TokenOutputs(logprobs[part], entropy[part]), totals).backward()  # type: ignore[no-untyped-call]
        grids = [torch.zeros_like(x) if x.grad is None else x.grad for x in (logprobs, entropy)]
        return torch.cat(grids[: 1 if inputs.entropy is None else 2], dim=1)


def try_loss(loss: PolicyLoss, kind: AggregationKind) -> tuple[Finding, ...]:
    """Return the checks of a policy loss. The first check that cannot be made ends the trial."""
    checks = []
    case = _Case(loss, random_inputs(needs_entropy=loss.needs_entropy), kind)
    try:
        for check in _checks(case):
            checks.append(check)
    except PpoctlError as error:
        checks.append(problem(error.message, kind="loss"))
    return tuple(checks)


def _checks(case: _Case) -> Iterator[Finding]:
    whole, inputs = case.gradient(), case.inputs
    unmasked = inputs.mask.repeat(1, whole.shape[1] // COLUMNS)
    metrics = "".join(f"; metric `policy/{name}`" for name in case.loss.metrics(inputs))
    yield ok(f"losses are finite numbers of shape {[ROWS, COLUMNS]}{metrics}", kind="loss")
    yield _of(bool(whole.isfinite().all()), "gradients are finite", "gradients are not finite")
    some = bool(whole.any())
    yield _of(some, "the log-probs have a gradient", "every gradient is 0: the loss does not depend on the log-probs")
    yield _of(same(whole, case.gradient()), "a second call returns the same", "a second call returns other numbers")
    differing = [str(count) for count in MICROBATCHES if not same(whole, case.gradient(count))]
    yield _of(
        not differing,
        f"the gradient is the same in {', '.join(map(str, MICROBATCHES[:-1]))} and {MICROBATCHES[-1]} microbatches",
        f"the gradient differs in {' and '.join(differing)} microbatches: the loss of a row depends on other rows",
    )
    is_blank = not bool(whole[~unmasked].any())
    yield _of(is_blank, "masked-out tokens have no gradient", "masked-out tokens have a gradient")
    other = replace(case, inputs=_with_other_masked(inputs))
    yield _of(
        same(whole, other.gradient()),
        "masked-out numbers change no gradient",
        "masked-out numbers change the gradient of other tokens",
    )
    padded = replace(case, inputs=_padded(inputs)).gradient()
    padded = torch.cat([grid[:, :COLUMNS] for grid in torch.split(padded, COLUMNS + PADDING, dim=1)], dim=1)
    yield _of(
        same(whole, padded),
        "padding changes no gradient",
        f"{PADDING} columns of padding change the gradient: the loss depends on the width of the grid",
    )
    yield _direction(case)


def _direction(case: _Case) -> Finding:
    """Compare the signs of gradient and advantage before the first update, where every ratio is 1."""
    inputs = replace(case.inputs, logprobs=case.inputs.old_logprobs)
    gradient = replace(case, inputs=inputs).gradient()[:, :COLUMNS]
    moved = gradient != 0
    share = float((gradient * inputs.advantages < 0)[moved].float().mean()) if bool(moved.any()) else 1.0
    says = f"a first update moves the log-probs of {share:.0%} of the tokens in the direction of their advantage"
    return ok(says, kind="loss") if share > 0.5 else warning(f"{says}: check the sign of the loss", kind="loss")


def _of(is_ok: bool, good: str, wrong: str) -> Finding:  # noqa: FBT001 - the condition of the sentence
    return ok(good, kind="loss") if is_ok else problem(wrong, kind="loss")


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    scale = float(one.abs().max())
    return one.shape == other.shape and torch.allclose(one, other, rtol=ROUNDING, atol=ROUNDING * scale)


def random_inputs(*, needs_entropy: bool) -> PolicyLossInputs:
    """Return the same random inputs in every call: holes, a response of one token, a response that is masked out, and
    a few log-ratios above 1 nat."""
    generator = torch.Generator().manual_seed(1)

    def normal() -> Tensor:
        return torch.randn(ROWS, COLUMNS, generator=generator)

    mask = random_mask(ROWS, generator)
    old = -normal().abs() - 0.1
    return PolicyLossInputs(
        logprobs=(old + 0.5 * normal()) * mask,
        old_logprobs=old * mask,
        advantages=normal() * mask,
        mask=mask,
        sampler_logprobs=(old + 0.1 * normal()) * mask,
        entropy=normal().abs() * mask if needs_entropy else None,
    )


def random_mask(rows: int, generator: torch.Generator) -> Tensor:
    """Return a mask with holes and ragged ends. Row 1 has one token, and row 2 has none."""
    lengths = torch.randint(COLUMNS // 2, COLUMNS + 1, (rows, 1), generator=generator)
    mask = torch.rand(rows, COLUMNS, generator=generator) < 0.8
    mask[:, 0] = True
    mask &= torch.arange(COLUMNS) < lengths
    mask[1, 1:], mask[2] = False, False
    return mask


def _with_other_masked(inputs: PolicyLossInputs) -> PolicyLossInputs:
    def other(grid: Tensor) -> Tensor:
        return torch.where(inputs.mask, grid, -3.0)

    return replace(inputs, **{name: other(grid) for name, grid in _grids(inputs).items()})


def _padded(inputs: PolicyLossInputs) -> PolicyLossInputs:
    grids = {**_grids(inputs), "mask": inputs.mask}
    return replace(inputs, **{name: torch.nn.functional.pad(grid, (0, PADDING)) for name, grid in grids.items()})


def _grids(inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return all grids of numbers that are present, by name."""
    grids = {name: value for name, value in vars(inputs).items() if name != "mask"}
    return {name: grid for name, grid in grids.items() if grid is not None}
