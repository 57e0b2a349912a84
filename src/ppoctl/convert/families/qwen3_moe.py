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
    ignores=QWEN3.ignores | EXPERT_IGNORES,
    experts=(ROUTER, *EXPERTS),
)
