"""Bytes of vLLM, and of weights on their way to it.

trainer rank: gathers, checksums, packs -> its own memory, or the object store -> every engine of the node reads it
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ppoctl.convert.tensors import tensor_sizes
from ppoctl.model.shape import ModelShape
from ppoctl.plan.memory.pipeline import PipelineStage, rank_parameters, stages_of, whole_model
from ppoctl.recipe.schema import ClusterTable, GeneratorTable, ParallelTable


@dataclass(frozen=True)
class GeneratorBytes:
    """Bytes of one process of an engine; all tensor ranks of an engine have equally many. The work on a batch of
    tokens is not counted on a CPU, and is within the engine's share of a GPU."""

    engines: int
    tensor: int
    """Processes of one engine."""
    weights: int
    kv_cache: int
    kv_tokens: int
    """Tokens whose keys and values fit an engine."""
    full_sequences: int
    """Sequences of full length whose keys and values fit an engine. vLLM does not start where it is 0."""
    sequence_bytes: int
    """Bytes of one sequence of full length in the cache."""

    @property
    def processes(self) -> int:
        return self.engines * self.tensor

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache


@dataclass(frozen=True)
class BucketCopies:
    """Copies of a bucket of weights that exist at one time."""

    sender: int
    """Copies on the device of a rank that sends."""
    engine: int
    """Copies on the device of an engine."""
    host: int
    """Copies in a node's host memory."""


SHARED = BucketCopies(sender=3, engine=1, host=0)
"""Copies with `shared`: the sender gathers one and holds two out; the engine copies one."""
STORED = BucketCopies(sender=1, engine=0, host=3)
"""Copies with `store`: the sender gathers one; the host has it packed and stored, and the one before it, which is
loaded."""
BROADCAST = BucketCopies(sender=3, engine=2, host=0)
"""Copies with `broadcast`: the sender gathers and packs one while the one before is on its way; the engine receives
one while it loads one."""


@dataclass(frozen=True)
class TransferBytes:
    """Bytes of the actor's weights on their way to engines in other processes."""

    buckets: tuple[int, ...] = ()
    """Bytes of each bucket: tensors as long as they fit, or one that does not."""
    copies: BucketCopies = SHARED
    published: int = 0
    """Bytes that a rank keeps in host memory for engines that die; 0 where they are in Ray's object store, or on
    disk."""

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
        """Bytes in flight at one time, wherever they are."""
        return self.on_sender + self.on_engine + self.on_host


def copies_of(cluster: ClusterTable, *, one_node: bool) -> BucketCopies:
    """Copies of a bucket that exist at once, for the recipe's `cluster.weights`. For engines on several nodes a rank
    stores as well: some may have no trainer rank on their node, and one that dies may be on any."""
    if cluster.weights != "shared":
        return {"store": STORED, "broadcast": BROADCAST}[cluster.weights]
    return SHARED if one_node else BucketCopies(SHARED.sender, SHARED.engine, STORED.host)


def on_cpu(shape: ModelShape, weight: int, table: GeneratorTable, window: int) -> GeneratorBytes:
    """Bytes of engines on CPUs, with the cache that the recipe gives each process; `window`: tokens of a full
    sequence. A tied output layer has a packed copy of its own."""
    copy = shape.padded_vocab_size * shape.hidden_size // table.tensor if shape.tied_embeddings else 0
    weights = (_parameters(shape, table.tensor) + copy) * weight
    per_token = 2 * shape.num_layers * shape.key_channels // table.tensor * weight
    return _engines(table, weights, table.kv_cache_mib * 2**20, per_token, window)


def on_gpu(shape: ModelShape, weight: int, table: GeneratorTable, gpu_bytes: float, window: int) -> GeneratorBytes:
    """Bytes of engines on GPUs, with a share of each GPU for all they do. All that weights leave is counted as cache,
    though the work on a batch comes off it first. `window`: tokens of a full sequence."""
    weights = _parameters(shape, table.tensor) * weight
    cache = max(0, int(table.gpu_memory_frac * gpu_bytes) - weights)
    return _engines(table, weights, cache, _kv_bytes(shape, weight, table.tensor), window)


def transfer_bytes(
    shape: ModelShape, layout: ParallelTable, weight: int, bucket_bytes: int, copies: BucketCopies = SHARED
) -> TransferBytes:
    """Bytes of weights on their way from trainer processes of this layout, pipeline rank by pipeline rank."""
    buckets: list[int] = []
    for stage in stages_of(shape, layout):
        buckets += _as_they_fit((numbers * weight for numbers in _tensors(shape, stage)), bucket_bytes)
    return TransferBytes(tuple(buckets), copies)


def _as_they_fit(sizes: Iterable[int], most: int) -> Iterator[int]:
    total = 0
    for size in sizes:
        if total and total + size > most:  # a tensor that is larger than a bucket goes alone
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
    """Bytes of one token in the cache of one engine process on a GPU. Latent attention caches the latent and the
    rotated key, whole in each process; on a CPU it is plain attention (`engines.vllm.environment`). Windows are
    counted as whole contexts."""
    if shape.latent is not None:
        return shape.num_layers * (shape.latent.kv_rank + shape.latent.rope_dim) * weight
    return 2 * shape.num_layers * shape.key_channels // tensor * weight


def _parameters(shape: ModelShape, tensor: int) -> int:
    """Parameters of one engine process. vLLM, too, splits matrices, those of experts among them, and pads the
    vocabulary to a multiple of 64."""
    layout = ParallelTable(tensor=tensor, expert_tensor=tensor)
    return rank_parameters(shape, "actor", whole_model(shape), layout).total


def _tensors(shape: ModelShape, stage: PipelineStage) -> Iterator[int]:
    """Sizes, in numbers, of the tensors of a pipeline stage, in the order in which they are sent."""
    table = shape.vocab_size * shape.hidden_size
    if stage.is_first:
        yield table
    for layer in stage.layers:
        yield from tensor_sizes(shape, layer)
    if stage.is_last:
        yield shape.hidden_size
        if not shape.tied_embeddings:
            yield table
