"""How the rows of a minibatch become microbatches of one rank, and how what ranks say becomes one grid again.

Letters: M rows of the minibatch, m rows of a microbatch, R response positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ppoctl.batch.balance import balance, sequence_costs
from ppoctl.batch.grid import Packed, input_lengths, pack
from ppoctl.batch.packing import by_sequences, by_tokens
from ppoctl.batch.sequences import Sequences
from ppoctl.engines.megatron.packed_input import PackedInput, ReadSettings, packed_input
from ppoctl.errors import RecipeError
from ppoctl.model.cost import TokenCost
from ppoctl.ports import TokenOutputs, concatenate_outputs
from ppoctl.recipe.schema import BySequences, ByTokens
from ppoctl.recipe.sizes import microbatch_limit


@dataclass(frozen=True)
class Microbatch:
    """Some rows, ready for the model."""

    rows: Int[Tensor, " m"]
    """Rows of the sequences."""
    places: Int[Tensor, " m"]
    """Where those rows stand in the minibatch."""
    packed: Packed
    input: PackedInput

    @property
    def is_idle(self) -> bool:
        """It has no rows of the minibatch: a rank without work computes along where others wait for it."""
        return len(self.rows) == 0


@dataclass(frozen=True)
class RankOutputs:
    """What one data-parallel rank says about its rows of a minibatch, on the CPU."""

    places: Int[Tensor, " m"]
    """Where those rows stand in the minibatch."""
    said: TokenOutputs


@dataclass(frozen=True)
class MicrobatchPlan:
    """How a minibatch is cut: over the data-parallel ranks, and on each by the recipe's batching."""

    batching: BySequences | ByTokens
    reading: ReadSettings
    cost: TokenCost
    """What a sequence costs by its length; decides which rank gets which rows."""
    rank: int = 0
    """Rank of this process among the data-parallel ones."""
    ranks: int = 1
    count_multiple: int = 0
    """All ranks get the same number of microbatches, a multiple of this one; 0: each as many as it needs."""
    with_gradient: bool = True
    """False: the larger microbatches that fit where none is kept."""


def cut_rows(sequences: Sequences, rows: Int[Tensor, " M"], cut: MicrobatchPlan) -> list[Microbatch]:
    """This rank's rows as microbatches, at least one. Raises RecipeError when a sequence alone exceeds the token cap.

    Every rank works out the split of all of them by itself: it is a function of the lengths.
    """
    tokens = input_lengths(sequences)[rows]
    groups = _groups_of_rank(tokens, cut)
    idle = [torch.zeros(0, dtype=torch.int64)] * (max(1, _common_count(tokens, cut)) - len(groups))
    return [_microbatch(sequences, rows, group, cut) for group in [*groups, *idle]]


def _groups_of_rank(tokens: Int[Tensor, " M"], cut: MicrobatchPlan) -> list[Tensor]:
    places = _split(tokens, cut)[cut.rank]
    return _groups(places, tokens, cut, at_least=min(len(places), _common_count(tokens, cut)))


def _common_count(tokens: Int[Tensor, " M"], cut: MicrobatchPlan) -> int:
    """Microbatches that every data rank must have; 0: each as many as it needs."""
    if not cut.count_multiple:
        return 0
    most = max(len(_groups(places, tokens, cut)) for places in _split(tokens, cut))
    return -(-most // cut.count_multiple) * cut.count_multiple


def _split(tokens: Int[Tensor, " M"], cut: MicrobatchPlan) -> list[Int[Tensor, " m"]]:
    """Places of the minibatch by data rank, so that all have about the same to compute."""
    if cut.ranks == 1:
        return [torch.arange(len(tokens))]
    return balance(sequence_costs(tokens, cut.cost), cut.ranks)


def _groups(places: Tensor, tokens: Tensor, cut: MicrobatchPlan, *, at_least: int = 0) -> list[Tensor]:
    key, most = microbatch_limit(cut.batching, with_gradient=cut.with_gradient)
    if isinstance(cut.batching, BySequences):
        return by_sequences(places, most, at_least=at_least)
    try:
        return by_tokens(places, tokens[places], most, at_least=at_least)
    except ValueError as error:
        hint = f"raise `batching.{key}` or lower `rollout.max_new_tokens`"
        raise RecipeError(f"`batching.{key} = {most}`: {error}", hint=hint) from error


def _microbatch(sequences: Sequences, rows: Tensor, places: Tensor, cut: MicrobatchPlan) -> Microbatch:
    # An idle microbatch runs the first row: something has to go through the model.
    packed = pack(sequences, rows[places] if len(places) else rows[:1])
    return Microbatch(rows[places], places, packed, packed_input(packed, cut.reading))


def merge(shares: Sequence[RankOutputs]) -> TokenOutputs:
    """What all data-parallel ranks say, rows in the minibatch's order."""
    order = torch.argsort(torch.cat([share.places for share in shares]))
    return concatenate_outputs([share.said for share in shares]).map(lambda grid: grid[order])
