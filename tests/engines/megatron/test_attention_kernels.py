"""The attention kernel that torch is called for on a GPU, with tensors without memory instead of a GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from ppoctl.engines.megatron.attention import _per_piece
from ppoctl.engines.megatron.packed_input import PackedInput


def packed(*lengths: int) -> PackedInput:
    some = torch.zeros(1, dtype=torch.long)
    return PackedInput(
        tokens=some, positions=some, query_lengths=lengths, key_lengths=lengths, read_at=some, targets=some, at=some
    )


@pytest.mark.parametrize(("device", "kv_heads", "is_grouped"), [("cuda", 6, False), ("cpu", 2, True)])
def test_float32_attention_on_gpu_repeats_key_heads(monkeypatch, device, kv_heads, is_grouped):
    """For fewer heads torch would use the kernel that keeps S x S scores."""
    calls: list[tuple[int, bool]] = []

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: bool) -> torch.Tensor:
        calls.append((key.shape[1], settings["enable_gqa"]))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    with FakeTensorMode():
        query, key, value = (torch.empty(7, heads, 16, device=device) for heads in (6, 2, 2))
        assert _per_piece(query, key, value, packed(3, 4), None).shape == (7, 6, 16)
    assert calls == [(kv_heads, is_grouped)] * 2


def test_repeated_key_heads_match_grouped_attention():
    query, key, value = (
        torch.randn(1, heads, 5, 8, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2, 3)
    )
    value = value[:, :2]
    grouped = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    repeated = (x.repeat_interleave(3, dim=1) for x in (key, value))
    torch.testing.assert_close(F.scaled_dot_product_attention(query, *repeated, is_causal=True), grouped)
