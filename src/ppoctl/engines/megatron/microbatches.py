"""Splitting the rows of a minibatch into microbatches of one rank, and merging the outputs of ranks into one grid.

Letters: M rows of the minibatch, m rows of a microbatch, R response positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.algorithms.sizes import microbatch_limit
from ppoctl.core.batch.grid import Packed, pack
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.errors import RecipeError
from ppoctl.core.ports import TokenOutputs, concatenate_outputs
from ppoctl.engines.megatron.balance import balance, sequence_costs
from ppoctl.engines.megatron.packed_input import PackedInput, ReadSettings, packed_input
from ppoctl.engines.megatron.packing import by_sequences, by_tokens
from ppoctl.models.cost import TokenCost


@dataclass(frozen=True)
class Microbatch:
    """Rows of a minibatch that the model processes together."""

    rows: Int[Tensor, " m"]
    """Rows of the sequences."""
    places: Int[Tensor, " m"]
    """Indices of these rows in the minibatch."""
    packed: Packed
    input: PackedInput

    @property
    def is_idle(self) -> bool:
        """Whether the microbatch has no rows of the minibatch: a rank without rows still computes if other ranks wait
        for it."""
        return len(self.rows) == 0


@dataclass(frozen=True)
class RankOutputs:
    """Outputs of one data rank for its rows of a minibatch, on the CPU."""

    places: Int[Tensor, " m"]
    """Indices of these rows in the minibatch."""
    outputs: TokenOutputs


@dataclass(frozen=True)
class RankStepResult:
    """One rank's result of an optimizer step."""

    loss: float
    """Loss of the complete minibatch."""
    grad_norm: float
    """2-norm of the complete gradient, before clipping."""
    share: RankOutputs | None
    """Outputs, on the first tensor and context rank of the last pipeline stage. None on other ranks."""
    merge_error: float | None = None
    """See `MinibatchResult`."""


@dataclass(frozen=True)
class RankExperts:
    """Experts that the routers of one rank chose, on the CPU."""

    at: Int[Tensor, " N"]
    """Index of each token that the rank routed among the input tokens of all sequences."""
    chosen: dict[int, Int[Tensor, "N k"]]
    """Layers with experts of this rank, counted over the model -> experts of each token; int16."""


@dataclass(frozen=True)
class MicrobatchPlan:
    """How a minibatch is split over the data ranks, and on each rank into microbatches."""

    batching: BySequences | ByTokens
    reading: ReadSettings
    cost: TokenCost
    """Cost of a sequence by its length. The costs decide which rank gets which rows."""
    rank: int = 0
    """Data rank of this process."""
    ranks: int = 1
    count_multiple: int = 0
    """All ranks get the same number of microbatches, which is a multiple of this number. 0: each rank gets as many
    microbatches as it needs."""
    with_gradient: bool = True
    """Whether a gradient is computed. Without a gradient, larger microbatches fit into memory."""


def cut_rows(sequences: Sequences, rows: Int[Tensor, " M"], cut: MicrobatchPlan) -> list[Microbatch]:
    """Return this rank's rows as microbatches; there is at least one microbatch. Raises RecipeError if a single
    sequence exceeds the token limit.

    Every rank computes the split for all ranks: the split depends only on the lengths.
    """
    tokens = sequences.input_lengths[rows]
    groups = _groups_of_rank(tokens, cut)
    idle = [torch.zeros(0, dtype=torch.int64)] * (max(1, _common_count(tokens, cut)) - len(groups))
    return [_microbatch(sequences, rows, group, cut) for group in [*groups, *idle]]


def _groups_of_rank(tokens: Int[Tensor, " M"], cut: MicrobatchPlan) -> list[Tensor]:
    places = _split(tokens, cut)[cut.rank]
    return _groups(places, tokens, cut, at_least=min(len(places), _common_count(tokens, cut)))


def _common_count(tokens: Int[Tensor, " M"], cut: MicrobatchPlan) -> int:
    """Return the number of microbatches that every data rank must have. 0: each rank has as many as it needs."""
    if not cut.count_multiple:
        return 0
    largest = max(len(_groups(places, tokens, cut)) for places in _split(tokens, cut))
    return -(-largest // cut.count_multiple) * cut.count_multiple


def _split(tokens: Int[Tensor, " M"], cut: MicrobatchPlan) -> list[Int[Tensor, " m"]]:
    """Return, for each data rank, the indices of its rows in the minibatch. The ranks get about equal costs."""
    if cut.ranks == 1:
        return [torch.arange(len(tokens))]
    return balance(sequence_costs(tokens, cut.cost), cut.ranks)


def _groups(places: Tensor, tokens: Tensor, cut: MicrobatchPlan, *, at_least: int = 0) -> list[Tensor]:
    key, limit = microbatch_limit(cut.batching, with_gradient=cut.with_gradient)
    if isinstance(cut.batching, BySequences):
        return by_sequences(places, limit, at_least=at_least)
    try:
        return by_tokens(places, tokens[places], limit, at_least=at_least)
    except ValueError as error:
        hint = f"raise `batching.{key}` or lower `rollout.max_new_tokens`"
        raise RecipeError(f"`batching.{key} = {limit}`: {error}", hint=hint) from error


def _microbatch(sequences: Sequences, rows: Tensor, places: Tensor, cut: MicrobatchPlan) -> Microbatch:
    # An idle microbatch runs the first row: collectives inside the model would hang if this rank ran nothing.
    packed = pack(sequences, rows[places] if len(places) else rows[:1])
    minibatch_seqs = len(rows) if cut.with_gradient and len(places) else 0
    model_input = packed_input(packed, cut.reading, sequences.experts, minibatch_seqs)
    return Microbatch(rows[places], places, packed, model_input)


def merge(shares: Sequence[RankOutputs]) -> TokenOutputs:
    """Return the outputs of all data ranks, with rows in the minibatch's order."""
    order = torch.argsort(torch.cat([outputs.places for outputs in shares]))
    return concatenate_outputs([outputs.outputs for outputs in shares]).map(lambda grid: grid[order])


def merge_experts(parts: Sequence[RankExperts]) -> Int[Tensor, "N E"]:
    """Return the experts of all input tokens, from all ranks that routed them."""
    by_layer = [(part.at, layer, chosen) for part in parts for layer, chosen in part.chosen.items()]
    shape = (
        1 + max(int(at.max()) for at, _, _ in by_layer),
        1 + max(layer for _, layer, _ in by_layer),
        by_layer[0][2].shape[1],
    )
    merged = torch.full(shape, -1, dtype=torch.int16)
    for at, layer, chosen in by_layer:
        merged[at, layer] = chosen
    assert int(merged.min()) >= 0, "every layer with experts has routed every token"
    return merged.flatten(1)
