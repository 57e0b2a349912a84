"""The numbers of a model that decide bytes, from its config.json, and how many parameters which rank has.

Families: Llama, Qwen2, Qwen3, and Qwen's mixtures of experts. Letters: T tensor ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppoctl.recipe.parallel import ParallelTable

VOCAB_MULTIPLE = 64
"""The embedding's rows are padded to a multiple of it under every layout (`convert.shape`)."""

_FAMILIES = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in a layer."""

    number: int
    per_token: int
    """Experts that a token is routed to."""
    inner: int
    """Width of one."""
    shared: int = 0
    """Width of the MLP beside them that every token meets; it has a gate of one number per token."""

    @property
    def active(self) -> int:
        """What a token meets, as the width of one MLP."""
        return self.per_token * self.inner + self.shared


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
    qkv_bias: bool
    head_norms: bool
    """Queries and keys are normed, head by head."""
    experts: Experts | None
    """In every layer; None: a dense model."""

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
        """Channels of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Split over tensor ranks: the projections of one layer, biases included."""
        projections = self.hidden * (2 * self.queries + 2 * self.keys)
        return projections + (self.queries + 2 * self.keys if self.qkv_bias else 0)

    @property
    def mlp_parameters(self) -> int:
        """Split over tensor ranks: the MLP of one layer, or its experts."""
        if self.experts is None:
            return 3 * self.hidden * self.inner
        return 3 * self.hidden * (self.experts.number * self.experts.inner + self.experts.shared)

    @property
    def whole_parameters(self) -> int:
        """Of a layer, on every tensor rank: two norms, norms of heads, router and gate of the experts."""
        router = 0 if self.experts is None else (self.experts.number + bool(self.experts.shared)) * self.hidden
        return 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0) + router

    @property
    def parameters(self) -> int:
        """Of the model as it is published."""
        layer = self.attention_parameters + self.mlp_parameters + self.whole_parameters
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + self.hidden + tables

    @property
    def multiplied_parameters(self) -> int:
        """Those that a token meets in a matrix product: without the embedding, of experts those it is routed to."""
        width = self.inner if self.experts is None else self.experts.active
        return self.layers * (self.attention_parameters + 3 * self.hidden * width) + self.vocab * self.hidden


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds."""

    number: int
    layers: int
    is_first: bool
    is_last: bool


def decoder_of(config: Mapping[str, Any]) -> Decoder | None:
    """The model that a config.json describes; None where it is of no known family or lacks a number."""
    if config.get("model_type") not in _FAMILIES:
        return None
    try:
        layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
        inner, vocab = config["intermediate_size"], config["vocab_size"]
        experts = _experts(config)
    except KeyError:
        return None
    if experts is None and any(key in config for key in ("num_local_experts", "n_routed_experts", "num_experts")):
        return None
    return Decoder(
        layers=layers,
        hidden=hidden,
        inner=inner,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=vocab,
        tied=bool(config.get("tie_word_embeddings")),
        qkv_bias=config["model_type"] in ("qwen2", "qwen2_moe") or bool(config.get("attention_bias")),
        head_norms=config["model_type"].startswith("qwen3"),
        experts=experts,
    )


def _experts(config: Mapping[str, Any]) -> Experts | None:
    """Raises KeyError where layers differ: a mixture with some dense layers is not counted."""
    if config["model_type"] not in ("qwen2_moe", "qwen3_moe"):
        return None
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise KeyError("mlp_only_layers")
    shared = config["shared_expert_intermediate_size"] if config["model_type"] == "qwen2_moe" else 0
    return Experts(config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"], shared)


def count_parameters(config: Mapping[str, Any]) -> int | None:
    """Parameters of the published model; None where the family is not known."""
    decoder = decoder_of(config)
    return None if decoder is None else decoder.parameters


def stages_of(decoder: Decoder, layout: ParallelTable) -> list[Stage]:
    """Layers over pipeline ranks: those of a written end first, the rest evenly."""
    first, last, ranks = layout.first_stage_layers, layout.last_stage_layers, layout.pipeline
    ends = (first is not None) + (last is not None)
    even = (decoder.layers - (first or 0) - (last or 0)) // max(1, ranks - ends)
    counts = [even] * ranks
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return [
        Stage(number, count, is_first=number == 0, is_last=number == ranks - 1) for number, count in enumerate(counts)
    ]


def runs_of(stage: Stage, layout: ParallelTable) -> list[Stage]:
    """The runs of layers of a pipeline rank: one, or several where stages are interleaved."""
    count = layout.stages_per_rank
    return [
        Stage(stage.number, stage.layers // count, stage.is_first and run == 0, stage.is_last and run == count - 1)
        for run in range(count)
    ]


def rank_parameters(decoder: Decoder, role: str, stage: Stage, tensor: int) -> int:
    """Parameters of one tensor rank in a pipeline stage: its slice of every matrix, the whole of every norm.

    A critic has a row of one value in place of the output layer; the last stage of a tied actor has its own copy of
    the embedding, unless it is also the first.
    """
    table = decoder.padded_vocab * decoder.hidden // tensor
    split = decoder.attention_parameters + decoder.mlp_parameters
    total = stage.layers * (split // tensor + decoder.whole_parameters)
    if stage.is_first:
        total += table
    if stage.is_last:
        total += decoder.hidden  # the final norm
        if role == "critic":
            total += decoder.hidden
        elif not (decoder.tied and stage.is_first):
            total += table
    return total
