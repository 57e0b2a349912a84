"""Activations that the MLP or the experts of a layer keep for the backward pass, and their peak memory.

Letters, in addition to those of `activations`: E experts of a layer, k of them per token, f width of an expert,
t ranks that split an expert (`expert_tensor`), F' width of the shared MLP, p bytes of a routing weight (b, or 4 for a
router with sigmoids).

    per token             bytes
    gated MLP             5 b F / T, with fused kernels 3 b F / T
    shared MLP            5 b F' / T, with fused kernels 3 b F' / T, with a gate (b h + 2 b) / S
    experts               k (b h t + 6 b f + p t + 8) / S, with fused kernels 3 b f instead of 6 b f
    routing               (E (4 + 2 p + 2) + 8 k + 4 (k + 1)) / S

- An MLP keeps gate and up (2F), silu of the gate, up (a copy: Megatron-Core adds an offset of 0), and the product.
  The product is the input of the second projection: a frozen one without an adapter keeps 4 F.
- Fused kernels keep gate and up, and compute the rest again in the backward pass.
- Experts also keep the product times the routing weight, and copies of tokens: each token is sent to k experts, and
  each rank with a slice of an expert receives all tokens of the expert. Frozen experts keep b h t and b f less.
- Assumed: all experts receive equally many tokens. Nothing is dropped or padded, so a rank whose experts are chosen
  twice as often keeps twice as many bytes.
- Routing keeps scores in float32, weights by token and by expert, two masks, and indices. The term 4 (k + 1) exists
  only if the chosen weights are divided by their sum.
- Experts run one after the other, on CPU and GPU alike. Their inputs and outputs, and both in the order of the
  tokens, are in memory together.
"""

from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard

_EXPERT = "mlp.experts.local_experts.{expert}"


def mlp_bytes(shard: ModelShard, layer: int) -> int:
    """Return the bytes per token that the MLP of a layer without experts keeps."""
    return _kept(shard, shard.shape.ffn_hidden_size, keeps_product=shard.has_gradient(layer, "mlp.linear_fc2"))


def _kept(shard: ModelShard, width: int, *, keeps_product: bool = True) -> int:
    """Return the bytes per token that one MLP of this width keeps."""
    numbers = 2 if shard.kernels == "fused" else 4
    return (numbers + keeps_product) * shard.precision.weight * width // shard.layout.tensor


def experts_bytes(shard: ModelShard, layer: int) -> int:
    """Return the bytes per token that the experts of a layer keep on all tensor ranks together.

    Routing and the shared MLP are included.
    """
    experts, weight, layout = shard.shape.experts, shard.precision.weight, shard.layout
    assert experts is not None
    routing_weight = 4 if experts.sigmoid is not None else weight
    routing = experts.count * (4 + 2 * routing_weight + 2) + 8 * experts.per_token
    if experts.renormalise:
        routing += 4 * (experts.per_token + 1)
    first, second = (shard.has_gradient(layer, f"{_EXPERT}.linear_fc{number}") for number in (1, 2))
    per_copy = layout.expert_tensor * (first * shard.shape.hidden_size * weight + routing_weight) + 8
    per_copy += ((2 if shard.kernels == "fused" else 5) + second) * weight * experts.ffn_hidden_size
    gate = weight * (shard.shape.hidden_size + 2) if experts.shared_gate else 0
    keeps_product = shard.has_gradient(layer, "mlp.shared_experts.linear_fc2")
    shared = _kept(shard, experts.shared_width, keeps_product=keeps_product)
    return shared + (routing + experts.per_token * per_copy + gate) // shard.shares


def forward_bytes(shard: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Return the peak bytes of a forward pass without gradients.

    The token dispatcher of each MoE layer keeps its last routing metadata. The shared MLP runs before the experts.
    """
    adapted = 3 * shard.adapted_output_bytes(layer, batch.tokens, in_mlp=True)
    if not shard.shape.has_experts(layer):
        width = shard.shape.ffn_hidden_size
        at_work = _kept(shard, width)
        if shard.kernels == "fused" and shard.precision.device == "cpu":  # silu of the gate, without a compiler
            at_work += shard.precision.weight * width // shard.layout.tensor
        return max(adapted, batch.tokens * at_work)
    experts, weight = shard.shape.experts, shard.precision.weight
    assert experts is not None
    metadata = experts.count * (1 + (4 if experts.sigmoid is not None else weight)) + 8 * experts.per_token
    metadata *= sum(map(shard.shape.has_experts, shard.stage.layers))
    sorted_tokens = _copies(shard, batch) * shard.layout.expert_tensor
    shared = batch.tokens * _kept(shard, experts.shared_width)
    at_work = max(adapted, shared, sorted_tokens + _experts_at_work(shard, batch))
    return at_work + batch.tokens * metadata // shard.shares


def update_bytes(shard: ModelShard, batch: MicrobatchShape, layer: int) -> int:
    """Return the peak bytes of an update in addition to the kept activations.

    Experts have their peak at the end of the forward pass, when the input of the layer is in memory, too. An MLP has
    its peak in the backward pass, when the gradients of its output, of gate and of up are in memory.
    """
    hidden = batch.tokens * shard.hidden_bytes
    if shard.shape.has_experts(layer):
        return _experts_at_work(shard, batch) + hidden
    gradients = 2 * shard.precision.weight * shard.shape.ffn_hidden_size // shard.layout.tensor
    return hidden + batch.tokens * gradients


def _experts_at_work(shard: ModelShard, batch: MicrobatchShape) -> int:
    """Return the peak bytes of experts, without the tokens in the order of the experts.

    Counted are the sent tokens and, if ranks exchange tokens, the received or returned tokens. Also counted are the
    outputs of the experts, again in the order of the tokens, and the output of the shared MLP.
    """
    copies = 1 + (shard.layout.expert > 1) + (shard.layout.expert_tensor > 1) + 2 * shard.layout.expert_tensor
    return copies * _copies(shard, batch) + batch.tokens * shard.hidden_bytes


def _copies(shard: ModelShard, batch: MicrobatchShape) -> int:
    """Return the bytes of the tokens of this rank, with one copy of a token for each expert that receives it."""
    assert shard.shape.experts is not None
    return batch.tokens * shard.hidden_bytes * shard.shape.experts.per_token
