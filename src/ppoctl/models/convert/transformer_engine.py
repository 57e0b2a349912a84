"""Names of parameters in the Transformer Engine layer spec, from their names in the torch spec, which the tables use.

Transformer Engine fuses a norm into the linear layer after it, and holds all experts of a rank in one module. Norms
before a mixture of experts or latent attention, and norms of the queries and keys of each head, are separate modules
in both specs.
"""

import re

_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_FUSED_LATENT_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight)$")


def transformer_engine_name(parameter: str, *, has_experts: bool, is_latent: bool = False) -> str:
    """Return the Transformer Engine name of a parameter of a layer with or without experts, with plain or latent
    attention."""
    for plain, fused in (_FUSED_LATENT_NORMS if is_latent else _FUSED_NORMS).items():
        if parameter.endswith(f".{plain}") and not (has_experts and plain.startswith("pre_mlp")):
            return parameter.removesuffix(plain) + fused
    return _EXPERT.sub(r"mlp.experts.\2.\3\1", parameter)
