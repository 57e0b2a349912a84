"""Bytes of a reward model, rank by rank: weights, and the work of a pass without gradient. It has nothing else."""

from dataclasses import dataclass, replace
from math import ceil

from ppoctl.model.shape import ModelShape
from ppoctl.plan.memory.shard import MicrobatchShape, Precision
from ppoctl.plan.memory.trainer import RankBytes, Training, ranks_of
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.parallel import reward_models
from ppoctl.recipe.role_model import reward_model_of
from ppoctl.recipe.schema import ParallelTable, Recipe
from ppoctl.recipe.sizes import reward_tokens

VLLM_TEXTS = 64
"""Most texts that vLLM reads in one step."""
_BLOCK_TOKENS = 128
"""Tokens of a block of its cache on a CPU; on a GPU it has fewer."""


@dataclass(frozen=True)
class ScoringBytes:
    """Bytes of one reward model."""

    layout: ParallelTable
    tokens: int
    """Tokens of the texts of one pass."""
    ranks: tuple[RankBytes, ...]
    """Bytes of one rank of each pipeline stage, of which a reward model has weights, gather buffer and the work of a
    forward pass."""

    @property
    def weights(self) -> int:
        """Bytes of the largest rank's weights."""
        return max(rank.weights for rank in self.ranks)

    @property
    def forward(self) -> int:
        """Peak bytes of a pass on the rank that needs most."""
        return max(rank.forward for rank in self.ranks)


def scoring_bytes(recipe: Recipe, key: KeyPath, shape: ModelShape, device: str) -> ScoringBytes:
    """Bytes of the reward model at this key: a pass is full, all of it one text."""
    table = reward_models(recipe)[key]
    layout, most = table.parallel or ParallelTable(), reward_tokens(table, shape)
    tokens = ceil(most / layout.context)
    full = MicrobatchShape(tokens, read=1, logits_chunk=0, longest=most)
    training = Training(
        role="critic",  # whose model it is
        shape=shape,
        layout=layout,
        precision=Precision(reward_model_of(recipe, key).weight_bytes, device),
        microbatch=full,
        forward=full,
        microbatches=1,
    )
    ranks = tuple(ranks_of(training))
    if table.engine == "vllm":
        cache = cache_bytes(shape, training.precision.weight, most)
        ranks = tuple(replace(rank, forward=rank.forward + cache) for rank in ranks)
    return ScoringBytes(layout, most, ranks)


def cache_bytes(shape: ModelShape, weight: int, most: int) -> int:
    """Bytes that vLLM keeps for keys and values of texts of at most so many tokens: of those of one step, each in
    whole blocks. `weight`: bytes of a number."""
    tokens = step_tokens(most) + VLLM_TEXTS * _BLOCK_TOKENS
    return 2 * shape.key_channels * shape.num_layers * weight * tokens


def step_tokens(most: int) -> int:
    """Most tokens that vLLM reads in one step, of texts of at most so many."""
    return max(8192, most)
