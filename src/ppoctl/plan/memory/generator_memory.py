"""Bytes of vLLM, and of the weights that are transferred to vLLM.

a trainer rank gathers, checksums and packs a bucket -> memory of the rank, or object store -> each engine of the node
reads the bucket
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil

from ppoctl.algorithms.roles import POLICY
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.convert.tensors import expert_tensor_sizes, tensor_sizes
from ppoctl.models.model import Model
from ppoctl.models.shape import ModelShape
from ppoctl.plan.memory.parameter_memory import rank_parameters
from ppoctl.plan.memory.pipeline import PipelineStage, stages_of, whole_model
from ppoctl.recipe.schema import ClusterTable, GeneratorTable


@dataclass(frozen=True)
class GeneratorBytes:
    """Bytes of one process of an engine, equal for all tensor ranks of the engine.

    Activations are not counted on a CPU, and are included in `generator.gpu_memory_frac` on a GPU.
    """

    weights: int
    kv_cache: int
    kv_tokens: int
    """Number of tokens whose keys and values fit in the cache."""
    full_sequences: int
    """Number of sequences of full length whose keys and values fit in the cache. If it is 0, vLLM does not start."""
    sequence_bytes: int
    """Bytes of one sequence of full length in the cache."""


COPIES = {
    # The sender gathers one bucket and shares two buckets. The engine copies one bucket.
    "shared": {POLICY: 3, "generator": 1, "node": 0},
    # The sender gathers one bucket. The host has this bucket twice, packed and stored, and the previous bucket, which
    # is being loaded.
    "store": {POLICY: 1, "generator": 0, "node": 3},
    # The sender gathers one bucket into permanent host memory. The engine copies one bucket from there.
    "kept": {POLICY: 1, "generator": 0, "node": 1},
    # The sender gathers and packs one bucket while it sends the previous bucket. The engine receives one bucket while
    # it loads another bucket.
    "broadcast": {POLICY: 3, "generator": 2, "node": 0},
}
"""`cluster.weights` (`kept`: `store` without Ray) -> copies of a bucket that exist at one time: on the device of a
sending rank, on the device of an engine, and in the host memory of a node."""


EXPERT_COPIES: Mapping[str, int] = {"gpu": 2, "cpu": 3}
"""Copies of the experts of a layer that exist while an engine loads them, in addition to those that it computes
with."""


@dataclass(frozen=True)
class TransferBytes:
    """Bytes of the actor's weights in transfer to engines in other processes."""

    buckets: tuple[int, ...]
    """Bytes of each bucket. A bucket contains as many tensors as fit, or one tensor that is larger than the limit."""
    copies: Mapping[str, int]
    """Copies of a bucket that exist at one time, as in `COPIES`."""
    published: int
    """Bytes of published weights that a rank keeps in host memory, to restore engines that die. 0: the published
    weights are in the object store of Ray."""
    experts: int = 0
    """Bytes that a process of an engine needs in addition while it loads the experts of a layer."""

    @property
    def largest(self) -> int:
        return max(self.buckets, default=0)


def expert_transfer_bytes(shape: ModelShape, weight: int, device: str) -> int:
    """Return the bytes that a process of an engine needs while it loads the experts of the layer with most of them:
    vLLM collects the matrices of a layer, and makes the fused tensors when it has all of them, on a CPU also packed
    ones. Tensor ranks keep their part of the fused tensors only, so this is an upper bound for them."""
    layers = (layer for layer in range(shape.num_layers) if shape.has_experts(layer))
    largest = max((sum(expert_tensor_sizes(shape, layer)) for layer in layers), default=0)
    return EXPERT_COPIES[device] * largest * weight


def copies_of(cluster: ClusterTable, *, one_node: bool, has_ray: bool = True) -> dict[str, int]:
    """Return place -> copies of a bucket that exist at one time, for the recipe's `cluster.weights`.

    With engines on several nodes, a rank also uses the object store: a node may have engines but no trainer rank, and
    an engine of any node may have to be restored.
    """
    copies = COPIES["kept" if cluster.weights == "store" and not has_ray else cluster.weights]
    return copies if one_node or cluster.weights != "shared" else {**copies, "node": COPIES["store"]["node"]}


