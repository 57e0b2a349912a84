"""The numbers that define one model, whatever engine computes it."""

from dataclasses import dataclass
from typing import Literal

from ppoctl.model.rope import Rope

VOCAB_MULTIPLE = 64
"""The embedding's rows are padded to a multiple of it: what tensor parallelism can split evenly."""

Activation = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class SigmoidRouting:
    """Experts are chosen by a sigmoid each and a bias that is not trained, groups of them first (DeepSeek-V3)."""

    groups: int
    """Groups that the experts of a layer are in, in their order."""
    groups_per_token: int
    """Groups whose experts a token may be routed to."""
    scale: float
    """Factor of the weights of the chosen experts."""


@dataclass(frozen=True)
class ExpertShape:
    """The mixture of experts of one model."""

    count: int
    """Experts of a layer."""
    per_token: int
    """Experts each token is routed to."""
    ffn_hidden_size: int
    """Width of one expert."""
    renormalise: bool
    """Divide the weights of the chosen experts by their sum."""
    layers: tuple[bool, ...]
    """Whether each layer of the model has experts; the others have one MLP for all tokens."""
    shared_ffn_hidden_size: int | None = None
    """Width of an MLP beside the experts that every token meets; None: there is none."""
    shared_gate: bool = False
    """Scale the output of that MLP, token by token, by the sigmoid of one number."""
    sigmoid: SigmoidRouting | None = None
    """How sigmoids choose experts; None: a softmax over all experts of a layer does."""

    @property
    def shared_width(self) -> int:
        """Width of the MLP beside the experts; 0: there is none."""
        return self.shared_ffn_hidden_size or 0

    @property
    def active_width(self) -> int:
        """What a token meets of a layer's experts, as the width of one MLP."""
        return self.per_token * self.ffn_hidden_size + self.shared_width


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
    """Channels with position, behind those without; the key's are one for all heads."""
    value_dim: int
    """Channels of a head's values."""
    norm_eps: float
    """Epsilon of the norms of latents; others have the model's."""

    @property
    def head_dim(self) -> int:
        """Channels of a head's queries and keys."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with gated MLPs and RMS norms."""

    family: str
    """`model_type` of its config.json."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of a layer's MLP, where it has no experts."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Channels of a head's queries and keys."""
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    """Embedding and output layer are one matrix."""
    activation: Activation = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised, head by head."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight, in float32; otherwise by weight."""
    post_norms: bool = False
    """The outputs of attention and MLP are normalised before they are added to the residual."""
    embedding_scale: float | None = None
    """Embeddings are multiplied by it, rounded to the model's dtype."""
    attention_scale: float | None = None
    """Factor of queries times keys; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """The c of c tanh(score / c); None: scores are not capped."""
    logit_softcap: float | None = None
    """The c of c tanh(logit / c); None: logits are not capped."""
    windows: tuple[int | None, ...] = ()
    """Layer by layer, how many tokens a token sees, itself included; None: all before it. Empty: all layers so."""
    experts: ExpertShape | None = None
    """None: a dense model."""
    latent: LatentShape | None = None
    """None: plain attention, every head with queries of its own, groups of them with keys and values."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding. A multiple of the same number under any layout, so that states fit all of them."""
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
        """Channels of the outputs of all heads together: as wide as their values."""
        return self.query_channels if self.latent is None else self.num_heads * self.latent.value_dim

    @property
    def hidden_norms(self) -> int:
        """Norms of a layer over the hidden state."""
        return 4 if self.post_norms else 2

    @property
    def rope_dim(self) -> int:
        """Channels of a head that RoPE rotates."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def has_experts(self, layer: int) -> bool:
        """Whether this layer of the model has experts."""
        return self.experts is not None and self.experts.layers[layer]

    def window(self, layer: int) -> int | None:
        """How many tokens a token sees in this layer, itself included; None: all before it."""
        return self.windows[layer] if self.windows else None

    def keeps_scores(self, layer: int) -> bool:
        """Whether this layer's attention has to be written out, score by score: torch's fused kernels neither cap
        scores nor know windows."""
        return self.attention_softcap is not None or self.window(layer) is not None
