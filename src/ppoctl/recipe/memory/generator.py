"""Bytes of vLLM, and of weights on their way to it."""

from collections.abc import Iterator
from dataclasses import dataclass

from ppoctl.recipe.memory.decoder import Decoder, Stage, stages_of
from ppoctl.recipe.parallel import ParallelTable

BUCKET_BYTES = 64 * 2**20
"""Weights on their way at one time, or one tensor that has more (`engines.megatron.ranks`); two such buckets exist,
one in use while the next is filled."""


@dataclass(frozen=True)
class GeneratorBytes:
    """One engine. Its work on a batch of tokens is not counted on a CPU, and is within its share of a GPU."""

    weights: int
    kv_cache: int
    kv_tokens: int
    """Tokens whose keys and values fit."""
    full_sequences: int
    """Sequences of full length that fit."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache


def on_cpu(decoder: Decoder, weight: int, kv_cache: int, window: int) -> GeneratorBytes:
    """An engine with a cache of so many bytes. A tied output layer has a packed copy of its own."""
    copy = decoder.padded_vocab * decoder.hidden if decoder.tied else 0
    return _engine((_parameters(decoder) + copy) * weight, kv_cache, _kv_bytes(decoder, weight), window)


def on_gpu(decoder: Decoder, weight: int, share: int, window: int) -> GeneratorBytes:
    """An engine with so many bytes of a GPU for all it does: what weights leave is taken for the cache, though the
    work on a batch comes off it first."""
    weights = _parameters(decoder) * weight
    return _engine(weights, max(0, share - weights), _kv_bytes(decoder, weight), window)


def buckets(decoder: Decoder, layout: ParallelTable, weight: int) -> list[int]:
    """Bytes of each bucket in which trainer processes send the actor's weights; none within one process."""
    if layout.world_size == 1:
        return []
    found: list[int] = []
    for stage in stages_of(decoder, layout):
        size = 0
        for numbers in _tensors(decoder, stage):
            size += numbers * weight
            if size >= BUCKET_BYTES:
                found.append(size)
                size = 0
        found += [size] if size else []
    return found


def _engine(weights: int, kv_cache: int, per_token: int, window: int) -> GeneratorBytes:
    tokens = kv_cache // per_token
    return GeneratorBytes(weights, kv_cache, tokens, tokens // window)


def _kv_bytes(decoder: Decoder, weight: int) -> int:
    """Of one token."""
    return 2 * decoder.layers * decoder.keys * weight


def _parameters(decoder: Decoder) -> int:
    """vLLM, too, pads the vocabulary to a multiple of 64."""
    tables = 1 if decoder.tied else 2
    return decoder.parameters + tables * (decoder.padded_vocab - decoder.vocab) * decoder.hidden


def _tensors(decoder: Decoder, stage: Stage) -> Iterator[int]:
    """Numbers in each tensor of a pipeline stage under Hugging Face names, in the order in which they are sent."""
    hidden, queries, keys = decoder.hidden, decoder.queries, decoder.keys
    experts = decoder.experts
    if stage.is_first:
        yield decoder.vocab * hidden
    for _ in range(stage.layers):
        yield hidden
        yield from (queries * hidden, keys * hidden, keys * hidden)
        if decoder.qkv_bias:
            yield from (queries, keys, keys)
        if decoder.head_norms:
            yield from (decoder.head_dim, decoder.head_dim)
        yield from (hidden * queries, hidden)
        if experts is None:
            yield from [hidden * decoder.inner] * 3
        else:
            yield experts.number * hidden
            yield from [hidden * experts.inner] * 3 * experts.number
    if stage.is_last:
        yield hidden
        if not decoder.tied:
            yield decoder.vocab * hidden
