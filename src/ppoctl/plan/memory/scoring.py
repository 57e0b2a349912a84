"""Bytes of a reward model, rank by rank: weights, and activations of a pass without gradients."""

from dataclasses import dataclass, replace
from math import ceil

from ppoctl.algorithms.role_model import reward_model_of, reward_models
from ppoctl.algorithms.sizes import reward_tokens
from ppoctl.core.key_path import KeyPath
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.model import Model
from ppoctl.models.shape import ModelShape
from ppoctl.plan.memory.shard import MicrobatchShape, Precision
from ppoctl.plan.memory.trainer_memory import RankBytes, Training, ranks_of
from ppoctl.recipe.schema import Recipe

VLLM_TEXTS = 64
"""Maximum number of texts that vLLM reads in one engine step."""
_BLOCK_TOKENS = 128
"""Tokens of a block of vLLM's KV cache on a CPU. On a GPU, blocks are smaller."""


@dataclass(frozen=True)
class ScoringBytes:
    """Bytes of one reward model."""

    layout: ParallelTable
    tokens: int
    """Tokens of the texts of one pass."""
    ranks: tuple[RankBytes, ...]
    """Bytes of one rank of each pipeline stage. A reward model has only weights, a gather buffer, and the
    activations of a forward pass."""

    @property
    def weights(self) -> int:
        """Bytes of the weights of the largest rank."""
        return max(rank.weights for rank in self.ranks)

    @property
    def forward(self) -> int:
        """Peak bytes of a pass on the rank that needs most memory."""
        return max(rank.forward for rank in self.ranks)


def scoring_bytes(recipe: Recipe, key: KeyPath, shape: ModelShape, device: str) -> ScoringBytes:
    """Return the bytes of the reward model at this key. A pass is assumed to be full and to consist of one text."""
    table = reward_models(recipe)[key]
    layout, most = table.parallel or ParallelTable(), reward_tokens(table, shape)
    tokens = ceil(most / layout.context)
    full = MicrobatchShape(tokens, read=1, logits_chunk=0, longest=most)
    training = Training(
        model=Model(shape, "value"),
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
    """Return the bytes of vLLM's KV cache for the texts of one engine step, in complete blocks.

    A text has at most `most` tokens. `weight` is the number of bytes of one number.
    """
    tokens = step_tokens(most) + VLLM_TEXTS * _BLOCK_TOKENS
    return 2 * shape.key_channels * shape.num_layers * weight * tokens


def step_tokens(most: int) -> int:
    """Return the maximum number of tokens that vLLM reads in one engine step, for texts of at most `most` tokens."""
    return max(8192, most)
