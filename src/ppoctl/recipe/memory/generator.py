"""Bytes of vLLM, and of weights on their way to it.

trainer rank: gathers, checksums, packs -> its own memory, or the object store -> every engine of the node reads it
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ppoctl.model.shape import ModelShape
from ppoctl.recipe.memory.stages import Stage, rank_parameters, stages_of, whole_model
from ppoctl.recipe.parallel import ParallelTable
from ppoctl.recipe.schema import GeneratorTable, LocalCluster


@dataclass(frozen=True)
class GeneratorBytes:
    """A process of an engine: its tensor ranks have the same each. The work on a batch of tokens is not counted on a
    CPU, and is within the engine's share of a GPU."""

    engines: int
    tensor: int
    """Processes of an engine."""
    weights: int
    kv_cache: int
    kv_tokens: int
    """Tokens whose keys and values fit an engine."""
    full_sequences: int
    """Sequences of full length that fit an engine. vLLM does not start where it is 0."""
    sequence_bytes: int
    """Of the cache of one."""

    @property
    def processes(self) -> int:
        return self.engines * self.tensor

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache


@dataclass(frozen=True)
class Copies:
    """Of a bucket of weights, at one time."""

    sender: int
    """On the device of a rank that sends."""
    engine: int
    """On that of an engine."""
    host: int
    """In a node's host memory."""


SHARED = Copies(sender=3, engine=1, host=0)
"""One that is gathered, two that are held out; one that the engine has copied."""
STORED = Copies(sender=1, engine=0, host=3)
"""One that is gathered; packed, stored, and the one before it, which is loaded."""
BROADCAST = Copies(sender=3, engine=2, host=0)
"""Gathered, packed, and the one before it on its way; one that arrives while one is loaded."""


@dataclass(frozen=True)
class Sending:
    """The actor's weights on their way to engines that are other processes."""

    buckets: tuple[int, ...] = ()
    """As ranks send them: tensors as long as they fit, or one that does not."""
    copies: Copies = SHARED

    @property
    def largest(self) -> int:
        return max(self.buckets, default=0)

    @property
    def on_sender(self) -> int:
        return self.copies.sender * self.largest

    @property
    def on_engine(self) -> int:
        return self.copies.engine * self.largest

    @property
    def on_host(self) -> int:
        return self.copies.host * self.largest

    @property
    def on_the_way(self) -> int:
        """Wherever."""
        return self.on_sender + self.on_engine + self.on_host


def copies_of(cluster: LocalCluster, nodes: int) -> Copies:
    """By the way that weights go. Apart, engines may be on other nodes than all ranks, and find in the store what is
    shared on theirs."""
    if cluster.weights != "shared":
        return {"store": STORED, "broadcast": BROADCAST}[cluster.weights]
    far = cluster.placement == "apart" and nodes > 1
    return Copies(SHARED.sender, SHARED.engine, STORED.host) if far else SHARED


def on_cpu(shape: ModelShape, weight: int, table: GeneratorTable, window: int) -> GeneratorBytes:
    """Engines with the cache that the recipe gives each process. A tied output layer has a packed copy of its own."""
    copy = shape.padded_vocab_size * shape.hidden_size // table.tensor if shape.tied_embeddings else 0
    weights = (_parameters(shape, table.tensor) + copy) * weight
    per_token = 2 * shape.num_layers * shape.key_channels // table.tensor * weight
    return _engines(table, weights, table.kv_cache_mib * 2**20, per_token, window)


def on_gpu(shape: ModelShape, weight: int, table: GeneratorTable, gpu_bytes: float, window: int) -> GeneratorBytes:
    """Engines with a share of each of their GPUs for all they do: what weights leave is taken for the cache, though
    the work on a batch comes off it first."""
    weights = _parameters(shape, table.tensor) * weight
    cache = max(0, int(table.gpu_memory_frac * gpu_bytes) - weights)
    return _engines(table, weights, cache, _kv_bytes(shape, weight, table.tensor), window)


