"""The work of a step: what each stage does with models, and on how many rows.

FLOPs, seconds and the residency of roles are computed from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppoctl.algorithms.sizes import epochs, segments_per_response, sequences_per_step
from ppoctl.algorithms.stage_spec import ModelPass
from ppoctl.algorithms.trace import Trace
from ppoctl.plan.shared_sizes import stage_rows
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class StageWork:
    """Uses of models by one stage."""

    name: str
    passes: tuple[ModelPass, ...]
    rows: int
    """Rows of the stage in all rounds of the step."""


@dataclass(frozen=True)
class Use:
    """One use of a model in a step."""

    model: ModelPass
    rows: int
    """Sequences that pass through the model, over all rounds and epochs."""


def step_work(traced: Trace, recipe: Recipe, *, most: bool = True) -> tuple[StageWork, ...]:
    """Return the work of each stage of a step, in order: with the maximum number of rounds or, if `most` is false,
    with the minimum. If several steps generate a response, the rows are those of a mean step, which ends as many
    responses as it begins."""
    rows = {name: each.total for name, each in stage_rows(traced, recipe, most=most).items()}
    if segments_per_response(recipe) > 1:
        rows = dict.fromkeys(rows, sequences_per_step(recipe))
    return tuple(StageWork(stage.name, stage.passes(recipe), rows[stage.name]) for stage in traced.stages)


def uses_of(work: Sequence[StageWork], recipe: Recipe) -> Iterator[Use]:
    """Yield each use of a model that has a role."""
    for stage in work:
        for each in stage.passes:
            if each.role:
                yield Use(each, stage.rows * (epochs(recipe, each.role) if each.kind == "train" else 1))
