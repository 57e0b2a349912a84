"""Preflight accepts exactly the head sizes that vLLM's CPU attention computes."""

import pytest
import torch

from ppoctl.engines.vllm.vllm_start import third_party_quiet
from ppoctl.recipe.generator_limits import HEAD_SIZES, device_of_the_build

pytestmark = pytest.mark.engines


@pytest.mark.skipif(device_of_the_build() != "cpu", reason="vLLM's CPU kernels are in its build for CPUs")
def test_head_sizes_match_vllm_cpu_kernel() -> None:
    """Checked with vLLM's own selection for every even size up to 640, with the instruction set that it would
    choose."""
    with third_party_quiet():
        from vllm import _custom_ops
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

    def computes(size: int) -> bool:
        try:
            _custom_ops.cpu_attn_get_scheduler_metadata(
                num_reqs=1,
                num_heads=4,
                num_kv_heads=2,
                head_dim=size,
                seq_lens=torch.tensor([4], dtype=torch.int32),
                dtype=torch.float32,
                query_start_loc=torch.tensor([0, 4], dtype=torch.int32),
                causal=True,
                sliding_window_size=-1,
                isa=_get_attn_isa(torch.float32, 128, size),
                enable_kv_split=True,
            )
        except RuntimeError as error:
            if "Unsupported CPU attention configuration" in str(error):
                return False
            raise
        return True

    assert tuple(size for size in range(2, 642, 2) if computes(size)) == HEAD_SIZES["cpu"]
    assert set(CPUAttentionBackend.get_supported_head_sizes()) <= set(HEAD_SIZES["cpu"])
