"""The numbers that define one model, whatever engine computes it."""

from dataclasses import dataclass
from typing import Literal

from ppoctl.batch.cost import TokenCost
from ppoctl.convert.rope import Rope

VOCAB_MULTIPLE = 64
"""The embedding's rows are padded to a multiple of it: what tensor parallelism can split evenly."""

Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class SigmoidRouting:
    """Experts are chosen by a sigmoid each and a bias that is not trained, groups of them first (DeepSeek-V3)."""

    groups: int
    """Experts of a layer are in so many groups, in their order."""
    groups_per_token: int
    """A token is routed to experts of so many groups."""
    scale: float
    """Of the weights of the chosen experts."""


@dataclass(frozen=True)
class ExpertShape:
    """The mixture of experts of one model."""

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
    shared_ffn_hidden_size: int | None = None
    """Of an MLP beside the experts that every token meets; None: there is none."""
    shared_gate: bool = False
    """Scale its output, token by token, by the sigmoid of one number."""
    sigmoid: SigmoidRouting | None = None
    """None: a softmax over all experts of a layer."""

    @property
    def active_width(self) -> int:
        """What a token meets of a layer's experts, as the width of one MLP."""
        return self.per_token * self.ffn_hidden_size + (self.shared_ffn_hidden_size or 0)


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: keys and values of all heads come from a few channels (DeepSeek-V2)."""

    query_rank: int | None
    """Channels that the queries of all heads come from; None: from the hidden state."""
    kv_rank: int
    """Channels that keys without position, and values, come from."""
    nope_dim: int
    """Channels of a head's queries and keys without position."""
    rope_dim: int
    """Those with position, behind the others; the key's are one for all heads."""
    value_dim: int
    """Channels of a head's values."""
    norm_eps: float
    """Of the norms of latents; others have the model's."""

    @property
    def head_dim(self) -> int:
        """Channels of a head's queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs and RMS norms."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    activation: Activation = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised, head by head."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight, in float32; otherwise by weight."""
    post_norms: bool = False
    """What attention and MLP say is normalised before it is added to the residual."""
    embedding_scale: float | None = None
    """Embeddings are multiplied by it, rounded to the model's dtype."""
    attention_scale: float | None = None
    """Of queries times keys; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """c of c tanh(score / c)."""
    logit_softcap: float | None = None
    """c of c tanh(logit / c)."""
    windows: tuple[int | None, ...] = ()
    """Layer by layer, how many tokens a token sees, itself included; None: all before it. Empty: all layers so."""
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    """None: plain attention, every head with queries of its own, groups of them with keys and values."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding. A multiple of the same number under any layout, so that states fit all of them."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def token_cost(self) -> TokenCost:
        """What a token costs in the layers: of experts those it is routed to, and the choice among all of them."""
        width = self.num_layers * 3 * self.ffn_hidden_size
        if self.experts is not None:
            mixed = self.experts.count + 3 * (self.experts.active_width - self.ffn_hidden_size)
            width += sum(self.experts.layers) * mixed
        parameters = self.num_layers * self._attention_parameters + self.hidden_size * width
        return TokenCost.of_decoder(parameters, self.num_layers, self.num_heads, self.head_dim)

    @property
    def rope_dim(self) -> int:
        """Channels of a head that are turned."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def _attention_parameters(self) -> int:
        """Of the products in a layer."""
        latent, hidden, heads = self.latent, self.hidden_size, self.num_heads
        if latent is None:
            return hidden * (heads + self.num_kv_heads) * 2 * self.head_dim
        queries, values = heads * latent.head_dim, heads * latent.value_dim
        rank = latent.query_rank
        to_queries = hidden * queries if rank is None else (hidden + queries) * rank
        to_latent = hidden * (latent.kv_rank + latent.rope_dim)
        return to_queries + to_latent + latent.kv_rank * (heads * latent.nope_dim + values) + hidden * values

    def has_experts(self, layer: int) -> bool:
        """Whether this layer of the model has experts."""
        return self.experts is not None and self.experts.layers[layer]

    def window(self, layer: int) -> int | None:
        """How many tokens a token sees in this layer, itself included; None: all before it."""
        return self.windows[layer] if self.windows else None
