"""Choice of the experts of each token, and of the weight of each expert.

A pass can use the experts that another pass has chosen (router replay: Zheng et al. 2025, arXiv:2507.18071, section
5.3; Ma et al. 2025, arXiv:2510.11370). Their weights are then computed from the logits of this pass, and have their
gradient.

Two settings balance the load of experts in training (`megatron_config.RouterBalance`). Both count the experts that
are used, whether this pass or another has chosen them. They count neither padding, nor rows that a rank computes only
because other ranks wait for it. A pass that is repeated in the backward pass counts once, because it first runs
without gradient.
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
    step_loads: Int[Tensor, " experts"] | None = None
    """Number of tokens of this optimizer step that were routed to each expert; None: the bias is not updated, or
    there was no token."""
    aux_loss: Float[Tensor, " 2"] | None = None
    """Sum of the balance losses of minibatches, without their coefficient, and number of these minibatches, as far as
    this rank's tokens contribute to both, since the last `take_routing`; None: there is no balance loss."""

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

    def balanced(
        self,
        weights: Float[Tensor, "N experts"],
        chosen: Bool[Tensor, "N experts"],
        scores: Float[Tensor, "N experts"],
    ) -> Float[Tensor, "N experts"]:
        """Count the loads of the optimizer step, and return `weights`, whose backward pass adds the gradient of the
        balance loss. `scores` are non-negative with a sum of 1 for each token."""
        shares = None if self.packed is None else self.packed.shares
        if shares is None or not torch.is_grad_enabled():
            return weights
        sequence, share = shares
        if self.config.sequence_parallel:
            sequence = own_tokens(sequence, self.tp_group)
        if self.config.moe_router_bias_update_rate:
            loads = (chosen & (share[sequence] > 0)[:, None]).sum(dim=0)  # indexing would wait for the device
            self.step_loads = loads if self.step_loads is None else self.step_loads + loads
        if not self.config.moe_aux_loss_coeff:
            return weights
        counts = scores.new_zeros(len(share), self.num_experts).index_add(0, sequence, chosen.to(scores.dtype))
        if self.tp_cp_group.size() > 1:
            torch.distributed.all_reduce(counts, group=self.tp_cp_group)
        loss, minibatches = balance_loss(scores, counts, sequence, share, self.topk)
        found = torch.stack([loss.detach(), minibatches])
        self.aux_loss = found if self.aux_loss is None else self.aux_loss + found
        with_loss: Tensor = _AddedLoss.apply(weights, self.config.moe_aux_loss_coeff * loss)
        return with_loss


class _AddedLoss(torch.autograd.Function):
    """Adds a loss to the one whose backward pass reaches a tensor. Losses of microbatches are sums, so the factor is
    1. Megatron-Core's `MoEAuxLossAutoScaler` has a factor that all models of the process share."""

    @staticmethod
    def forward(_: Any, passed_on: Tensor, loss: Float[Tensor, ""]) -> Tensor:  # noqa: ARG004 - only for backward
        return passed_on

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, Float[Tensor, ""]]:
        return gradient, gradient.new_ones((), dtype=torch.float32)


