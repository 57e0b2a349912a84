"""Layers of each pipeline rank."""

from dataclasses import dataclass

from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.shape import ModelShape


@dataclass(frozen=True)
class PipelineStage:
    """The layers that one pipeline rank holds."""

    number: int
    layers: tuple[int, ...]
    """Indices of the layers in the model. With interleaved stages, a rank has several runs of consecutive layers."""
    is_first: bool
    is_last: bool


def whole_model(shape: ModelShape) -> PipelineStage:
    """Return a pipeline stage with all layers: a model in one process."""
    return PipelineStage(0, tuple(range(shape.num_layers)), is_first=True, is_last=True)


def stages_of(shape: ModelShape, layout: ParallelTable) -> list[PipelineStage]:
    """Return the layers of each pipeline rank.

    The first and the last rank have the numbers of layers that the layout sets; the other ranks split the remaining
    layers evenly. With interleaved stages, the first runs of all ranks come before the second runs of all ranks.
    """
    first, last = layout.first_stage_layers, layout.last_stage_layers
    ranks, runs = layout.pipeline, layout.stages_per_rank
    ends = (first is not None) + (last is not None)
    even = (shape.num_layers - (first or 0) - (last or 0)) // max(1, ranks - ends)
    counts = [even] * ranks
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    layers_per_run = [count // runs for count in counts]
    stages = []
    for rank, count in enumerate(layers_per_run):
        starts = [run * sum(layers_per_run) + sum(layers_per_run[:rank]) for run in range(runs)]
        layers = tuple(layer for start in starts for layer in range(start, start + count))
        stages.append(PipelineStage(rank, layers, is_first=rank == 0, is_last=rank == ranks - 1))
    return stages


def runs_of(stage: PipelineStage, layout: ParallelTable) -> list[PipelineStage]:
    """Return the runs of consecutive layers of a pipeline rank: one run or, with interleaved stages, several runs."""
    count = layout.stages_per_rank
    size = len(stage.layers) // count
    return [
        PipelineStage(
            stage.number,
            stage.layers[run * size : (run + 1) * size],
            is_first=stage.is_first and run == 0,
            is_last=stage.is_last and run == count - 1,
        )
        for run in range(count)
    ]
