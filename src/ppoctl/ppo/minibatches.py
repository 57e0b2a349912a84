"""Which rows are in which minibatch."""

import torch
from jaxtyping import Int64
from torch import Tensor


def minibatch_rows(num_seqs: int, minibatch_seqs: int, *, seed: int | None) -> tuple[Int64[Tensor, " M"], ...]:
    """The rows of each minibatch: a permutation of 0 .. num_seqs - 1, or without a seed these in order, cut into
    equal parts.

    The permutation depends on the seed alone: the global generator is neither read nor moved.
    Raises ValueError when minibatch_seqs does not divide num_seqs: a smaller last minibatch would be an optimizer
    step of its own weight.
    """
    if num_seqs < 1 or minibatch_seqs < 1 or num_seqs % minibatch_seqs != 0:
        raise ValueError(f"{num_seqs} sequences do not divide into minibatches of {minibatch_seqs}")
    order = torch.arange(num_seqs)
    if seed is not None:
        order = torch.randperm(num_seqs, generator=torch.Generator().manual_seed(seed))
    return tuple(order[start : start + minibatch_seqs] for start in range(0, num_seqs, minibatch_seqs))
