"""How much a microbatch holds, and how many a rank has, when all sequences are of full length."""

from math import ceil
from typing import TYPE_CHECKING

from ppoctl.recipe.algorithm import BySequences, ByTokens
from ppoctl.recipe.parallel import layouts

if TYPE_CHECKING:
    from ppoctl.recipe.schema import Recipe, TrainedTable


def limit(batching: BySequences | ByTokens, *, with_gradient: bool) -> tuple[str, int]:
    """The key that says how much a microbatch may hold, and how much."""
    names = (
        ("forward_microbatch_seqs", "microbatch_seqs")
        if isinstance(batching, BySequences)
        else ("forward_max_tokens_per_microbatch", "max_tokens_per_microbatch")
    )
    key = names[1] if with_gradient or getattr(batching, names[0]) is None else names[0]
    return key, getattr(batching, key)


def most_tokens(batching: BySequences | ByTokens, rows: int, longest: int, *, with_gradient: bool) -> int:
    """Of a microbatch, where there are so many rows."""
    _, most = limit(batching, with_gradient=with_gradient)
    return min(most, rows * longest) if isinstance(batching, ByTokens) else min(most, rows) * longest


def microbatches(recipe: "Recipe", role: str, longest: int) -> tuple[int, int]:
    """Of a data rank in a minibatch: fewest (responses of one token, prompts of one) and most (all of full length).
    Interleaved pipeline stages take a multiple of the pipeline's ranks."""
    table: TrainedTable = getattr(recipe, role)
    layout = layouts(recipe)[role]
    rows = ceil(recipe.ppo.minibatch_seqs / layout.data)
    _, most = limit(table.batching, with_gradient=True)
    held = (most, most // longest) if isinstance(table.batching, ByTokens) else (most, most)
    multiple = layout.pipeline if layout.stages_per_rank > 1 else 1
    fewest, largest = (ceil(ceil(rows / each) / multiple) * multiple for each in held)
    return fewest, largest
