"""Tokens that a context rank has and attends to, by hand. The tests of layouts show that results do not depend
on it."""

import megatron_lab as lab
import pytest
import torch
from torch.distributed import ProcessGroup

from ppoctl.core.batch.grid import pack
from ppoctl.engines.megatron.attention import sees
from ppoctl.engines.megatron.context_parallel import Piece, gathered_rows, pieces_of, places_of
from ppoctl.engines.megatron.packed_input import PackedInput, ReadSettings, packed_input


def test_context_rank_holds_early_and_late_chunk():
    assert [places_of(rank, 2, 8) for rank in (0, 1)] == [[range(2), range(6, 8)], [range(2, 4), range(4, 6)]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_token_is_on_exactly_one_context_rank(ranks):
    places = [place for rank in range(ranks) for chunk in places_of(rank, ranks, 30 * ranks) for place in chunk]
    assert sorted(places) == list(range(30 * ranks))


def test_gathered_rows_restore_token_order():
    # Rank 0 sends tokens 0 1 6 7, rank 1 sends 2 3 4 5.
    assert gathered_rows(2, 8).tolist() == [0, 1, 4, 5, 6, 7, 2, 3]


def test_segments_end_at_chunk_and_sequence_boundaries():
    # Sequences 0..4 and 5..7. Rank 0 of two has 0 1 and 6 7, rank 1 has 2 3 and 4 5.
    assert list(pieces_of(places_of(0, 2, 8), (5, 3))) == [Piece(range(2), range(2)), Piece(range(6, 8), range(5, 8))]
    assert list(pieces_of(places_of(1, 2, 8), (5, 3))) == [
        Piece(range(2, 4), range(4)),
        Piece(range(4, 5), range(5)),
        Piece(range(5, 6), range(5, 6)),
    ]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_context_ranks_have_equal_attention_work(ranks):
    scores = [
        sum(sum(piece.keys.stop - token for token in range(len(piece.queries))) for piece in pieces)
        for pieces in (list(pieces_of(places_of(rank, ranks, 1600), (1600,))) for rank in range(ranks))
    ]
    assert max(scores) == min(scores)
    assert sum(scores) == 1600 * 1601 // 2


def test_causal_mask_shows_only_earlier_tokens_in_window():
    device = torch.device("cpu")
    assert sees(2, 4, device).tolist() == [[True, True, True, False], [True, True, True, True]]
    assert sees(2, 4, device, window=2).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert torch.equal(sees(3, 3, device), torch.ones(3, 3).tril().bool())


def split() -> tuple[PackedInput, list[PackedInput]]:
    """Return rows of 6 and 2 input tokens: as a single rank has them, and as each of two ranks has them."""
    packed = pack(lab.make_rollouts(), torch.tensor([0, 2]))

    def of(group: ProcessGroup | None, multiple: int) -> PackedInput:
        return packed_input(packed, ReadSettings(torch.device("cpu"), token_multiple=multiple, context=group))

    return of(None, 1), [of(ProcessGroup(rank, 2), 4) for rank in (0, 1)]


def test_context_ranks_split_tokens_with_their_positions():
    single, inputs_by_rank = split()
    for quantity in ("tokens", "positions"):
        expected = getattr(single, quantity)
        by_rank = [getattr(rank_input, quantity) for rank_input in inputs_by_rank]
        assert torch.equal(by_rank[0], torch.cat([expected[:2], expected[6:]]))
        assert torch.equal(by_rank[1], expected[2:6])


def test_context_ranks_split_read_positions():
    single, inputs_by_rank = split()
    targets = torch.full_like(single.targets, -1)
    for rank_input in inputs_by_rank:
        assert rank_input.context is not None
        assert rank_input.context.num_read == len(single.targets)
        assert torch.equal(
            rank_input.tokens[rank_input.read_at], single.tokens[single.read_at][rank_input.context.read]
        )
        targets[rank_input.context.read] = rank_input.targets
    assert torch.equal(targets, single.targets)


def test_gathered_keys_cover_sequence_up_to_each_segment():
    single, inputs_by_rank = split()
    gathered = torch.cat([rank_input.tokens for rank_input in inputs_by_rank])
    seen = []
    for rank_input in inputs_by_rank:
        assert rank_input.context is not None
        assert rank_input.cu_seqlens_kv.tolist()[-1] == sum(rank_input.key_lengths)
        seen.append(list(gathered[rank_input.context.keys_at].split(list(rank_input.key_lengths))))
    first, second = single.tokens.split([6, 2])
    assert [keys.tolist() for keys in seen[0]] == [first[:2].tolist(), second.tolist()]
    assert [keys.tolist() for keys in seen[1]] == [first[:4].tolist(), first.tolist()]