def generator_bytes(
    shape: ModelShape, weight: int, table: GeneratorTable, window: int, gpu_bytes: float | None = None
) -> GeneratorBytes:
    """Return the bytes of one process of an engine. `window` is the number of tokens of a full sequence.

    On a GPU of `gpu_bytes`, its engines have the fraction `generator.gpu_memory_frac` of the memory. The part that
    the weights do not use is counted as cache, although vLLM first subtracts activations. On a CPU (None), the recipe
    sets the size of the cache, and a tied output layer has a separate packed copy.

    Like Megatron-Core, vLLM splits matrices, including matrices of experts, and pads the vocabulary to a multiple
    of 64. On a GPU, latent attention caches the complete latent and rotary key in each process. On a CPU, vLLM
    computes latent attention as plain attention (`engines.vllm.vllm_environment`).
    Sliding windows are counted as full contexts.
    """
    tensor = table.tensor
    layout = ParallelTable(tensor=tensor, expert_tensor=tensor)
    parameters = rank_parameters(Model(shape, "token"), whole_model(shape), layout).total
    channels = 2 * shape.key_channels // tensor
    if gpu_bytes is None:
        parameters += shape.padded_vocab_size * shape.hidden_size // tensor if shape.tied_embeddings else 0
        cache = table.kv_cache_mib * 2**20 // table.engines_per_gpu
    else:
        cache = max(0, int(table.gpu_memory_frac / table.engines_per_gpu * gpu_bytes) - parameters * weight)
        if shape.latent is not None:
            channels = shape.latent.kv_rank + shape.latent.rope_dim
    per_token = shape.num_layers * channels * weight
    tokens = cache // per_token
    return GeneratorBytes(parameters * weight, cache, tokens, tokens // window, window * per_token)


MOST_ENGINES, LEAST_SEQUENCES, WEIGHTS_FRAC = 3, 64, 0.25
"""Bounds of the advised engines on a GPU: no more were measured; each decodes enough sequences that Python takes
longer than the GPU; all copies of the weights take at most this fraction of their memory."""


def advised_engines(engine: GeneratorBytes, table: GeneratorTable, sequences: int) -> int:
    """Return the number of engines on a GPU that probably decode the `sequences` of a step fastest. Measured on one
    H200 with 1.5B parameters: 1.93 and 2.49 times the tokens/s of one with two and three (docs/gpu.md)."""
    if table.tensor > 1:
        return 1
    memory = table.engines_per_gpu * (engine.weights + engine.kv_cache)
    together = min(ceil(sequences / table.engines), table.max_concurrent_seqs)
    return max(1, min(MOST_ENGINES, int(WEIGHTS_FRAC * memory / engine.weights), together // LEAST_SEQUENCES))


def bucket_bytes(shape: ModelShape, layout: ParallelTable, weight: int, most: int) -> tuple[int, ...]:
    """Return the bytes of each bucket of weights that trainer ranks of this layout send, by pipeline rank.

    `most` is the capacity of a bucket in bytes.
    """
    buckets: list[int] = []
    for stage in stages_of(shape, layout):
        buckets += _as_they_fit((numbers * weight for numbers in _tensors(shape, stage)), most)
    return tuple(buckets)


def _as_they_fit(sizes: Iterable[int], most: int) -> Iterator[int]:
    total = 0
    for size in sizes:
        if total and total + size > most:  # a tensor that is larger than a bucket is sent alone
            yield total
            total = 0
        total += size
    if total:
        yield total


def _tensors(shape: ModelShape, stage: PipelineStage) -> Iterator[int]:
    """Yield the number of elements of each tensor of a pipeline stage, in the order of sending."""
    table = shape.vocab_size * shape.hidden_size
    if stage.is_first:
        yield table
    for layer in stage.layers:
        yield from tensor_sizes(shape, layer)
    if stage.is_last:
        yield shape.hidden_size
        if not shape.tied_embeddings:
            yield table
