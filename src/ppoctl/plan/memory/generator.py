"""Bytes of vLLM, and of weights on their way to it.

trainer rank: gathers, checksums, packs -> its own memory, or the object store -> every engine of the node reads it
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ppoctl.convert.tensors import tensor_sizes
from ppoctl.model.shape import ModelShape
from ppoctl.plan.memory.pipeline import PipelineStage, rank_parameters, stages_of, whole_model
from ppoctl.recipe.schema import ClusterTable, GeneratorTable, ParallelTable


@dataclass(frozen=True)
class GeneratorBytes:
    """Bytes of one process of an engine; all tensor ranks of an engine have equally many. The work on a batch of
    tokens is not counted on a CPU, and is within the engine's share of a GPU."""

    weights: int
    kv_cache: int
    kv_tokens: int
    """Tokens whose keys and values fit an engine."""
    full_sequences: int
    """Sequences of full length whose keys and values fit an engine. vLLM does not start where it is 0."""
    sequence_bytes: int
    """Bytes of one sequence of full length in the cache."""


COPIES = {
    # The sender gathers one and holds two out; the engine copies one.
    "shared": {"actor": 3, "generator": 1, "node": 0},
    # The sender gathers one; the host has it packed and stored, and the one before it, which is loaded.
    "store": {"actor": 1, "generator": 0, "node": 3},
    # The sender gathers one into host memory that lasts; the engine copies one out of it.
    "kept": {"actor": 1, "generator": 0, "node": 1},
    # The sender gathers and packs one while the one before is on its way; the engine receives one while it loads one.
    "broadcast": {"actor": 3, "generator": 2, "node": 0},
}
"""Copies of a bucket of weights that exist at one time, by `cluster.weights` (`kept`: `store` without Ray): on the
device of a rank that sends, on that of an engine, and in a node's host memory."""


@dataclass(frozen=True)
class TransferBytes:
    """Bytes of the actor's weights on their way to engines in other processes."""

    buckets: tuple[int, ...]
    """Bytes of each bucket: tensors as long as they fit, or one that does not."""
    copies: Mapping[str, int]
    """Copies of a bucket that exist at one time, as in `COPIES`."""
    published: int
    """Bytes that a rank keeps in host memory for engines that die; 0 where they are in Ray's object store, or on
    disk."""

    @property
    def largest(self) -> int:
        return max(self.buckets, default=0)


def copies_of(cluster: ClusterTable, *, one_node: bool, has_ray: bool = True) -> dict[str, int]:
    """Copies of a bucket that exist at once, for the recipe's `cluster.weights`. For engines on several nodes a rank
    stores as well: some may have no trainer rank on their node, and one that dies may be on any."""
    copies = COPIES["kept" if cluster.weights == "store" and not has_ray else cluster.weights]
    return copies if one_node or cluster.weights != "shared" else {**copies, "node": COPIES["store"]["node"]}


def generator_bytes(
    shape: ModelShape, weight: int, table: GeneratorTable, window: int, gpu_bytes: float | None = None
) -> GeneratorBytes:
    """Bytes of one process of an engine; `window`: tokens of a full sequence. On a GPU of `gpu_bytes` it has a share
    for all it does: what weights leave is counted as cache, though the work on a batch comes off it first. On a CPU
    (None) it has the cache that the recipe gives, and a tied output layer has a packed copy of its own.

    vLLM, too, splits matrices, those of experts among them, and pads the vocabulary to a multiple of 64. Latent
    attention caches on a GPU the latent and the rotated key, whole in each process; on a CPU it is plain attention
    (`engines.vllm.environment`). Windows are counted as whole contexts."""
    tensor = table.tensor
    layout = ParallelTable(tensor=tensor, expert_tensor=tensor)
    parameters = rank_parameters(shape, "actor", whole_model(shape), layout).total
    channels = 2 * shape.key_channels // tensor
    if gpu_bytes is None:
        parameters += shape.padded_vocab_size * shape.hidden_size // tensor if shape.tied_embeddings else 0
        cache = table.kv_cache_mib * 2**20
    else:
        cache = max(0, int(table.gpu_memory_frac * gpu_bytes) - parameters * weight)
        if shape.latent is not None:
            channels = shape.latent.kv_rank + shape.latent.rope_dim
    per_token = shape.num_layers * channels * weight
    tokens = cache // per_token
    return GeneratorBytes(parameters * weight, cache, tokens, tokens // window, window * per_token)


def bucket_bytes(shape: ModelShape, layout: ParallelTable, weight: int, most: int) -> tuple[int, ...]:
    """Bytes of each bucket of weights on their way from trainer processes of this layout, pipeline rank by pipeline
    rank; `most`: bytes that a bucket has room for."""
    buckets: list[int] = []
    for stage in stages_of(shape, layout):
        buckets += _as_they_fit((numbers * weight for numbers in _tensors(shape, stage)), most)
    return tuple(buckets)


def _as_they_fit(sizes: Iterable[int], most: int) -> Iterator[int]:
    total = 0
    for size in sizes:
        if total and total + size > most:  # a tensor that is larger than a bucket goes alone
            yield total
            total = 0
        total += size
    if total:
        yield total


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
