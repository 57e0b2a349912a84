"""The cost of a model, computed from its configuration: number of parameters, and FLOPs per token."""

from collections import Counter
from dataclasses import dataclass, replace

from ppoctl.models.shape import ModelShape


def count_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of an actor as it is published, without ppoctl's padding of the embedding."""
    layers = sum(_layer_parameters(shape, layer) for layer in range(shape.num_layers))
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return layers + shape.hidden_size + tables


def _layer_parameters(shape: ModelShape, layer: int) -> int:
    """Return the number of parameters of this layer. Biases that are not trained are not counted."""
    hidden, latent, experts = shape.hidden_size, shape.latent, shape.experts
    biases = (shape.query_channels + 2 * shape.key_channels) * shape.qkv_bias
    norms = shape.hidden_norms * hidden + 2 * shape.head_dim * shape.qk_norm
    latent_norms = 0 if latent is None else (latent.query_rank or 0) + latent.kv_rank
    rest = _products_of_heads(shape) + _products_to_latents(shape) + biases + norms + latent_norms
    if experts is None or not shape.has_experts(layer):
        return rest + 3 * hidden * shape.ffn_hidden_size
    widths = experts.shared_width + experts.count * experts.ffn_hidden_size
    return rest + (3 * widths + experts.count + experts.shared_gate) * hidden


@dataclass(frozen=True)
class TokenCost:
    """The cost of a sequence in a causal decoder: FLOPs per token, and FLOPs per pair of a token and a token that it
    attends to, in layers without and with a sliding window."""

    flops_per_token: float
    flops_per_pair: float
    """FLOPs of a pair in the layers without a window."""
    flops_in_windows: tuple[tuple[int, float], ...] = ()
    """For each window in tokens, the FLOPs of a pair in the layers with this window."""

    def of_sequence(self, tokens: int) -> float:
        """Return the FLOPs of a sequence of this number of tokens.

        t tokens have t * (t + 1) / 2 (query, key) pairs, because a token attends to itself and all earlier tokens. In
        a layer with a window of w tokens, the pairs of the last t - w tokens with the tokens before their windows are
        missing: 1 + 2 + ... + (t - w).
        """
        pairs = tokens * (tokens + 1) / 2
        total = tokens * self.flops_per_token + pairs * self.flops_per_pair
        for window, flops in self.flops_in_windows:
            before = max(tokens - window, 0)
            total += (pairs - before * (before + 1) / 2) * flops
        return total

    @staticmethod
    def of_decoder(parameters: int, num_layers: int, num_heads: int, head_dim: int) -> "TokenCost":
        """Return the cost of the forward pass of a decoder. The backward pass costs twice as much in both parts.

        A token takes one multiplication and one addition for each of `parameters` weights (with experts: the weights
        that it is routed to; embedding lookups are not counted). A pair takes one product of queries and keys and one
        of attention weights and values, over `num_heads * head_dim` channels in each layer: 2 * 2 * heads * head_dim
        * layers. PaLM (arXiv:2204.02311, appendix B) has 12 L H Q T per token, because it counts forward and backward
        pass and does not halve the pairs for the causal mask.
        """
        return TokenCost(2.0 * parameters, 4.0 * num_layers * num_heads * head_dim)


def token_cost(shape: ModelShape, first: int = 0) -> TokenCost:
    """Return the cost of a token in the layers from `first` on. With experts, the router and the experts of the token
    are counted. Attention that materializes its scores computes the pairs outside of a window, too."""
    layers = shape.num_layers - first
    width = layers * 3 * shape.ffn_hidden_size
    if shape.experts is not None:
        mixed = shape.experts.count + 3 * (shape.experts.active_width - shape.ffn_hidden_size)
        width += sum(shape.experts.layers[first:]) * mixed
    attention = _products_of_heads(shape) + _products_to_latents(shape)
    parameters = layers * attention + shape.hidden_size * width
    cost = TokenCost.of_decoder(parameters, layers, shape.num_heads, shape.head_dim)
    windows = Counter(window for window in shape.windows[first:] if window is not None)
    if shape.keeps_scores or not windows:
        return cost
    of_layer = cost.flops_per_pair / layers
    by_window = tuple((window, count * of_layer) for window, count in sorted(windows.items()))
    return replace(cost, flops_per_pair=of_layer * (layers - windows.total()), flops_in_windows=by_window)


def forward_flops(shape: ModelShape, tokens: int, outputs: int, first: int = 0) -> float:
    """Return the FLOPs of a forward pass over one sequence: the layers from `first` on, and an output layer with this
    number of outputs."""
    return token_cost(shape, first).of_sequence(tokens) + 2.0 * outputs * shape.hidden_size * tokens


def _products_of_heads(shape: ModelShape) -> int:
    """Return the number of weights of a layer that compute queries, keys and values, and of the output projection."""
    latent, hidden = shape.latent, shape.hidden_size
    if latent is None:
        return hidden * 2 * (shape.query_channels + shape.key_channels)
    queries = (latent.query_rank or hidden) * shape.query_channels
    keys_and_values = latent.kv_rank * (shape.num_heads * latent.nope_dim + shape.output_channels)
    return queries + keys_and_values + hidden * shape.output_channels


def _products_to_latents(shape: ModelShape) -> int:
    """Return the number of weights of a layer that compute latents, and the key's channels with position; 0 for plain
    attention."""
    latent = shape.latent
    return 0 if latent is None else shape.hidden_size * ((latent.query_rank or 0) + latent.kv_rank + latent.rope_dim)