def sending(
    shape: ModelShape, layout: ParallelTable, weight: int, bucket_bytes: int, copies: Copies = SHARED
) -> Sending:
    """From trainer processes of this layout: pipeline rank by pipeline rank."""
    buckets: list[int] = []
    for stage in stages_of(shape, layout):
        buckets += _as_they_fit((numbers * weight for numbers in _tensors(shape, stage)), bucket_bytes)
    return Sending(tuple(buckets), copies)


def _as_they_fit(sizes: Iterable[int], most: int) -> Iterator[int]:
    total = 0
    for size in sizes:
        if total and total + size > most:
            yield total
            total = 0
        total += size
    if total:
        yield total


def _engines(table: GeneratorTable, weights: int, kv_cache: int, per_token: int, window: int) -> GeneratorBytes:
    tokens = kv_cache // per_token
    return GeneratorBytes(
        table.engines, table.tensor, weights, kv_cache, tokens, tokens // window, window * per_token
    )


def _kv_bytes(shape: ModelShape, weight: int, tensor: int) -> int:
    """Of one token, in one process of an engine on a GPU. Of latent attention the latent and the turned key, whole in
    each; on a CPU it is plain attention (`engines.vllm.environment`). Windows are taken for whole contexts."""
    if shape.latent is not None:
        return shape.num_layers * (shape.latent.kv_rank + shape.latent.rope_dim) * weight
    return 2 * shape.num_layers * shape.key_channels // tensor * weight


def _parameters(shape: ModelShape, tensor: int) -> int:
    """Of one process. vLLM, too, splits matrices, those of experts among them, and pads the vocabulary to a multiple
    of 64."""
    layout = ParallelTable(tensor=tensor, expert_tensor=tensor)
    return rank_parameters(shape, "actor", whole_model(shape), layout).total


def _tensors(shape: ModelShape, stage: Stage) -> Iterator[int]:
    """Numbers in each tensor of a pipeline stage under Hugging Face names, in the order in which they are sent."""
    hidden = shape.hidden_size
    if stage.is_first:
        yield shape.vocab_size * hidden
    for layer in stage.layers:
        yield from _attention_tensors(shape)
        if shape.has_experts(layer):
            yield from _expert_tensors(shape)
        else:
            yield from [hidden * shape.ffn_hidden_size] * 3
        yield from [hidden] * shape.post_norms
    if stage.is_last:
        yield hidden
        if not shape.tied_embeddings:
            yield shape.vocab_size * hidden


def _attention_tensors(shape: ModelShape) -> Iterator[int]:
    """Of one layer, with the two norms around it."""
    hidden, queries, keys, latent = shape.hidden_size, shape.query_channels, shape.key_channels, shape.latent
    if latent is None:
        yield hidden
        yield from (queries * hidden, keys * hidden, keys * hidden)
        if shape.qkv_bias:
            yield from (queries, keys, keys)
        if shape.qk_norm:
            yield from (shape.head_dim, shape.head_dim)
    else:
        rank = latent.query_rank
        yield from (queries * hidden,) if rank is None else (rank * hidden, rank, queries * rank)
        plain_keys = shape.num_heads * (shape.head_dim - latent.rope_dim)
        yield hidden
        yield from ((latent.kv_rank + latent.rope_dim) * hidden, latent.kv_rank)
        yield (plain_keys + shape.output_channels) * latent.kv_rank
    yield from (hidden * shape.output_channels, *[hidden] * (1 + shape.post_norms))


def _expert_tensors(shape: ModelShape) -> Iterator[int]:
    """Of one layer, with the MLP beside them."""
    hidden, experts = shape.hidden_size, shape.experts
    assert experts is not None
    yield experts.count * hidden
    if experts.sigmoid is not None:
        yield experts.count
    yield from [hidden * experts.ffn_hidden_size] * 3 * experts.count
    if experts.shared_width:
        yield from [hidden * experts.shared_width] * 3
    if experts.shared_gate:
        yield hidden
