"""Bytes of actor and critic, rank by rank. All ranks of a pipeline stage have the same, to rounding.

weights        in the model's dtype
gradients      float32 buffers, whole on every data rank
main weights   float32 copies of a bfloat16 model's weights; a float32 model has none
moments        two float32 numbers per parameter
               main weights and moments are split by `distributed_optimizer`, over the ranks with a copy
reference      an actor's frozen copy of the weights, read where a KL penalty is
activations    what microbatches keep, as many as are under way in this stage of the pipeline, and the work on one
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ppoctl.model.shape import ModelShape
from ppoctl.plan.memory.activations import backward_bytes, beside_bytes, forward_bytes, gather_bytes, saved
from ppoctl.plan.memory.pipeline import Parameters, rank_parameters, runs_of, stages_of, whole_model
from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard, Precision, SavedActivations
from ppoctl.recipe.schema import ParallelTable, Recompute

FLOAT32 = 4


@dataclass(frozen=True)
class Training:
    """Inputs that decide the bytes of one role."""

    role: str
    shape: ModelShape
    layout: ParallelTable
    precision: Precision
    microbatch: MicrobatchShape
    """One microbatch of an update."""
    forward: MicrobatchShape
    """One microbatch of log-probs, reference or values."""
    microbatches: int
    """Most microbatches that a data rank has in a minibatch."""
    recompute: Recompute = "none"
    has_reference: bool = False
    full_kl_in: frozenset[str] = frozenset()
    """Passes (forward, update) that take the whole KL from the reference."""
    filtered: bool = False
    """Whether log-probs are of the distribution that top-p leaves."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank of a pipeline stage."""

    stage: int
    parameters: int
    weights: int
    gradients: int
    main_weights: int
    moments: int
    reference: int
    gather_buffer: int
    kept: SavedActivations
    """Activations that one microbatch keeps, in all layers of the rank."""
    microbatches_under_way: float
    """Most microbatches that have gone forward and not yet back; a part of one is in some of the rank's runs of
    layers."""
    kept_under_way: int
    """Activations that all microbatches under way keep."""
    backward: int
    """Peak bytes of the backward pass beyond what is kept."""
    forward: int
    """Peak bytes of a pass without gradient."""

    @property
    def resident(self) -> int:
        """Bytes of the rank between calls."""
        states = self.weights + self.gradients + self.main_weights + self.moments
        return states + self.reference + self.gather_buffer

    @property
    def update(self) -> int:
        """Peak bytes of an update beyond what is resident."""
        return self.kept_under_way + self.backward

    @property
    def peak(self) -> int:
        return self.resident + max(self.update, self.forward)


@dataclass(frozen=True)
class RoleBytes:
    """Bytes of actor or critic."""

    processes: int
    ranks: tuple[RankBytes, ...]
    """Bytes of one rank of each pipeline stage."""
    state: int
    """Bytes of a saved state."""

    @property
    def largest(self) -> RankBytes:
        """The rank of the role that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def resident(self) -> int:
        """Bytes of all processes of the role together, between calls."""
        return sum(rank.resident for rank in self.ranks) * self.processes // len(self.ranks)


def role_bytes(training: Training) -> RoleBytes:
    state = state_bytes(training.shape, training.role, training.layout, training.precision.weight)
    return RoleBytes(training.layout.world_size, tuple(ranks_of(training)), state)


def ranks_of(training: Training) -> list[RankBytes]:
    """Bytes of one rank of each pipeline stage."""
    return [_rank(training, number) for number in range(training.layout.pipeline)]


def state_bytes(shape: ModelShape, role: str, layout: ParallelTable, weight: int) -> int:
    """Bytes of a saved state: weights, main weights and moments of every parameter once; without its rounding to
    files.

    A distributed optimizer writes main weights of a float32 model too.
    """
    has_main = weight < FLOAT32 or layout.distributed_optimizer
    numbers = rank_parameters(shape, role, whole_model(shape), ParallelTable()).total
    return numbers * (weight + (FLOAT32 if has_main else 0) + 2 * FLOAT32)


def runs_under_way(layout: ParallelTable, number: int, microbatches: int) -> list[int]:
    """Indices of a rank's runs of layers that have gone forward and not yet back, when there are most of them. All go
    forward up to the first backward pass, after which each forward pass is followed by one. In Megatron-Core a rank
    goes ahead of the ones behind it by one microbatch each; with several runs by two each, once as many microbatches
    as there are ranks have been through all but its last run. They go through a run together."""
    ranks, runs = layout.pipeline, layout.stages_per_rank
    ahead = ranks - number - 1
    if runs > 1:
        ahead = 2 * ahead + (runs - 1) * ranks
    return [step // ranks % runs for step in range(min(ahead + 1, microbatches * runs))]


def _rank(training: Training, number: int) -> RankBytes:
    layout, weight = training.layout, training.precision.weight
    stage = stages_of(training.shape, layout)[number]
    filtered = training.filtered
    whole, *runs = (
        ModelShard(training.shape, training.role, layout, each, training.precision, training.recompute, filtered)
        for each in (stage, *runs_of(stage, layout))
    )
    keeps = [saved(run, training.microbatch) for run in runs]
    under_way = runs_under_way(layout, number, training.microbatches)
    found = rank_parameters(training.shape, training.role, stage, layout)
    parameters, split = found.total, _optimized(found, layout)
    return RankBytes(
        stage=number,
        parameters=parameters,
        weights=parameters * weight,
        gradients=parameters * FLOAT32,
        main_weights=split * FLOAT32 if weight < FLOAT32 else 0,
        moments=split * 2 * FLOAT32,
        reference=parameters * weight if training.has_reference else 0,
        gather_buffer=max(gather_bytes(whole, batch) for batch in (training.microbatch, training.forward)),
        kept=_together(keeps),
        microbatches_under_way=len(under_way) / len(runs),
        kept_under_way=sum(keeps[run].total for run in under_way),
        backward=max(backward_bytes(run, training.microbatch) for run in runs)
        + ("update" in training.full_kl_in) * beside_bytes(whole, training.microbatch, training.microbatches),
        forward=forward_bytes(whole, training.forward)
        + ("forward" in training.full_kl_in) * beside_bytes(whole, training.forward, layout.pipeline),
    )


def _optimized(parameters: Parameters, layout: ParallelTable) -> int:
    """Parameters whose main weights and moments this rank has: where these are split, over all ranks with a copy."""
    if not layout.distributed_optimizer:
        return parameters.total
    copies, with_experts = layout.data * layout.context, layout.stage_ranks // layout.expert_ranks
    return -(-parameters.shared // copies) + -(-parameters.experts // with_experts)


def _together(keeps: Sequence[SavedActivations]) -> SavedActivations:
    return SavedActivations(
        **{field.name: sum(getattr(one, field.name) for one in keeps) for field in fields(SavedActivations)}
    )
