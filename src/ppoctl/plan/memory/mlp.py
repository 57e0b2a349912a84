"""Activations that a layer's MLP or its experts keep for the backward pass, and bytes that they need while they run.

Letters, besides those of `activations`: E experts of a layer, k of them per token, f width of one, t ranks that split
one (`expert_tensor`), F' width of the MLP beside them; p bytes of a routing weight (b, or 4 where sigmoids choose).

    per token             bytes
    gated MLP             5 b F / T
    MLP beside experts    5 b F' / T, with a gate (b h + 2 b) / S
    experts               k (b h t + 6 b f + p t + 8) / S
    routing               (E (4 + 2 p + 2) + 8 k + 4 (k + 1)) / S

- An MLP keeps gate and up (2F), silu of the gate, up (a copy: Megatron-Core adds an offset of 0 to it), the product.
  Experts also keep the product times the routing weight, and copies of tokens: each goes to k experts, and every rank
  that has a slice of an expert sees all of its tokens.
- Assumed: every expert gets as many tokens as any other. Nothing is dropped or padded, so a rank whose experts are
  chosen twice as often keeps, and needs, twice as much.
- Routing keeps scores in float32, weights by token and by expert, two masks, and indices; `p` of the last line's last
  term is 4 where the chosen weights are divided by their sum, else it is not there.
- Experts run one after the other, on CPU and GPU alike; their inputs, outputs and both in the order of the tokens lie
  there together.
"""

from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard


def mlp_bytes(part: ModelShard, width: int) -> int:
    """Bytes per token that one MLP of this width keeps."""
    return 5 * part.precision.weight * width // part.layout.tensor


def experts_bytes(part: ModelShard) -> int:
    """Bytes per token of all tensor ranks together that a layer's experts keep, with routing and the MLP beside
    them."""
    experts, weight, layout = part.shape.experts, part.precision.weight, part.layout
    assert experts is not None
    routing_weight = 4 if experts.sigmoid is not None else weight
    routing = experts.count * (4 + 2 * routing_weight + 2) + 8 * experts.per_token
    if experts.renormalise:
        routing += 4 * (experts.per_token + 1)
    of_copy = layout.expert_tensor * (part.shape.hidden_size * weight + routing_weight) + 8
    of_copy += 6 * weight * experts.ffn_hidden_size
    gate = weight * (part.shape.hidden_size + 2) if experts.shared_gate else 0
    return mlp_bytes(part, experts.shared_width) + (routing + experts.per_token * of_copy + gate) // part.shares


def forward_bytes(part: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Peak bytes of a forward pass without gradient. Each MoE layer's token dispatcher keeps its last routing
    metadata."""
    if not part.shape.has_experts(layer):
        return batch.tokens * mlp_bytes(part, part.shape.ffn_hidden_size)
    experts, weight = part.shape.experts, part.precision.weight
    assert experts is not None
    known = experts.count * (1 + (4 if experts.sigmoid is not None else weight)) + 8 * experts.per_token
    known *= sum(map(part.shape.has_experts, part.stage.layers))
    sorted_once = _copies(part, batch) * part.layout.expert_tensor
    return sorted_once + _experts_at_work(part, batch) + batch.tokens * known // part.shares


def update_bytes(part: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Peak bytes of an update beyond what is kept. Experts have theirs at the end of the forward pass, beside the
    layer's input; an MLP when the backward pass comes to it: gradients of its output, and of gate and up."""
    hidden = batch.tokens * part.hidden_bytes
    if part.shape.has_experts(layer):
        return _experts_at_work(part, batch) + hidden
    return hidden + batch.tokens * 2 * part.precision.weight * part.shape.ffn_hidden_size // part.layout.tensor


def _experts_at_work(part: ModelShard, batch: MicrobatchShape) -> int:
    """Bytes of experts at work, beside tokens in the order of the experts: tokens as they were sent and, where ranks
    exchange them, as they came, or as they go back; outputs of the experts, and these in the order of the tokens; the
    output of the MLP beside them."""
    times = 1 + (part.layout.expert > 1) + (part.layout.expert_tensor > 1) + 2 * part.layout.expert_tensor
    return times * _copies(part, batch) + batch.tokens * part.hidden_bytes


def _copies(part: ModelShard, batch: MicrobatchShape) -> int:
    """Bytes of all copies of this rank's tokens."""
    assert part.shape.experts is not None
    return batch.tokens * part.hidden_bytes * part.shape.experts.per_token
