"""Bytes of actor and critic, rank by rank. All ranks of a pipeline stage have the same bytes, up to rounding.

weights        in the dtype of the model
gradients      float32 buffers, complete on each data rank
main weights   float32 copies of the weights of a bfloat16 model; a float32 model has none
moments        two float32 numbers per parameter
               `distributed_optimizer` splits main weights and moments over the ranks that have the same parameters
               with an optimizer on the host, both are in host memory, with two gradients and two weights in pinned
               memory, each for a piece of the parameters
reference      frozen copy of the actor's weights, only with a KL penalty
activations    activations that the microbatches in flight keep in this pipeline stage, and the peak of one microbatch

Parameters that do not train have weights and nothing else. The layers before the first one with a parameter that
trains, the trunk, keep no activations. A reference that starts from the actor's model has no weights of its own for
what does not train. It starts from the hidden states behind the trunk, which the pass of the actor stores. If the
actor trains adapters, this reference is the actor without them: it has no weights and stores no hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from ppoctl.algorithms.optimizer_table import OptimizerPlace
from ppoctl.algorithms.role_table import Kernels, Recompute
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.model import Model
from ppoctl.models.trainable import EMBEDDING_PARAMETER, EVERYTHING
from ppoctl.plan.memory.activations import backward_bytes, beside_bytes, forward_bytes, gather_bytes, saved
from ppoctl.plan.memory.assumptions import STAGED_PARAMETERS
from ppoctl.plan.memory.parameter_memory import (
    Parameters,
    held_parameters,
    largest_adapted,
    rank_parameters,
    trunk_end,
)
from ppoctl.plan.memory.pipeline import PipelineStage, runs_of, stages_of, whole_model
from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard, Precision, SavedActivations

FLOAT32 = 4


@dataclass(frozen=True)
class Training:
    """Inputs of the estimate of one role."""

    model: Model
    layout: ParallelTable
    precision: Precision
    microbatch: MicrobatchShape
    """One microbatch of an update."""
    forward: MicrobatchShape
    """One microbatch of log-probs, reference or values."""
    microbatches: int
    """Maximum number of microbatches of a data rank in a minibatch."""
    recompute: Recompute = "none"
    full_kl_in: frozenset[str] = frozenset()
    """Names of the passes (`forward`, `update`) that compute the full KL to the reference."""
    filtered: bool = False
    """Whether log-probs are computed for the distribution after top-p."""
    optimizer_on: OptimizerPlace = "device"
    kernels: Kernels = "plain"

    @cached_property
    def trunk(self) -> int:
        """Number of layers of the frozen trunk."""
        return trunk_end(self.model)


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank of a pipeline stage."""

    stage: int
    parameters: int
    trained_parameters: int
    weights: int
    gradients: int
    main_weights: int
    moments: int
    """Main weights and moments, wherever they are."""
    host_optimizer: int
    """Part of both that is in host memory: all or nothing."""
    host_staging: int
    """Pinned host memory of an optimizer on the host, between device and host: at most, as if the largest parameter
    filled a piece."""
    moved: int
    """Bytes that one step of an optimizer on the host moves between device and host."""
    merged: int
    """Float32 sum of a weight and its adapters while weights are sent. One weight is merged at a time."""
    reference: int
    gather_buffer: int
    kept: SavedActivations
    """Activations that one microbatch keeps in all layers of the rank."""
    microbatches_under_way: float
    """Maximum number of microbatches in flight: the forward pass has run, the backward pass has not. With interleaved
    stages, the number may be a fraction, because a microbatch may have passed only some runs of layers."""
    kept_under_way: int
    """Activations that all microbatches in flight keep."""
    backward: int
    """Peak bytes of the backward pass in addition to the kept activations."""
    forward: int
    """Peak bytes of a pass without gradients."""

    @property
    def resident(self) -> int:
        """Bytes of the rank on its device between calls."""
        return self.weights + self.gradients + self.device_optimizer + self.reference + self.gather_buffer

    @property
    def device_optimizer(self) -> int:
        """Bytes of main weights and moments on the device."""
        return self.main_weights + self.moments - self.host_optimizer

    @property
    def update(self) -> int:
        """Peak bytes of an update in addition to the resident bytes."""
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
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def resident(self) -> int:
        """Bytes of all processes of the role together, between calls."""
        return sum(rank.resident for rank in self.ranks) * self.processes // len(self.ranks)


