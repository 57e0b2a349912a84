"""The numbers of a model that decide bytes, and how many parameters it has."""

from dataclasses import dataclass

VOCAB_MULTIPLE = 64
"""The embedding's rows are padded to a multiple of it under every layout (`convert.shape`)."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a model."""

    number: int
    """Of a layer that has them."""
    per_token: int
    """Experts that a token is routed to."""
    inner: int
    """Width of one."""
    layers: tuple[bool, ...]
    """Whether each layer of the model has experts; the others have one MLP."""
    shared: int = 0
    """Width of the MLP beside them that every token meets."""
    shared_gate: bool = False
    """It has a gate of one number per token."""
    renormalised: bool = False
    """Weights of the chosen experts are divided by their sum."""
    by_sigmoid: bool = False
    """Chosen by sigmoids, in float32 (DeepSeek-V3); otherwise by a softmax."""

    @property
    def active(self) -> int:
        """What a token meets, as the width of one MLP."""
        return self.per_token * self.inner + self.shared


@dataclass(frozen=True)
class Latent:
    """Latent attention (DeepSeek-V2): queries, keys and values of all heads come from few channels."""

    query_rank: int | None
    """Channels behind the queries; None: they come from the hidden state."""
    kv_rank: int
    """Channels behind keys without position, and values."""
    rope_dim: int
    """Channels of a head that are turned; the key's are one for all heads."""
    value_dim: int
    """Channels of a head's values."""


@dataclass(frozen=True)
class Scores:
    """Attention that is written out, so that scores are kept (Gemma 2)."""

    capped: bool
    layers: tuple[bool, ...]
    """Whether each layer's attention is."""


@dataclass(frozen=True)
class Decoder:
    """A decoder-only transformer with gated MLPs."""

    layers: int
    hidden: int
    inner: int
    """Width of a layer's MLP, where it has no experts."""
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """Embedding and output layer are one matrix."""
    qkv_bias: bool = False
    head_norms: bool = False
    """Queries and keys are normed, head by head."""
    post_norms: bool = False
    """What attention and MLP say is normed too, and all norms are taken in float32 (Gemma)."""
    capped_logits: bool = False
    experts: Experts | None = None
    """None: a dense model."""
    latent: Latent | None = None
    """None: plain attention."""
    scores: Scores | None = None
    """None: no layer keeps them."""

    @property
    def padded_vocab(self) -> int:
        """Rows of the trainer's embedding."""
        return -(-self.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def queries(self) -> int:
        """Channels of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Channels of all key heads, and of all value heads of plain attention."""
        return self.kv_heads * self.head_dim

    @property
    def values(self) -> int:
        """Channels of what attention says: all heads' values."""
        return self.heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def rope_dim(self) -> int:
        """Channels of a head that are turned."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def norms(self) -> int:
        """Of a layer, over the hidden state."""
        return 4 if self.post_norms else 2

    def has_experts(self, layer: int) -> bool:
        """Whether this layer of the model has a mixture of them."""
        return self.experts is not None and self.experts.layers[layer]

    def keeps_scores(self, layer: int) -> bool:
        """Whether this layer's attention is written out."""
        return self.scores is not None and self.scores.layers[layer]

    @property
    def attention_parameters(self) -> int:
        """Split over tensor ranks: the projections of one layer, biases included."""
        if self.latent is None:
            projections = self.hidden * (2 * self.queries + 2 * self.keys)
            return projections + (self.queries + 2 * self.keys if self.qkv_bias else 0)
        latent = self.latent
        plain_keys = self.heads * (self.head_dim - latent.rope_dim)
        to_queries = (latent.query_rank or self.hidden) * self.queries
        return to_queries + latent.kv_rank * (plain_keys + self.values) + self.hidden * self.values

    @property
    def latent_parameters(self) -> int:
        """Whole on every tensor rank: the products to latents, and the norms of these."""
        if self.latent is None:
            return 0
        queries, keys = self.latent.query_rank or 0, self.latent.kv_rank
        return self.hidden * (queries + keys + self.latent.rope_dim) + queries + keys

    def mlp_parameters(self, layer: int) -> int:
        """Split over tensor ranks: the layer's MLP, or the one beside its experts."""
        if not self.has_experts(layer):
            return 3 * self.hidden * self.inner
        assert self.experts is not None
        return 3 * self.hidden * self.experts.shared

    def expert_parameters(self, layer: int) -> int:
        """Split over expert ranks."""
        if not self.has_experts(layer):
            return 0
        assert self.experts is not None
        return 3 * self.hidden * self.experts.number * self.experts.inner

    def whole_parameters(self, layer: int) -> int:
        """On every tensor rank: norms, products to latents, router and gate of the experts."""
        norms = self.norms * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        router = 0
        if self.has_experts(layer):
            assert self.experts is not None
            router = (self.experts.number + self.experts.shared_gate) * self.hidden
        return norms + self.latent_parameters + router

    @property
    def parameters(self) -> int:
        """Of the model as it is published."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return sum(self._layer(number) for number in range(self.layers)) + self.hidden + tables

    @property
    def multiplied_parameters(self) -> int:
        """Those that a token meets in a matrix product: without the embedding, of experts those it is routed to."""
        total = self.layers * (self.attention_parameters + self.latent_parameters) + self.vocab * self.hidden
        for layer in range(self.layers):
            width = self.experts.active if self.experts and self.has_experts(layer) else self.inner
            total += 3 * self.hidden * width
        return total

    def _layer(self, number: int) -> int:
        split = self.attention_parameters + self.mlp_parameters(number)
        return split + self.expert_parameters(number) + self.whole_parameters(number)
