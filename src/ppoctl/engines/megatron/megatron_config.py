"""Conversion of a `ModelShape` to Megatron-Core's configuration.

The auxiliary load-balancing loss is that of a sequence, a mean over the sequences of a minibatch (`router.py`). In
Megatron-Core's default, the loss of the tokens that share a microbatch, memory settings would change the gradient.
Experts have no capacity limit: every token reaches all experts that the router chose for it, so results do not depend
on how tokens are packed.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from ppoctl.algorithms.role_table import Kernels, Recompute
from ppoctl.core.errors import RecipeError
from ppoctl.core.machine.device import on_gpu
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.shape import ExpertShape, ModelShape

_ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    # Megatron-Core's default is to recompute attention, for kernels that keep all scores. The kernels here keep no
    # scores, and most of the other activations are those of the MLP. Recomputing norms would require Transformer
    # Engine.
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


class RouterBalance(NamedTuple):
    """Settings that balance the load of experts in training. By default, nothing balances it."""

    aux_loss_coef: float = 0.0
    """Coefficient of the sequence-wise balance loss."""
    bias_rate: float = 0.0
    """Change of the bias of each expert after an optimizer step, for routers with a bias."""


UNBALANCED = RouterBalance()


def transformer_config(
    shape: ModelShape,
    dtype: torch.dtype,
    parallel: ParallelTable,
    recompute: Recompute = "none",
    kernels: Kernels = "plain",
    balance: RouterBalance = UNBALANCED,
) -> TransformerConfig:
    """Return Megatron-Core's configuration; `dtype` is the dtype of weights and activations.

    Weights are always loaded, so no weight is initialized. Fusions that require Apex or CUDA extensions are off; the
    fusions of Transformer Engine are in its layer spec. Losses are already divided by the global token count, hence
    `calculate_per_token_loss`: without it, the schedule and the gradient buffers would average again.

    Raises RecipeError if `parallel` splits experts that the model does not have.
    """
    if shape.experts is None and parallel.expert_ranks > 1:
        written = f"`parallel.expert = {parallel.expert}`, `parallel.expert_tensor = {parallel.expert_tensor}`"
        raise RecipeError(f"{written}: a `{shape.family}` model has no experts to split", hint="set both to 1")
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        softmax_scale=shape.attention_scale,
        gated_linear_unit=True,
        activation_func=_ACTIVATIONS[shape.activation],
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu(),
        perform_initialization=False,
        moe_token_dispatcher_type="alltoall",  # the default forbids variable lengths, even without experts
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=kernels == "fused",
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],  # the default, `full`, is deprecated and warns
        **_layout(parallel),
        **({} if shape.experts is None else _experts(shape.experts, parallel, balance)),
        **_RECOMPUTE[recompute],
    )


def _layout(parallel: ParallelTable) -> dict[str, Any]:
    """Return the part of the configuration that describes the ranks."""
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        # With interleaving, both neighbours of a rank may be the same rank, so a batch of messages would confuse the
        # two directions. Without batches, each call sends in one direction, and messages are matched by their order.
        "overlap_p2p_comm": parallel.stages_per_rank > 1,
        "batch_p2p_comm": parallel.stages_per_rank == 1,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers,
        "sequence_parallel": parallel.sequence,
        "context_parallel_size": parallel.context,
        "cp_comm_type": None,  # used only by Transformer Engine's attention; ours gathers keys
        "variable_seq_lengths": parallel.pipeline > 1,  # packed microbatches differ in length
    }


def _experts(experts: ExpertShape, parallel: ParallelTable, balance: RouterBalance) -> dict[str, Any]:
    """Return the part of the configuration that describes a mixture of experts."""
    return {
        "num_moe_experts": experts.count,
        "moe_layer_freq": [int(has_experts) for has_experts in experts.layers],
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": True,  # else Megatron-Core rejects one expert per token; our routers do not read it
        # Our routers read the next two. Megatron-Core would also change the bias, if it had registered it.
        "moe_aux_loss_coeff": balance.aux_loss_coef,
        "moe_router_bias_update_rate": balance.bias_rate,
        "moe_router_load_balancing_type": "seq_aux_loss" if balance.aux_loss_coef else "none",
        "moe_expert_capacity_factor": None,
        "moe_permute_fusion": False,  # requires Transformer Engine
        "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size,
        "moe_shared_expert_gate": experts.shared_gate,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }
