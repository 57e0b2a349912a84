"""The numbers that define a model, independent of the engine that computes it."""

from dataclasses import dataclass
from typing import Literal

from ppoctl.models.rope import Rope

VOCAB_MULTIPLE = 64
"""Multiple to which the embedding's rows are padded, so that tensor ranks can split them evenly."""

Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class SigmoidRouting:
    """Routing by sigmoids (DeepSeek-V3): a sigmoid and an untrained bias score each expert; groups of experts are
    chosen first, then experts in those groups."""

    groups: int
    """Number of groups into which the experts of a layer are divided, in order."""
    groups_per_token: int
    """Number of groups whose experts a token may be routed to."""
    scale: float
    """Factor of the routing weights of the chosen experts."""


@dataclass(frozen=True)
class ExpertShape:
    """The mixture of experts of one model."""

    count: int
    """Number of experts in a layer."""
    per_token: int
    """Number of experts that each token is routed to."""
    ffn_hidden_size: int
    """Width of one expert."""
    renormalise: bool
    """Whether the routing weights of the chosen experts are divided by their sum."""
    layers: tuple[bool, ...]
    """Whether each layer of the model has experts; the others have one MLP for all tokens."""
    shared_ffn_hidden_size: int | None = None
    """Width of the shared expert, an additional MLP for every token; None: there is none."""
    shared_gate: bool = False
    """Whether the output of the shared expert is multiplied by a gate: the sigmoid of one number per token."""
    sigmoid: SigmoidRouting | None = None
    """Sigmoid routing; None: softmax over all experts of a layer."""

    @property
    def shared_width(self) -> int:
        """Width of the shared expert; 0: there is none."""
        return self.shared_ffn_hidden_size or 0

    @property
    def active_width(self) -> int:
        """Total width of the experts that process a token in a layer."""
        return self.per_token * self.ffn_hidden_size + self.shared_width


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: keys and values of all heads are computed from a small latent (DeepSeek-V2)."""

    query_rank: int | None
    """Channels of the latent from which queries are computed; None: they are computed from the hidden state."""
    kv_rank: int
    """Channels of the latent from which values, and keys without position, are computed."""
    nope_dim: int
    """Channels of a head's queries and keys without position."""
    rope_dim: int
    """Channels of a head's queries and keys with position. They follow the channels without position. All heads share
    the key channels with position."""
    value_dim: int
    """Channels of a head's values."""
    norm_eps: float
    """Epsilon of the latents' norms; other norms have the model's epsilon."""

    @property
    def head_dim(self) -> int:
        """Channels of a head's queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs and RMS norms."""

    family: str
    """The `model_type` of its config.json."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of the MLP of a layer without experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Channels of a head's queries and keys."""
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    """Whether embedding and output layer are one matrix."""
    activation: Activation = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys of each head are normalized."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + weight, in float32; False: by weight."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normalized before they are added to the residual."""
    embedding_scale: float | None = None
    """Factor of embeddings, rounded to the model's dtype."""
    attention_scale: float | None = None
    """Factor of queries times keys; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Cap c of attention scores, c tanh(score / c); None: no cap."""
    logit_softcap: float | None = None
    """Cap c of logits, c tanh(logit / c); None: no cap."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens, including the token itself; None: full attention. Empty: no layer has a
    window."""
    window_rope: Rope | None = None
    """RoPE of layers with a sliding window; None: that of all layers."""
    experts: ExpertShape | None = None
    """Mixture of experts; None: a dense model."""
    latent: LatentShape | None = None
    """Latent attention; None: plain grouped-query attention."""
    labels: int = 1
    """Number of outputs of the head, if the model has one in place of logits: 1 for a critic."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding, padded to the same multiple under every layout, so that a state loads under any."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def query_channels(self) -> int:
        """Channels of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def key_channels(self) -> int:
        """Channels of all key heads together, and of all value heads of plain attention."""
        return self.num_kv_heads * self.head_dim

    @property
    def output_channels(self) -> int:
        """Channels of the outputs of all heads together, equal to the channels of their values."""
        return self.query_channels if self.latent is None else self.num_heads * self.latent.value_dim

    @property
    def hidden_norms(self) -> int:
        """Number of norms over the hidden state in a layer."""
        return 4 if self.post_norms else 2

    @property
    def rope_dim(self) -> int:
        """Channels of a head that RoPE rotates."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different RoPEs of the layers."""
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    @property
    def keeps_scores(self) -> bool:
        """Whether attention must materialize its scores: torch's fused kernels do not cap scores."""
        return self.attention_softcap is not None

    def has_experts(self, layer: int) -> bool:
        """Whether this layer of the model has experts."""
        return self.experts is not None and self.experts.layers[layer]

    def window(self, layer: int) -> int | None:
        """Return the sliding window of this layer in tokens, including the token itself; None: full attention."""
        return self.windows[layer] if self.windows else None
