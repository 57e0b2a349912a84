"""Choice of the experts of each token, and of the weight of each expert."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ppoctl.models.shape import SigmoidRouting


class CountingRouter(TopKRouter):
    """Router that counts the tokens of each expert. Passes that are repeated for a backward pass count twice, which
    changes no ratio of two experts."""

    loads: Int[Tensor, " experts"] | None = None
    """Number of tokens that were routed to each expert since the last `take_loads`; None: there was no token."""

    def counted(self, chosen: Bool[Tensor, "N experts"]) -> Bool[Tensor, "N experts"]:
        """Count these choices, and return them."""
        loads = chosen.sum(dim=0)
        self.loads = loads if self.loads is None else self.loads + loads
        return chosen


def take_loads(models: Iterable[torch.nn.Module]) -> dict[int, tuple[int, ...]]:
    """Return and forget, for each layer with experts, the number of tokens of each expert. Layers count from 1."""
    routers = (module for model in models for module in model.modules() if isinstance(module, CountingRouter))
    found = {}
    for router in routers:
        if router.loads is not None:
            found[int(router.layer_number)] = tuple(router.loads.tolist())
            router.loads = None
    return found


class SoftmaxRouter(CountingRouter):
    """Megatron-Core's router with the order of operations of transformers: softmax over all experts in float32,
    choice of the largest probabilities, division by their sum if the model requires it, and finally the cast to the
    model's dtype.

    Megatron-Core casts before the choice. In bfloat16 the cast creates ties, so other experts would be chosen than by
    the generator (vLLM). Megatron-Core's product of hidden states and weights requires Transformer Engine.
    """

    def __init__(self, *, renormalise: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.renormalise = renormalise

    def gating(self, input: Float[Tensor, "N 1 hidden"]) -> Float[Tensor, "N 1 experts"]:
        """Return logits, in the model's dtype."""
        return F.linear(input, self.weight)

    def routing(
        self, logits: Float[Tensor, "N 1 experts"], padding_mask: None = None
    ) -> tuple[Float[Tensor, "N experts"], Bool[Tensor, "N experts"]]:
        """Return the weight of each expert for each token (0 if not chosen), and which experts are chosen."""
        assert padding_mask is None, "packed sequences have no padding"
        logits = logits.view(-1, self.num_experts)
        weights, chosen = logits.softmax(dim=-1, dtype=torch.float32).topk(self.topk, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, value=True)
        return probs, self.counted(routing_map)


class SigmoidRouter(CountingRouter):
    """DeepSeek-V3's router (arXiv:2412.19437, section 2.1.2), in float32 as in transformers: sigmoid scores, plus a
    bias that is used only to choose groups of experts, and then experts in these groups.

    Pre-training used the bias to balance the load of experts. PPO does not train the bias: it is a buffer, in float32
    for every dtype of the model.
    """

    def __init__(self, *, renormalise: bool, how: SigmoidRouting, **settings: Any) -> None:
        super().__init__(**settings)
        self.renormalise = renormalise
        self.how = how
        del self.expert_bias  # it is None, because Megatron-Core does not train it here
        self.register_buffer("expert_bias", torch.zeros(self.num_experts, dtype=torch.float32))

    def gating(self, input: Float[Tensor, "N 1 hidden"]) -> Float[Tensor, "N 1 experts"]:
        """Return logits, float32."""
        return F.linear(input.float(), self.weight.float())

    def routing(
        self, logits: Float[Tensor, "N 1 experts"], padding_mask: None = None
    ) -> tuple[Float[Tensor, "N experts"], Bool[Tensor, "N experts"]]:
        """Return the weight of each expert for each token (float32, 0 if not chosen), and which experts are
        chosen."""
        assert padding_mask is None, "packed sequences have no padding"
        scores = logits.view(-1, self.num_experts).sigmoid()
        chosen = choose_in_groups(scores + self.expert_bias, self.how, self.topk)
        weights = scores.gather(1, chosen)
        if self.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        probs = torch.zeros_like(scores).scatter(1, chosen, weights * self.how.scale)
        return probs, self.counted(torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, value=True))


def choose_in_groups(scores: Float[Tensor, "N experts"], how: SigmoidRouting, count: int) -> Int[Tensor, "N count"]:
    """Return the best experts of the best groups. A group's score is the sum of its two best experts' scores."""
    groups = scores.view(len(scores), how.groups, -1)
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(how.groups_per_token, dim=-1).indices
    is_open = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, value=True)
    return groups.masked_fill(~is_open[..., None], -torch.inf).flatten(1).topk(count, dim=-1).indices