def role_bytes(training: Training) -> RoleBytes:
    """Return the bytes of a role."""
    state = state_bytes(training.model, training.layout, training.precision.weight)
    return RoleBytes(training.layout.world_size, tuple(ranks_of(training)), state)


def ranks_of(training: Training) -> list[RankBytes]:
    """Return the bytes of one rank of each pipeline stage."""
    return [_rank(training, number) for number in range(training.layout.pipeline)]


def state_bytes(model: Model, layout: ParallelTable, weight: int) -> int:
    """Return the bytes of a saved state: weights, main weights and moments of each parameter that trains, without
    file overhead.

    A distributed optimizer writes main weights for a float32 model, too.
    """
    has_main = weight < FLOAT32 or layout.distributed_optimizer
    numbers = rank_parameters(model, whole_model(model.shape), ParallelTable()).total
    return numbers * (weight + (FLOAT32 if has_main else 0) + 2 * FLOAT32)


def runs_under_way(layout: ParallelTable, number: int, microbatches: int) -> list[int]:
    """Return an index of a run of layers for each forward pass of this rank whose backward pass has not run yet.

    The number of such passes is largest at the first backward pass; after that, forward and backward passes alternate
    (1F1B). In Megatron-Core, a rank is one microbatch ahead of the next rank. With several runs of layers,
    microbatches pass each run in groups of as many microbatches as there are pipeline ranks. A rank is then two
    microbatches ahead of the next rank, and one group has already passed all runs but the last.
    """
    ranks, runs = layout.pipeline, layout.stages_per_rank
    ahead = ranks - number - 1
    if runs > 1:
        ahead = 2 * ahead + (runs - 1) * ranks
    return [step // ranks % runs for step in range(min(ahead + 1, microbatches * runs))]


def _rank(training: Training, number: int) -> RankBytes:
    model, layout, weight = training.model, training.layout, training.precision.weight
    stage = stages_of(model.shape, layout)[number]
    whole, *runs = (_shard(training, layers) for layers in (stage, *runs_of(stage, layout)))
    keeps = [saved(_trained(training, run), training.microbatch) for run in runs]
    under_way = runs_under_way(layout, number, training.microbatches)
    counts, trained = held_parameters(model, stage, layout), rank_parameters(model, stage, layout)
    optimized, is_on_host = _optimized(trained, layout), training.optimizer_on == "cpu"
    main_weights, moments = optimized * FLOAT32 if weight < FLOAT32 else 0, optimized * 2 * FLOAT32
    # A float32 model has no main weights: its weights move to the host for a step, and back.
    moved = FLOAT32 + (weight if weight < FLOAT32 else 2 * FLOAT32)
    gathered = {batch: gather_bytes(whole, batch) for batch in (training.microbatch, training.forward)}
    is_buffer = model.trainable.lora is None  # otherwise all projections are frozen
    return RankBytes(
        stage=number,
        parameters=counts.total,
        trained_parameters=trained.total,
        weights=counts.total * weight,
        gradients=trained.total * FLOAT32,
        main_weights=main_weights,
        moments=moments,
        host_optimizer=is_on_host * (main_weights + moments),
        host_staging=is_on_host * 2 * (FLOAT32 + FLOAT32) * min(STAGED_PARAMETERS, optimized),
        moved=is_on_host * moved * optimized,
        merged=FLOAT32 * largest_adapted(model, layout),
        reference=_reference(training, stage) * weight,
        gather_buffer=is_buffer * max(gathered.values()),
        kept=_sum(keeps),
        microbatches_under_way=len(under_way) / len(runs),
        kept_under_way=sum(keeps[run].total for run in under_way),
        backward=max(_at_work(training, run, kept.total) for run, kept in zip(runs, keeps, strict=True))
        + ("update" in training.full_kl_in) * beside_bytes(whole, training.microbatch, training.microbatches)
        + (not is_buffer) * gathered[training.microbatch],
        forward=forward_bytes(_with_copies(whole), training.forward)
        + ("forward" in training.full_kl_in) * beside_bytes(whole, training.forward, layout.pipeline)
        + _behind_trunk(training, whole)
        + (not is_buffer) * gathered[training.forward],
    )


def _shard(training: Training, stage: PipelineStage) -> ModelShard:
    return ModelShard(
        training.model,
        training.layout,
        stage,
        training.precision,
        training.recompute,
        training.filtered,
        training.kernels,
    )


def _with_copies(shard: ModelShard) -> ModelShard:
    """Return the shard with the layers that a value head has copies of after the last layer."""
    copies = shard.model.copied_layers if shard.stage.is_last else ()
    return replace(shard, stage=replace(shard.stage, layers=shard.stage.layers + copies))


def _trained(training: Training, shard: ModelShard) -> ModelShard:
    """Return the shard without the trunk and without a frozen embedding, which keeps no ids."""
    stage = shard.stage
    has_ids = stage.is_first and training.model.trains(EMBEDDING_PARAMETER)
    layers = tuple(layer for layer in stage.layers if layer >= training.trunk)
    return _with_copies(replace(shard, stage=replace(stage, layers=layers, is_first=has_ids)))


def _at_work(training: Training, run: ModelShard, kept: int) -> int:
    """Return the peak bytes of an update of this run of layers in addition to the kept activations: of the backward
    pass or, if it is more, of the pass through the trunk, which is over before the run keeps activations."""
    layers = tuple(layer for layer in run.stage.layers if layer < training.trunk)
    trunk = replace(run, stage=replace(run.stage, layers=layers, is_last=False))
    in_trunk = forward_bytes(trunk, training.microbatch) - kept if layers else 0
    return max(backward_bytes(_trained(training, run), training.microbatch), in_trunk)


def _reference(training: Training, stage: PipelineStage) -> int:
    """Return the number of weights of the reference that a rank of this stage has in addition to the actor's."""
    model = training.model
    if model.reference in (None, "adapters_off"):
        return 0
    of_its_own = model.trainable if model.reference == "shared" else EVERYTHING
    return rank_parameters(Model(model.shape, model.head, of_its_own), stage, training.layout).total


def _behind_trunk(training: Training, shard: ModelShard) -> int:
    """Return the bytes of the hidden states behind the trunk that this rank stores for the pass of the reference, for
    as many microbatches as there are pipeline ranks."""
    trunk = training.trunk
    is_here = trunk in shard.stage.layers if trunk < shard.shape.num_layers else shard.stage.is_last
    if not (training.model.reference == "shared" and trunk > 0 and is_here):
        return 0
    return training.layout.pipeline * training.forward.tokens * shard.hidden_bytes


def _optimized(parameters: Parameters, layout: ParallelTable) -> int:
    """Return the number of parameters whose main weights and moments this rank has.

    A distributed optimizer splits main weights and moments over the ranks with the same parameters.
    """
    if not layout.distributed_optimizer:
        return parameters.total
    copies, with_experts = layout.data * layout.context, layout.stage_ranks // layout.expert_ranks
    return -(-parameters.shared // copies) + -(-parameters.experts // with_experts)


def _sum(keeps: Sequence[SavedActivations]) -> SavedActivations:
    return SavedActivations(
        **{
            field.name: sum(getattr(activations, field.name) for activations in keeps)
            for field in fields(SavedActivations)
        }
    )
