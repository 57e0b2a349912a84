"""Qwen1.5's mixture of experts: Qwen2 with experts in place of the MLP of some layers or all, and beside them an MLP
that every token meets, scaled by the sigmoid of one number per token."""

from dataclasses import replace
from functools import partial

from ppoctl.convert.families.decoder import EXPERT_IGNORES, EXPERTS, ROUTER, expert_reads, gated_mlp
from ppoctl.convert.families.qwen2 import QWEN2
from ppoctl.convert.fields import From, Only, Record
from ppoctl.convert.rows import Row
from ppoctl.convert.shape import ExpertShape

QWEN2_MOE = replace(
    QWEN2,
    classes="Qwen2Moe",
    reads={
        **QWEN2.reads,
        "experts": Record(
            partial(ExpertShape, shared_gate=True),
            {**expert_reads("num_experts"), "shared_ffn_hidden_size": From("shared_expert_intermediate_size")},
        ),
    },
    defaults={
        **QWEN2.defaults,
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    requires={**QWEN2.requires, "qkv_bias": Only(True)},  # noqa: FBT003 - a value
    ignores=QWEN2.ignores | EXPERT_IGNORES,
    experts=(
        ROUTER,
        *EXPERTS,
        *gated_mlp("mlp.shared_expert", "mlp.shared_experts", "shared_ffn"),
        Row("mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight", "one hidden"),
    ),
)
