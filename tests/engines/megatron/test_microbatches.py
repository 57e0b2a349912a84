"""How a minibatch is split over data ranks, and on each rank into microbatches."""

import megatron_lab as lab
import pytest
import torch

from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.core.ports import TokenOutputs
from ppoctl.engines.megatron.microbatches import Microbatch, MicrobatchPlan, RankOutputs, cut_rows, merge
from ppoctl.engines.megatron.packed_input import ReadSettings
from ppoctl.models.cost import TokenCost

ROWS = torch.tensor([4, 0, 3, 1, 2])
COST = TokenCost(1.0, 0.0)


def cut(batching: BySequences | ByTokens, ranks: int, *, count_multiple: int = 0) -> list[list[Microbatch]]:
    """Return the part of `ROWS` that each data rank gets."""
    reading = ReadSettings(torch.device("cpu"))
    rollouts = lab.make_rollouts()
    return [
        cut_rows(rollouts, ROWS, MicrobatchPlan(batching, reading, COST, rank, ranks, count_multiple))
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("batching", [BySequences(microbatch_seqs=2), ByTokens(max_tokens_per_microbatch=14)])
def test_every_row_is_in_exactly_one_microbatch(batching, ranks):
    by_rank = cut(batching, ranks)
    places = torch.cat([microbatch.places for microbatches in by_rank for microbatch in microbatches])
    assert sorted(places.tolist()) == [0, 1, 2, 3, 4]
    for microbatch in (microbatch for microbatches in by_rank for microbatch in microbatches):
        assert torch.equal(microbatch.rows, ROWS[microbatch.places])
        if isinstance(batching, ByTokens):
            assert microbatch.input.tokens.numel() <= batching.max_tokens_per_microbatch
    assert all(microbatches for microbatches in by_rank), "a rank without rows still has something to run"
    assert sum(microbatches[0].is_idle for microbatches in by_rank) == max(0, ranks - 5)


def test_data_ranks_have_equal_token_counts():
    # Input tokens of rows 0 to 4 are 6, 11, 2, 10, 9: 38 in all.
    assert lab.make_rollouts().input_lengths.tolist() == [6, 11, 2, 10, 9]
    loads = [
        sum(microbatch.input.tokens.numel() for microbatch in microbatches)
        for microbatches in cut(BySequences(microbatch_seqs=1), 2)
    ]
    assert sorted(loads) == [19, 19]


@pytest.mark.parametrize(("ranks", "multiple", "expected"), [(2, 1, 3), (2, 2, 4), (3, 4, 4)])
def test_synchronized_ranks_have_equal_microbatch_counts(ranks, multiple, expected):
    by_rank = cut(BySequences(microbatch_seqs=1), ranks, count_multiple=multiple)
    assert [len(microbatches) for microbatches in by_rank] == [expected] * ranks
    idle = sum(microbatch.is_idle for microbatches in by_rank for microbatch in microbatches)
    assert idle == expected * ranks - 5


@pytest.mark.parametrize(
    ("batching", "with_gradient", "forward_only"),
    [
        (BySequences(microbatch_seqs=2), [2, 2, 1], [2, 2, 1]),
        (BySequences(microbatch_seqs=2, forward_microbatch_seqs=4), [2, 2, 1], [4, 1]),
        # 11 + 2 | 10 | 9 | 6 tokens, and 11 + 10 + 2 | 9 + 6.
        (ByTokens(max_tokens_per_microbatch=13, forward_max_tokens_per_microbatch=24), [2, 1, 1, 1], [3, 2]),
    ],
)
def test_forward_without_gradient_has_separate_limit(batching, with_gradient, forward_only):
    rollouts, reading = lab.make_rollouts(), ReadSettings(torch.device("cpu"))
    for kept, expected in ((True, with_gradient), (False, forward_only)):
        microbatches = cut_rows(rollouts, ROWS, MicrobatchPlan(batching, reading, COST, with_gradient=kept))
        assert [len(microbatch.rows) for microbatch in microbatches] == expected


def test_sequence_parallelism_pads_tokens_to_rank_multiple():
    reading = ReadSettings(torch.device("cpu"), token_multiple=4)
    [microbatch] = cut_rows(
        lab.make_rollouts(), ROWS[:2], MicrobatchPlan(BySequences(microbatch_seqs=2), reading, COST)
    )
    packed_input, packed = microbatch.input, microbatch.packed
    assert (len(packed.tokens), len(packed_input.tokens)) == (15, 16)
    assert packed_input.query_lengths == packed_input.key_lengths == (*packed.seq_lengths, 1)
    assert packed_input.cu_seqlens_q.tolist() == packed_input.cu_seqlens_kv.tolist() == [0, 9, 15, 16]
    assert torch.equal(packed_input.tokens[:15], packed.tokens)
    assert int(packed_input.read_at.max()) < 15


def test_merged_rank_outputs_follow_minibatch_order():
    rank_outputs = [
        RankOutputs(torch.tensor([2, 0]), TokenOutputs(torch.tensor([[2.0], [0.0]]))),
        RankOutputs(torch.tensor([1]), TokenOutputs(torch.tensor([[1.0]]))),
    ]
    merged = merge(rank_outputs)
    assert merged.primary.tolist() == [[0.0], [1.0], [2.0]]
    assert merged.entropy is None
    with_entropy = merge(
        [
            RankOutputs(share.places, TokenOutputs(share.outputs.primary, -share.outputs.primary))
            for share in rank_outputs
        ]
    )
    assert with_entropy.entropy is not None
    assert with_entropy.entropy.tolist() == [[-0.0], [-1.0], [-2.0]]
