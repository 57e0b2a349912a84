"""Random masks with holes, and garbage for masked positions."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ppoctl.algorithms.formulas.estimator import EstimatorInputs
from ppoctl.algorithms.formulas.policy_loss import PolicyLossInputs

GARBAGE = (float("nan"), float("inf"), -float("inf"), 1e30)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def holey_mask(num_rows: int, num_columns: int, *, seed: int) -> Tensor:
    """Return a mask that is True at 7 of 10 positions, with holes and ragged ends; always True in the first
    column."""
    mask = torch.rand(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[:, 0] = True
    return mask


def poisoned(x: Tensor, mask: Tensor, garbage: float) -> Tensor:
    """Return x with garbage where the mask is False."""
    return torch.where(mask, x, torch.tensor(garbage, dtype=x.dtype))


def policy_inputs(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLossInputs:
    """Return the inputs of a policy loss that does not read the sampler's log-probs."""
    return PolicyLossInputs(logprobs, old_logprobs, advantages, mask, sampler_logprobs=old_logprobs)


def estimator_inputs(
    scores: Tensor,
    valid: Tensor,
    groups: Tensor,
    mask: Tensor,
    *,
    components: Mapping[str, Tensor] | None = None,
    weights: Mapping[str, float] | None = None,
) -> EstimatorInputs:
    """Return the inputs of an estimator that reads neither rewards of tokens nor values."""
    return EstimatorInputs(
        token_rewards=torch.zeros(mask.shape),
        values=None,
        mask=mask,
        scores=scores,
        valid=valid,
        groups=groups,
        prompt_ids=[f"prompt {index}" for index in groups.tolist()],
        lengths=mask.sum(dim=1),
        truths=[None] * len(groups),
        extras={name: column.tolist() for name, column in (components or {}).items()},
        weights=weights or {},
    )
