"""Qwen3's mixture of experts: Qwen3 with experts in place of the MLP of some layers or all."""

from dataclasses import replace

from ppoctl.convert.families.decoder import EXPERT_IGNORES, EXPERTS, ROUTER, expert_reads
from ppoctl.convert.families.qwen3 import QWEN3
from ppoctl.convert.fields import Record
from ppoctl.convert.shape import ExpertShape

QWEN3_MOE = replace(
    QWEN3,
    classes="Qwen3Moe",
    reads={**QWEN3.reads, "experts": Record(ExpertShape, expert_reads("num_local_experts"))},
    defaults={
        **{name: value for name, value in QWEN3.defaults.items() if name != "head_dim"},
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    renamed={"num_experts": "num_local_experts"},
    ignores=QWEN3.ignores | EXPERT_IGNORES,
    experts=(ROUTER, *EXPERTS),
)
