"""Choice of the experts of each token, and of the weight of each expert.

A pass can use the experts that another pass has chosen (router replay: Zheng et al. 2025, arXiv:2507.18071, section
5.3; Ma et al. 2025, arXiv:2510.11370). Their weights are then computed from the logits of this pass, and have their
gradient.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from ppoctl.engines.megatron.packed_input import PackedInput
from ppoctl.models.shape import SigmoidRouting


class ExpertRouter(TopKRouter):
    """Router that can use given experts, report its choice, and count. Passes that are repeated for a backward pass
    count twice, which changes no ratio of two counts."""

    packed: PackedInput | None = None
    """Microbatch of the current pass (`expert_layer.ExpertLayer` sets it); None: the router chooses."""
    loads: Int[Tensor, " experts"] | None = None
    """Number of tokens that were routed to each expert since the last `take_loads`; None: there was no token."""
    replayed: Int[Tensor, " 2"] | None = None
    """Number of given experts that the router would not have chosen, and number of all given experts, since the last
    `take_replayed`; None: no expert was given."""

    def __init__(self, *, place: int, **settings: Any) -> None:
        """`place`: number of layers with experts before this one."""
        super().__init__(**settings)
        self.place = place

    def experts_of(self, best: Int[Tensor, "N k"]) -> Int[Tensor, "N k"]:
        """Return the experts of each token: the given ones, or those that the router chooses, `best`."""
        packed = self.packed
        if packed is None:
            return best
        if packed.chosen is not None:
            packed.chosen[self.place] = best
        if packed.experts is None:
            return best
        given = packed.experts.unflatten(1, (-1, self.topk))[:, self.place].long()
        if self.config.sequence_parallel:
            given = own_tokens(given, self.tp_group)
        is_given = given >= 0
        is_other = is_given & (given[:, :, None] != best[:, None, :]).all(dim=-1)
        counts = torch.stack([is_other.sum(), is_given.sum()])
        self.replayed = counts if self.replayed is None else self.replayed + counts
        return torch.where(is_given, given, best)

    def counted(self, chosen: Bool[Tensor, "N experts"]) -> Bool[Tensor, "N experts"]:
        """Count these choices, and return them."""
        loads = chosen.sum(dim=0)
        self.loads = loads if self.loads is None else self.loads + loads
        return chosen


def take_replayed(models: Iterable[torch.nn.Module]) -> tuple[int, int]:
    """Return and forget how many of the given experts the routers would not have chosen, and how many were given."""
    routers = [module for model in models for module in model.modules() if isinstance(module, ExpertRouter)]
    counts = [router.replayed for router in routers if router.replayed is not None]
    for router in routers:
        router.replayed = None
    others, given = torch.stack(counts).sum(dim=0).tolist() if counts else (0, 0)
    return others, given


def take_loads(models: Iterable[torch.nn.Module]) -> dict[int, tuple[int, ...]]:
    """Return and forget, for each layer with experts, the number of tokens of each expert. Layers count from 1."""
    routers = (module for model in models for module in model.modules() if isinstance(module, ExpertRouter))
    found = {}
    for router in routers:
        if router.loads is not None:
            found[int(router.layer_number)] = tuple(router.loads.tolist())
            router.loads = None
    return found


class SoftmaxRouter(ExpertRouter):
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
        likely = logits.softmax(dim=-1, dtype=torch.float32)
        chosen = self.experts_of(likely.topk(self.topk, dim=-1).indices)
        weights = likely.gather(1, chosen)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, value=True)
        return probs, self.counted(routing_map)


class SigmoidRouter(ExpertRouter):
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
        chosen = self.experts_of(choose_in_groups(scores + self.expert_bias, self.how, self.topk))
        weights = scores.gather(1, chosen)
        if self.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        probs = torch.zeros_like(scores).scatter(1, chosen, weights * self.how.scale)
        return probs, self.counted(torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, value=True))


def own_tokens(of_all: Shaped[Tensor, "S ..."], group: torch.distributed.ProcessGroup) -> Shaped[Tensor, "N ..."]:
    """Return the rows of the tokens that this tensor rank routes with sequence parallelism."""
    return of_all.chunk(group.size())[group.rank()]


def choose_in_groups(scores: Float[Tensor, "N experts"], how: SigmoidRouting, count: int) -> Int[Tensor, "N count"]:
    """Return the best experts of the best groups. A group's score is the sum of its two best experts' scores."""
    groups = scores.view(len(scores), how.groups, -1)
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(how.groups_per_token, dim=-1).indices
    is_open = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, value=True)
    return groups.masked_fill(~is_open[..., None], -torch.inf).flatten(1).topk(count, dim=-1).indices
