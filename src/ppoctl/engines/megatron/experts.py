"""A mixture of experts: which layers have one, how wide, how tokens are routed.

No auxiliary load-balancing loss: PPO's objective is the whole loss, and its updates are replayed from recorded
figures. A term that depends on which tokens share a microbatch would make memory settings change the gradient. No
capacity either: every token reaches all experts it chose, so nothing depends on the company it is packed with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppoctl.recipe.parallel import ParallelTable


@dataclass(frozen=True)
class ExpertShape:
    """The numbers that define the mixture of one model."""

    count: int
    """Experts of a layer."""
    per_token: int
    """Experts each token is routed to."""
    ffn_hidden_size: int
    """Of one expert."""
    renormalise: bool
    """Divide the weights of the chosen experts by their sum."""
    layers: tuple[bool, ...]
    """Whether each layer of the model has experts; the others have one MLP for all tokens."""

    @property
    def active_width(self) -> int:
        """What a token meets of a layer's experts, as the width of one MLP."""
        return self.per_token * self.ffn_hidden_size

    def transformer_config(self, parallel: ParallelTable) -> dict[str, Any]:
        """What Megatron-Core's configuration says about experts."""
        return {
            "num_moe_experts": self.count,
            "moe_layer_freq": [int(has_experts) for has_experts in self.layers],
            "moe_ffn_hidden_size": self.ffn_hidden_size,
            "moe_router_topk": self.per_token,
            "moe_router_pre_softmax": True,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_expert_capacity_factor": None,
            "moe_permute_fusion": False,  # needs Transformer Engine
            "expert_model_parallel_size": parallel.expert,
            "expert_tensor_parallel_size": parallel.expert_tensor,
        }


EXPERT_FIELDS = frozenset(
    {
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    }
)
"""Fields of a Hugging Face configuration (as transformers 5 spells them) that `read_experts` reads."""


def read_experts(config: Mapping[str, Any]) -> ExpertShape:
    """The mixture that a Qwen3-MoE configuration describes. A layer has experts when it is not in `mlp_only_layers`
    and its number, counted from 1, is a multiple of `decoder_sparse_step`."""
    dense, step = set(config["mlp_only_layers"] or ()), config["decoder_sparse_step"]
    return ExpertShape(
        count=config["num_local_experts"],
        per_token=config["num_experts_per_tok"],
        ffn_hidden_size=config["moe_intermediate_size"],
        renormalise=config["norm_topk_prob"],
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(config["num_hidden_layers"])),
    )
