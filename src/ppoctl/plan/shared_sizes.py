"""Sizes that several estimates of a plan use: shapes of models, rows of stages, and microbatches of a rank."""

from dataclasses import dataclass
from math import ceil

from ppoctl.algorithms.role_model import model_of
from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.algorithms.sizes import fewest_rounds, microbatch_limit, minibatch_seqs, sequences_per_step
from ppoctl.algorithms.trace import Trace
from ppoctl.models.shape import ModelShape
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.schema import Recipe
from ppoctl.store.outline import stage_and_steps


def shapes_of(recipe: Recipe) -> dict[str, ModelShape] | None:
    """Return trained role -> shape of the model that the role starts from.

    None: a model has neither a local folder nor a shipped config.json.
    """
    shapes = {role: model_of(recipe, role).shape for role in recipe.trained}
    known = {role: shape for role, shape in shapes.items() if shape is not None}
    return known if len(known) == len(shapes) else None


@dataclass(frozen=True)
class StageRows:
    """Rounds of a stage in one step, and the rows of its record, or of its inputs, in each round."""

    rounds: int
    rows: int

    @property
    def total(self) -> int:
        """Rows of all rounds."""
        return self.rounds * self.rows


def stage_rows(traced: Trace, recipe: Recipe, *, most: bool = True) -> dict[str, StageRows]:
    """Return stage -> its rows in one step: the most or, if `most` is false, the least."""
    found = {}
    for call in traced.calls:
        defining, _ = stage_and_steps(call.rows)
        usual = sequences_per_step(recipe)
        bounds = traced[defining].row_bounds(recipe) if defining in traced else (usual, usual)
        rounds = call.entry.at_most if most else min(call.entry.at_most, fewest_rounds(recipe))
        found[call.stage.name] = StageRows(rounds, bounds[most])
    return found


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