def balance_loss(
    scores: Float[Tensor, "N experts"],
    counts: Float[Tensor, "S experts"],
    sequence: Int[Tensor, " N"],
    share: Float[Tensor, " S"],
    topk: int,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the contributions of N tokens of S sequences to two sums over a minibatch: the balance loss of one layer
    (DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20), and 1, with which minibatches are counted.

        loss = sum_s share_s sum_i f_si P_si      f_si = experts / (topk T_s) counts_si      P_si = mean of scores_ti

    `counts`: tokens of each sequence that were routed to each expert, over all ranks that share the sequence.
    `share`: 1 / the number of sequences of the minibatch; 0: padding. The loss of a minibatch is 1 if every expert
    has as many tokens as the others, or if all scores are equal. It is at most experts / topk.
    """
    tokens = counts.sum(dim=1) / topk
    of_token = share / tokens
    fractions = counts * counts.shape[1] / (topk * tokens)[:, None]
    return (scores * (of_token[:, None] * fractions)[sequence]).sum(), of_token[sequence].sum()


def take_routing(models: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """Return and forget what routers have counted, by the names of `ProcessUsage`. Layers count from 1."""
    routers = routers_in(models)
    loads = {int(each.layer_number): tuple(each.loads.tolist()) for each in routers if each.loads is not None}
    replayed = [each.replayed for each in routers if each.replayed is not None]
    losses = [each.aux_loss for each in routers if each.aux_loss is not None]
    for router in routers:
        router.loads = router.replayed = router.aux_loss = None
    return {
        "expert_loads": loads,
        "replayed": tuple(torch.stack(replayed).sum(dim=0).tolist()) if replayed else (0, 0),
        "router_aux_loss": tuple(torch.stack(losses).sum(dim=0).tolist()) if losses else (0.0, 0.0),
    }


def routers_in(models: Iterable[torch.nn.Module]) -> list[ExpertRouter]:
    """Return all routers of these pipeline stages, in the order of the layers."""
    return [module for model in models for module in model.modules() if isinstance(module, ExpertRouter)]


def forget_step_loads(models: Iterable[torch.nn.Module]) -> None:
    """Forget the loads of an optimizer step that was not taken."""
    for router in routers_in(models):
        router.step_loads = None


@torch.no_grad()
def update_biases(models: Iterable[torch.nn.Module], rate: float) -> None:
    """Change the bias of each expert by `rate`: up if its load in this optimizer step is below the mean of its layer,
    down if it is above (Wang et al. 2024, arXiv:2408.15664, algorithm 1). Collective over all ranks with the same
    layers. A router that has counted no token on any rank, such as that of a value head's copied layer, keeps it."""
    routers = [router for router in routers_in(models) if isinstance(router, SigmoidRouter)]
    if not rate or not routers:
        return
    none = torch.zeros_like(routers[0].expert_bias, dtype=torch.int64)
    loads = torch.stack([none if router.step_loads is None else router.step_loads for router in routers])
    torch.distributed.all_reduce(loads, group=routers[0].tp_dp_cp_group)
    below = loads.sum(dim=1, keepdim=True) - loads.shape[1] * loads  # times the number of experts: whole numbers
    for router, sign in zip(routers, below.sign(), strict=True):
        router.expert_bias.add_(sign, alpha=rate)
    forget_step_loads(routers)


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
        return self.balanced(probs, routing_map, likely), self.counted(routing_map)


class SigmoidRouter(ExpertRouter):
    """DeepSeek-V3's router (arXiv:2412.19437, section 2.1.2), in float32 as in transformers: sigmoid scores, plus a
    bias that is used only to choose groups of experts, and then experts in these groups.

    The bias balances the load of experts: it is a buffer, in float32 for every dtype of the model, which no gradient
    changes, but `update_biases`.
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
        routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, value=True)
        likely = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
        return self.balanced(probs, routing_map, likely), self.counted(routing_map)


def own_tokens(of_all: Shaped[Tensor, "S ..."], group: torch.distributed.ProcessGroup) -> Shaped[Tensor, "N ..."]:
    """Return the rows of the tokens that this tensor rank routes with sequence parallelism."""
    return of_all.chunk(group.size())[group.rank()]


def choose_in_groups(scores: Float[Tensor, "N experts"], how: SigmoidRouting, count: int) -> Int[Tensor, "N count"]:
    """Return the best experts of the best groups. A group's score is the sum of its two best experts' scores."""
    groups = scores.view(len(scores), how.groups, -1)
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(how.groups_per_token, dim=-1).indices
    is_open = torch.zeros(groups.shape[:2], dtype=torch.bool, device=scores.device).scatter(1, best, value=True)
    return groups.masked_fill(~is_open[..., None], -torch.inf).flatten(1).topk(count, dim=-1).indices
