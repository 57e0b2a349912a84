"""config.json -> the numbers of a model, for the families that are trained here (`convert.families`), without torch.

Where a field that decides bytes is absent, transformers' default of that family is taken if published files leave it
out; anything else absent makes a model that is not estimated.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ppoctl.recipe.memory.decoder import Decoder, Experts, Latent, Scores

Config = Mapping[str, Any]


def decoder_of(config: Config) -> Decoder | None:
    """The model that a config.json describes; None where it is of no known family or lacks a number."""
    read = _FAMILIES.get(config.get("model_type", ""))
    if read is None:
        return None
    try:
        return Decoder(**_common(config) | read(config))
    except KeyError:
        return None


def count_parameters(config: Config) -> int | None:
    """Parameters of the published model; None where the family is not known."""
    decoder = decoder_of(config)
    return None if decoder is None else decoder.parameters


def _common(config: Config) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "inner": config["intermediate_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "vocab": config["vocab_size"],
        "tied": bool(config.get("tie_word_embeddings")),
    }


def _dense(config: Config) -> dict[str, Any]:
    if any(key in config for key in ("num_local_experts", "n_routed_experts", "num_experts")):
        raise KeyError("experts in a model that has none")
    return {}


def _qwen2(config: Config) -> dict[str, Any]:
    return {**_dense(config), "qkv_bias": True}


def _qwen3(config: Config) -> dict[str, Any]:
    return {**_dense(config), "head_norms": True}


def _qwen2_moe(config: Config) -> dict[str, Any]:
    experts = _qwens_experts(config)
    return {
        "qkv_bias": True,
        "experts": Experts(**experts, shared=config["shared_expert_intermediate_size"], shared_gate=True),
    }


def _qwen3_moe(config: Config) -> dict[str, Any]:
    return {"head_norms": True, "experts": Experts(**_qwens_experts(config))}


def _qwens_experts(config: Config) -> dict[str, Any]:
    """A layer has experts when it is not in `mlp_only_layers` and its number, counted from 1, is a multiple of
    `decoder_sparse_step`."""
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step", 1)
    layers = range(config["num_hidden_layers"])
    return {
        # transformers 5 writes the second.
        "number": config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        "per_token": config["num_experts_per_tok"],
        "inner": config["moe_intermediate_size"],
        "layers": tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
        "renormalised": bool(config.get("norm_topk_prob")),
    }


def _gemma2(config: Config) -> dict[str, Any]:
    kinds = config.get("layer_types") or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(config["num_hidden_layers"])
    ]
    capped = config["attn_logit_softcapping"] is not None
    return {
        "head_dim": config["head_dim"],
        "tied": bool(config.get("tie_word_embeddings", True)),
        "post_norms": True,
        "capped_logits": config["final_logit_softcapping"] is not None,
        "scores": Scores(capped, tuple(capped or kind == "sliding_attention" for kind in kinds)),
    }


def _deepseek_v3(config: Config) -> dict[str, Any]:
    rope, inner = config["qk_rope_head_dim"], config["moe_intermediate_size"]
    layers, dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    return {
        "kv_heads": config["num_attention_heads"],
        "head_dim": config["qk_nope_head_dim"] + rope,
        "latent": Latent(config["q_lora_rank"], config["kv_lora_rank"], rope, config["v_head_dim"]),
        "experts": Experts(
            number=config["n_routed_experts"],
            per_token=config["num_experts_per_tok"],
            inner=inner,
            layers=tuple(layer >= dense for layer in range(layers)),
            shared=config["n_shared_experts"] * inner,
            renormalised=bool(config.get("norm_topk_prob", True)),
            by_sigmoid=True,
        ),
    }


_FAMILIES: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _dense,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
}
