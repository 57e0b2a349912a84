"""Number and size of the microbatches of a rank, if all sequences have full length."""

from math import ceil

from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.schema import BySequences, ByTokens, Recipe
from ppoctl.recipe.sizes import microbatch_limit, minibatch_seqs


def most_tokens(batching: BySequences | ByTokens, rows: int, longest: int, *, with_gradient: bool) -> int:
    """Return the number of tokens of a full microbatch on a rank with `rows` rows of at most `longest` tokens."""
    _, most = microbatch_limit(batching, with_gradient=with_gradient)
    return min(most, rows * longest) if isinstance(batching, ByTokens) else min(most, rows) * longest


def microbatches(recipe: Recipe, role: str, longest: int) -> tuple[int, int]:
    """Return the minimum and the maximum number of microbatches of a data rank in a minibatch.

    The number is minimal if all prompts and responses have one token, and maximal if all have full length. With
    interleaved pipeline stages, the number must be a multiple of the number of pipeline ranks.
    """
    table, layout = recipe.trained[role], layouts(recipe)[role]
    rows = ceil(minibatch_seqs(recipe, role) / layout.data)
    _, most = microbatch_limit(table.batching, with_gradient=True)
    capacities = (most, most // longest) if isinstance(table.batching, ByTokens) else (most, most)
    multiple = layout.pipeline if layout.stages_per_rank > 1 else 1
    fewest, largest = (ceil(ceil(rows / capacity) / multiple) * multiple for capacity in capacities)
    return fewest, largest
