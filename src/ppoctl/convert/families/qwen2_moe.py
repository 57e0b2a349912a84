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
    requires={**QWEN2.requires, "qkv_bias": Only(True)},  # noqa: FBT003 - a value
    ignores=QWEN2.ignores | EXPERT_IGNORES,
    experts=(
        ROUTER,
        *EXPERTS,
        *gated_mlp("mlp.shared_expert", "mlp.shared_experts", "shared_ffn"),
        Row("mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight", "one hidden"),
    ),
)
