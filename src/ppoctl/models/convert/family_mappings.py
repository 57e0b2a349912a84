"""Tensor mappings of each family: one row per Hugging Face tensor of a layer."""

from dataclasses import dataclass

from ppoctl.models.convert.tensor_mapping import FusedPart, TensorMapping
from ppoctl.models.shape import ModelShape


def _qkv(kind: str, columns: str = "") -> tuple[TensorMapping, ...]:
    """Return the rows of queries, keys and values, which Megatron fuses. `kind` is weight or bias."""
    fused = f"self_attention.linear_qkv.{kind}"
    return (
        TensorMapping(f"self_attn.q_proj.{kind}", fused, f"queries* {columns}", FusedPart.QUERY),
        TensorMapping(f"self_attn.k_proj.{kind}", fused, f"keys* {columns}", FusedPart.KEY),
        TensorMapping(f"self_attn.v_proj.{kind}", fused, f"keys* {columns}", FusedPart.VALUE),
    )


def _gated_mlp(theirs: str, ours: str, width: str) -> tuple[TensorMapping, ...]:
    """Return the rows of one gated MLP of this width, under these names."""
    return (
        TensorMapping(f"{theirs}.gate_proj.weight", f"{ours}.linear_fc1.weight", f"{width}* hidden", FusedPart.GATE),
        TensorMapping(f"{theirs}.up_proj.weight", f"{ours}.linear_fc1.weight", f"{width}* hidden", FusedPart.UP),
        TensorMapping(f"{theirs}.down_proj.weight", f"{ours}.linear_fc2.weight", f"hidden {width}*"),
    )


_INPUT_NORM = TensorMapping("input_layernorm.weight", "input_layernorm.weight", "hidden")
_QKV = _qkv("weight", "hidden")
_HEAD_NORMS = (
    TensorMapping("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", "head"),
    TensorMapping("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", "head"),
)
_PROJECTION = TensorMapping("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "hidden queries*")
_MLP_NORM = TensorMapping("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "hidden")
_MLP = _gated_mlp("mlp", "mlp", "ffn")
_ROUTER = TensorMapping("mlp.gate.weight", "mlp.router.weight", "experts hidden")
_EXPERTS = _gated_mlp("mlp.experts.{expert}", "mlp.experts.local_experts.{expert}", "expert_ffn")

_LLAMA = (_INPUT_NORM, *_QKV, _PROJECTION, _MLP_NORM)
_QWEN2 = (_INPUT_NORM, *_QKV, *_qkv("bias"), _PROJECTION, _MLP_NORM)
_QWEN3 = (_INPUT_NORM, *_QKV, *_HEAD_NORMS, _PROJECTION, _MLP_NORM)
_POST_NORMS = (
    TensorMapping("post_attention_layernorm.weight", "self_attention.linear_proj.post_layernorm.weight", "hidden"),
    TensorMapping("pre_feedforward_layernorm.weight", "pre_mlp_layernorm.weight", "hidden"),
)
_GEMMA2 = (_INPUT_NORM, *_QKV, _PROJECTION, *_POST_NORMS)
_GEMMA3 = (_INPUT_NORM, *_QKV, *_HEAD_NORMS, _PROJECTION, *_POST_NORMS)
_GEMMA_MLP = (
    *_MLP,
    TensorMapping("post_feedforward_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight", "hidden"),
)
_QWEN2_EXPERTS = (
    _ROUTER,
    *_EXPERTS,
    *_gated_mlp("mlp.shared_expert", "mlp.shared_experts", "shared_ffn"),
    TensorMapping("mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight", "one hidden"),
)
_DEEPSEEK = (
    _INPUT_NORM,
    TensorMapping(
        "self_attn.kv_a_proj_with_mqa.weight", "self_attention.linear_kv_down_proj.weight", "kv_rank+rope hidden"
    ),
    TensorMapping("self_attn.kv_a_layernorm.weight", "self_attention.kv_layernorm.weight", "kv_rank"),
    TensorMapping("self_attn.kv_b_proj.weight", "self_attention.linear_kv_up_proj.weight", "keys+values* kv_rank"),
    TensorMapping("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "hidden values*"),
    _MLP_NORM,
)
_DEEPSEEK_EXPERTS = (
    _ROUTER,
    TensorMapping("mlp.gate.e_score_correction_bias", "mlp.router.expert_bias", "experts"),
    *_EXPERTS,
    *_gated_mlp("mlp.shared_experts", "mlp.shared_experts", "shared_ffn"),
)
_WHOLE_QUERIES = (TensorMapping("self_attn.q_proj.weight", "self_attention.linear_q_proj.weight", "queries* hidden"),)
_LATENT_QUERIES = (
    TensorMapping("self_attn.q_a_proj.weight", "self_attention.linear_q_down_proj.weight", "query_rank hidden"),
    TensorMapping("self_attn.q_a_layernorm.weight", "self_attention.q_layernorm.weight", "query_rank"),
    TensorMapping("self_attn.q_b_proj.weight", "self_attention.linear_q_up_proj.weight", "queries* query_rank"),
)


@dataclass(frozen=True)
class LayerRows:
    """Rows of a layer's tensors in one family."""

    attention: tuple[TensorMapping, ...]
    """Rows of a layer without its MLP."""
    mlp: tuple[TensorMapping, ...] = _MLP
    """Rows of a layer's MLP."""
    experts: tuple[TensorMapping, ...] = ()
    """Rows of a layer with experts, which replace the rows of the MLP."""


TABLES: dict[str, LayerRows] = {
    "deepseek_v3": LayerRows(_DEEPSEEK, experts=_DEEPSEEK_EXPERTS),
    "gemma2": LayerRows(_GEMMA2, _GEMMA_MLP),
    "gemma3_text": LayerRows(_GEMMA3, _GEMMA_MLP),
    "llama": LayerRows(_LLAMA),
    "mistral": LayerRows(_LLAMA),
    "qwen2": LayerRows(_QWEN2),
    "qwen2_moe": LayerRows(_QWEN2, experts=_QWEN2_EXPERTS),
    "qwen3": LayerRows(_QWEN3),
    "qwen3_moe": LayerRows(_QWEN3, experts=(_ROUTER, *_EXPERTS)),
}


def layer_rows(shape: ModelShape, layer: int) -> tuple[TensorMapping, ...]:
    """Return the rows of a layer of the model, in Hugging Face's order."""
    table = TABLES[shape.family]
    rows = table.attention + (table.experts if shape.has_experts(layer) else table.mlp)
    if shape.latent is None:
        return rows
    return (_WHOLE_QUERIES if shape.latent.query_rank is None else _LATENT_QUERIES) + rows
