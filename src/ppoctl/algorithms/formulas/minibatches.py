"""Split of a step's rows into minibatches."""

import torch
from jaxtyping import Int64
from torch import Tensor


def minibatch_rows(num_seqs: int, minibatch_seqs: int, *, seed: int | None) -> tuple[Int64[Tensor, " M"], ...]:
    """Return the rows of each minibatch: a permutation of 0 .. num_seqs - 1, split into parts of `minibatch_seqs`.
    Rows are in order if seed is None.

    The last part is smaller if the step has fewer rows than the recipe plans, which only dynamic sampling allows. (If
    several steps generate a response, `MinibatchPlan` chooses the size of the parts.) The permutation depends only on
    the seed: the global random-number generator is neither read nor advanced.
    """
    if num_seqs < 1 or minibatch_seqs < 1:
        raise ValueError(f"{num_seqs} sequences do not divide into minibatches of {minibatch_seqs}")
    order = torch.arange(num_seqs)
    if seed is not None:
        order = torch.randperm(num_seqs, generator=torch.Generator().manual_seed(seed))
    return tuple(order[start : start + minibatch_seqs] for start in range(0, num_seqs, minibatch_seqs))
