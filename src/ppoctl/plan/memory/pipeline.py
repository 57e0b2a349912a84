"""Layers and parameters of each pipeline rank."""

from dataclasses import dataclass

from ppoctl.model.cost import layer_parameters
from ppoctl.model.shape import ModelShape
from ppoctl.recipe.schema import ParallelTable


@dataclass(frozen=True)
class PipelineStage:
    """The layers that one pipeline rank holds."""

    number: int
    layers: tuple[int, ...]
    """Indices of the stage's layers in the model, run by run where stages are interleaved."""
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Parameters:
    """Parameters of one rank."""

    shared: int
    """Parameters of which every data rank has a copy."""
    experts: int
    """Parameters of which only the ranks that hold the same experts have a copy."""

    @property
    def total(self) -> int:
        return self.shared + self.experts


def whole_model(shape: ModelShape) -> PipelineStage:
    """The pipeline stage that has all layers: a model in one process."""
    return PipelineStage(0, tuple(range(shape.num_layers)), is_first=True, is_last=True)


def stages_of(shape: ModelShape, layout: ParallelTable) -> list[PipelineStage]:
    """Layers of each pipeline rank: those of a written end first, the rest evenly. Where stages are interleaved, all
    ranks' first runs come before all second ones."""
    first, last = layout.first_stage_layers, layout.last_stage_layers
    ranks, runs = layout.pipeline, layout.stages_per_rank
    ends = (first is not None) + (last is not None)
    even = (shape.num_layers - (first or 0) - (last or 0)) // max(1, ranks - ends)
    counts = [even] * ranks
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    of_run = [count // runs for count in counts]
    stages = []
    for rank, count in enumerate(of_run):
        starts = [run * sum(of_run) + sum(of_run[:rank]) for run in range(runs)]
        layers = tuple(layer for start in starts for layer in range(start, start + count))
        stages.append(PipelineStage(rank, layers, is_first=rank == 0, is_last=rank == ranks - 1))
    return stages


def runs_of(stage: PipelineStage, layout: ParallelTable) -> list[PipelineStage]:
    """The runs of layers of a pipeline rank: one, or several where stages are interleaved."""
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


def rank_parameters(shape: ModelShape, role: str, stage: PipelineStage, layout: ParallelTable) -> Parameters:
    """Parameters of one tensor rank in a pipeline stage: its slice of every matrix, its experts or slices of them,
    the whole of every norm, of routers, and of products to latents.

    A critic has a row of one value in place of the output layer; the last stage of a tied actor has its own copy of
    the embedding, unless it is also the first.
    """
    table = shape.padded_vocab_size * shape.hidden_size // layout.tensor
    total, experts = table if stage.is_first else 0, 0
    for layer in stage.layers:
        found = layer_parameters(shape, layer)
        total += found.split // layout.tensor + found.whole
        experts += found.experts
    if stage.is_last:
        total += shape.hidden_size  # the final norm
        if role == "critic":
            total += shape.hidden_size
        elif not (shape.tied_embeddings and stage.is_first):
            total += table
    return Parameters(total, experts // layout.expert_ranks)
