"""How the rows of a minibatch become microbatches, and how per-microbatch outputs become one grid again.

Letters: M rows of the minibatch, m rows of a microbatch, R response positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ppoctl.batch.grid import Packed, input_lengths, pack
from ppoctl.batch.packing import by_sequences, by_tokens
from ppoctl.batch.records import Rollouts
from ppoctl.engines.megatron.packed_input import PackedInput, packed_input
from ppoctl.errors import RecipeError
from ppoctl.recipe.schema import BySequences, ByTokens


@dataclass(frozen=True)
class Microbatch:
    """Some rows, ready for the model."""

    rows: Int[Tensor, " m"]
    """Rows of the rollouts."""
    places: Int[Tensor, " m"]
    """Where those rows stand in the minibatch."""
    packed: Packed
    input: PackedInput


@dataclass(frozen=True)
class Cut:
    """How to cut: the recipe's batching, and what the output layer is asked."""

    batching: BySequences | ByTokens
    device: torch.device
    temperature: float = 1.0
    with_entropy: bool = False


def cut_rows(rollouts: Rollouts, rows: Int[Tensor, " M"], cut: Cut) -> list[Microbatch]:
    """The rows as microbatches. Raises RecipeError when one sequence alone exceeds the token cap."""
    places = torch.arange(len(rows))
    if isinstance(cut.batching, BySequences):
        groups = by_sequences(places, cut.batching.microbatch_seqs)
    else:
        cap = cut.batching.max_tokens_per_microbatch
        try:
            groups = by_tokens(places, input_lengths(rollouts)[rows], cap)
        except ValueError as error:
            hint = "raise `batching.max_tokens_per_microbatch` or lower `rollout.max_new_tokens`"
            raise RecipeError(f"`batching.max_tokens_per_microbatch = {cap}`: {error}", hint=hint) from error
    return [_microbatch(rollouts, rows, group, cut) for group in groups]


def _microbatch(rollouts: Rollouts, rows: Tensor, places: Tensor, cut: Cut) -> Microbatch:
    packed = pack(rollouts, rows[places])
    given = packed_input(packed, cut.device, temperature=cut.temperature, with_entropy=cut.with_entropy)
    return Microbatch(rows[places], places, packed, given)


def gather_grids(microbatches: Sequence[Microbatch], grids: Sequence[Float[Tensor, "_ R"]]) -> Float[Tensor, "M R"]:
    """The microbatches' grids as one, rows in the minibatch's order."""
    places = torch.cat([microbatch.places for microbatch in microbatches])
    return torch.cat(list(grids))[torch.argsort(places)]
