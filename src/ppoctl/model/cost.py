"""The cost of a model, from numbers of its configuration: parameters, and FLOPs of a token."""

from dataclasses import dataclass

from ppoctl.model.shape import ModelShape


@dataclass(frozen=True)
class LayerParameters:
    """Parameters of one layer, by how ranks can share them."""

    split: int
    """Parameters that tensor ranks split: matrices of attention and of the MLP, or of the one beside experts."""
    experts: int
    """Parameters that expert ranks split."""
    whole: int
    """Parameters that every tensor rank has: norms, products to latents, router and gate of experts."""


def layer_parameters(shape: ModelShape, layer: int) -> LayerParameters:
    """Parameters of this layer of the model. Biases that are not trained do not count."""
    hidden, latent, experts = shape.hidden_size, shape.latent, shape.experts
    biases = (shape.query_channels + 2 * shape.key_channels) * shape.qkv_bias
    norms = shape.hidden_norms * hidden + 2 * shape.head_dim * shape.qk_norm
    latent_norms = 0 if latent is None else (latent.query_rank or 0) + latent.kv_rank
    split, whole = _products_of_heads(shape) + biases, norms + _products_to_latents(shape) + latent_norms
    if experts is None or not shape.has_experts(layer):
        return LayerParameters(split + 3 * hidden * shape.ffn_hidden_size, 0, whole)
    return LayerParameters(
        split=split + 3 * hidden * experts.shared_width,
        experts=3 * hidden * experts.count * experts.ffn_hidden_size,
        whole=whole + (experts.count + experts.shared_gate) * hidden,
    )


def count_parameters(shape: ModelShape) -> int:
    """Parameters of an actor as it is published: without the rows that pad the embedding here."""
    layers = [layer_parameters(shape, layer) for layer in range(shape.num_layers)]
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return sum(layer.split + layer.experts + layer.whole for layer in layers) + shape.hidden_size + tables


@dataclass(frozen=True)
class TokenCost:
    """The cost of a sequence in a causal decoder: a part per token, and a part per pair of a token and one it
    sees."""

    flops_per_token: float
    flops_per_pair: float

    @staticmethod
    def of_decoder(parameters: int, num_layers: int, num_heads: int, head_dim: int) -> "TokenCost":
        """The forward pass of a decoder; a backward pass is twice that in both parts, and the split the same.

        A token meets `parameters` weights in one multiplication and one addition each (of a mixture of experts: those
        it is routed to; embeddings are looked up and do not count). A pair is one product of queries and keys and one
        of weights and values, over `num_heads * head_dim` numbers in each layer: 2 * 2 * heads * head_dim * layers
        (PaLM, arXiv:2204.02311, appendix B: 12 L H Q T per token for forward and backward, both halves of the mask).
        """
        return TokenCost(2.0 * parameters, 4.0 * num_layers * num_heads * head_dim)


def token_cost(shape: ModelShape) -> TokenCost:
    """The cost of a token in the layers: with experts, those it is routed to and the choice among all of them."""
    width = shape.num_layers * 3 * shape.ffn_hidden_size
    if shape.experts is not None:
        mixed = shape.experts.count + 3 * (shape.experts.active_width - shape.ffn_hidden_size)
        width += sum(shape.experts.layers) * mixed
    attention = _products_of_heads(shape) + _products_to_latents(shape)
    parameters = shape.num_layers * attention + shape.hidden_size * width
    return TokenCost.of_decoder(parameters, shape.num_layers, shape.num_heads, shape.head_dim)


def forward_flops(shape: ModelShape, tokens: int, outputs: int) -> float:
    """Operations of a forward pass over one sequence, in the layers and in an output layer of so many numbers."""
    cost, pairs = token_cost(shape), tokens * (tokens + 1) / 2
    head = 2.0 * outputs * shape.hidden_size
    return (cost.flops_per_token + head) * tokens + cost.flops_per_pair * pairs


def _products_of_heads(shape: ModelShape) -> int:
    """Weights of a layer that make queries, keys and values, and of the projection behind them."""
    latent, hidden = shape.latent, shape.hidden_size
    if latent is None:
        return hidden * 2 * (shape.query_channels + shape.key_channels)
    queries = (latent.query_rank or hidden) * shape.query_channels
    keys_and_values = latent.kv_rank * (shape.num_heads * latent.nope_dim + shape.output_channels)
    return queries + keys_and_values + hidden * shape.output_channels


def _products_to_latents(shape: ModelShape) -> int:
    """Weights of a layer that make latents, and the key's channels with position; 0 where attention is plain."""
    latent = shape.latent
    return 0 if latent is None else shape.hidden_size * ((latent.query_rank or 0) + latent.kv_rank + latent.rope_dim)
