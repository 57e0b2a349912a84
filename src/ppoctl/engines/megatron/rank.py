"""One process of a trained role: its shard of the model and its shard of the optimizer.

A minibatch is one optimizer step. Megatron-Core's schedule (`schedule`) runs forward and backward over the
microbatches, and gradients accumulate in Megatron-Core's float32 buffers. The optimizer (`optimizer`) takes a step
only if loss and gradient norm are finite on all ranks: if only some ranks took the step, weights would differ between
ranks.

    role (actor, critic)  =  data ranks  x  context ranks  x  pipeline ranks  x  tensor ranks
                             rows            tokens            layers            heads, columns, vocabulary
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from ppoctl.core.activity import track_items
from ppoctl.core.batch.digest import FileDigest
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.errors import EnvironmentProblemError, NonFiniteError
from ppoctl.core.machine.device import this_device
from ppoctl.core.machine.process_usage import MeasuredProcess, reset_peak
from ppoctl.core.machine.torch_profile import ProfiledProcess
from ppoctl.core.measured import MEASUREMENTS, ProcessUsage
from ppoctl.core.ports import Minibatch, Objective, OutputRequest, TokenOutputs
from ppoctl.engines.megatron import checkpoint, optimizer
from ppoctl.engines.megatron.context_parallel import CHUNKS_PER_RANK
from ppoctl.engines.megatron.cpu_adaptation import megatron_device
from ppoctl.engines.megatron.frozen_parameters import freeze, frozen_checksums
from ppoctl.engines.megatron.low_rank import attach_adapters
from ppoctl.engines.megatron.megatron_model import (
    MODELS,
    LogprobModel,
    ModelSettings,
    PackedModel,
    ScoreModel,
    build_stages,
)
from ppoctl.engines.megatron.merge_error import merge_error
from ppoctl.engines.megatron.microbatches import (
    Microbatch,
    MicrobatchPlan,
    RankExperts,
    RankOutputs,
    RankStepResult,
    cut_rows,
)
from ppoctl.engines.megatron.offload import HostOffload
from ppoctl.engines.megatron.out_of_memory import named_out_of_memory
from ppoctl.engines.megatron.packed_input import ReadSettings
from ppoctl.engines.megatron.parameter_shards import gathered_weights, specs_in, start_adapters
from ppoctl.engines.megatron.process_group import ensure_process_group
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.reference import ActorWeights, ActorWithoutAdapters, Reference, ReferenceModel
from ppoctl.engines.megatron.router import take_routing, update_biases
from ppoctl.engines.megatron.schedule import (
    MicrobatchResult,
    experts_of,
    run_forward,
    run_forward_backward,
    share_of,
    total_loss,
)
from ppoctl.engines.megatron.state_writer import RankSaving
from ppoctl.engines.megatron.weight_source import ModelSources
from ppoctl.engines.weights.bucket import TensorSpec
from ppoctl.engines.weights.sending import PARTS, Part, SendingRank
from ppoctl.models.convert.checksum import TensorChecksum
from ppoctl.models.convert.peft_folder import PeftFolder, require_fits
from ppoctl.models.cost import token_cost
from ppoctl.models.end_tokens import end_token_ids
from ppoctl.models.folder import model_folder
from ppoctl.models.labels import label_number
from ppoctl.models.model import Model
from ppoctl.models.shape import ModelShape


class MegatronRank(SendingRank, ProfiledProcess, MeasuredProcess):
    """One rank of a trained role. `start` or `load` reads and builds the model."""

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__()
        self.settings = settings
        self.groups = ensure_process_group(settings.parallel, settings.collective_s)
        self.device = this_device() if settings.device is None else torch.device(settings.device)
        self._sources = ModelSources(read_labels=settings.is_reward_model)
        self._stages: list[DistributedDataParallel] = []
        self._optimizer: MegatronOptimizer | None = None
        self._reference = self._reference_from(settings.reference or settings.model)
        self._saving: tuple[Path, RankSaving]
        self._host = HostOffload()
        self._experts: RankExperts

    def start(self) -> None:
        """Load weights from the model source and create a new optimizer.

        Raises EnvironmentProblemError or RecipeError if the source is missing, broken or not supported.
        """
        self._reload("weights", "training")
        with megatron_device():
            self._sources.load(self.settings.model, self._build_once())
            for model in self.models:
                if isinstance(model, LogprobModel):
                    model.start_value_head()
            start_adapters(self.models, (self.settings.seed, "lora", self.settings.role), self._own_adapter())
            # This must follow the load of the weights: the optimizer copies them to its float32 main weights.
            self._optimizer = self._build_optimizer()

    def start_frozen(self) -> None:
        """Load weights from the model source without an optimizer, for a model that never changes (a reward model).
        Raises the errors of `start`."""
        assert isinstance(self._reference, ReferenceModel)
        self._reference.stages()

    def begin_save(self, folder: Path, in_background: bool) -> None:  # noqa: FBT001 - called by name and position
        """Begin to write this rank's shard of weights and optimizer into an existing folder. With `in_background`, a
        copy of the shard is written. Raises StorageError."""
        self._reload("weights", "training")
        MEASUREMENTS.take_moved_s()  # a save is in no stage
        with megatron_device():
            how = self.settings.reshardable
            saving = checkpoint.begin_save(self._trained(), folder, reshardable=how, in_background=in_background)
        self._saving = folder, saving

    def is_saved(self) -> bool:
        """Whether this rank has written its shard."""
        return self._saving[1].is_written()

    def finish_save(self) -> dict[str, FileDigest]:
        """Wait until all ranks have written their files, and return the flushed files of this rank. Raises
        StorageError."""
        folder, saving = self._saving
        del self._saving
        return checkpoint.finish_save(saving, folder)

    def frozen_checksums(self) -> dict[str, TensorChecksum]:
        """See `frozen.frozen_checksums`."""
        self._reload("weights")
        return frozen_checksums(self.models)

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer bit for bit as they were saved. Frozen weights are those of the model source.
        Raises StorageError."""
        self._reload("weights", "training")
        with megatron_device():
            if not self._stages and not self.settings.trainable.is_all:
                self._sources.load(self.settings.model, self._build_once())
            self._build_once()
            if self._optimizer is None:
                self._optimizer = self._build_optimizer()
            checkpoint.load_state(self._trained(), folder)

    def update(
        self, sequences: Sequences, minibatches: Sequence[Minibatch], objective: Objective
    ) -> list[RankStepResult]:
        """Take one optimizer step per minibatch, in order.

        Raises NonFiniteError before the step if a minibatch's loss or gradient is not finite.
        """
        self._reload("weights", "training")
        with megatron_device():
            each = track_items(minibatches, "minibatch")
            results = [self._minibatch_step(sequences, one, objective, number) for number, one in each]
            if results and self.settings.trainable.lora is not None and self.settings.head == "token":
                results[-1] = replace(results[-1], merge_error=merge_error(self.models))
            return results

    def take_usage(self) -> ProcessUsage:
        """Return the usage since the last call, with what routers have counted."""
        models = [stage.module for stage in self._stages]
        return replace(super().take_usage(), **take_routing(models))

    def forward(self, sequences: Sequences, request: OutputRequest) -> RankOutputs | None:
        """Return the model's outputs for every response token of this data rank's rows, without gradient."""
        if not request.reference:
            self._reload("weights")
            return self._forward(partial(run_forward, self.stages), sequences, request)
        self._reload("weights", "reference")
        return self._forward(partial(self._reference.run_with_actor, self.models), sequences, request)

    def take_experts(self) -> RankExperts:
        """Return and forget the experts that the routers chose in the last forward pass, which requested them."""
        experts = self._experts
        del self._experts
        return experts

    def reference_forward(self, sequences: Sequences, request: OutputRequest) -> RankOutputs | None:
        """Return log-probs, or a reward model's scores, with the frozen initial weights (see `ReferenceModel`)."""
        self._reload(*self._reference.parts)
        return self._forward(self._reference.run, sequences, request)

    def weights(self, parts: Sequence[Part]) -> list[Iterator[tuple[str, Tensor]]]:
        self._reload("weights")
        return [gathered_weights(self.models, part) for part in parts]

    def weight_specs(self, parts: Sequence[Part] = PARTS) -> list[TensorSpec]:
        self._reload("weights")  # specs are read from views of the weights
        return [spec for part in parts for spec in specs_in(self.models, part)]

    def offload(self) -> None:
        """Offload all parts to the host. A part is reloaded when it is used; gradients are dropped and start at 0."""
        self.stop_sharing()
        if self._optimizer is not None:
            self._host.offload("weights", (weight for model in self.models for weight in model.parameters()))
            self._optimizer.zero_grad()
            self._host.offload("training", optimizer.gradient_buffers(self.stages), keep=False)
            self._host.offload("training", optimizer.held_tensors(self._optimizer))
        self._host.offload("reference", self._reference.weights())
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise only this process could reuse the memory

    def _reload(self, *parts: str) -> None:
        """Reload these parts to the device: weights, training (gradients and optimizer), reference. Sharing with
        engines is stopped first: engines must not read buffers whose weights are about to change."""
        reset_peak()
        self.stop_sharing()
        for part in parts:
            self._host.reload(part)

    @property
    def source(self) -> tuple[Path, ModelShape]:
        """Folder of the model source, and the shape of its model."""
        return self._sources.of(self.settings.model)

    @property
    def stages(self) -> list[DistributedDataParallel]:
        """This rank's pipeline stages, wrapped in Megatron-Core's gradient buffers."""
        assert self._stages, f"the {self.settings.role} has no state: call `start` or `load` first"
        return self._stages

    @property
    def models(self) -> list[PackedModel]:
        """This rank's pipeline stages without the wrapper with the gradient buffers."""
        return [stage.module for stage in self.stages]

    @property
    def optimizer(self) -> MegatronOptimizer:
        assert self._optimizer is not None, f"the {self.settings.role} has no state: call `start` or `load` first"
        return self._optimizer

    def _trained(self) -> checkpoint.TrainerState:
        return checkpoint.TrainerState(self.stages, self.optimizer, self.groups, self.settings.parallel)

    def _own_adapter(self) -> PeftFolder | None:
        """Return the adapter that the role starts from; None: there is none. Raises RecipeError or
        EnvironmentProblemError if it does not fit the role."""
        settings = self.settings
        if settings.adapters is None:
            return None
        adapter = PeftFolder(model_folder(settings.adapters))
        require_fits(adapter, settings.trainable, self.source[1], settings.head, f"{settings.role}.train.lora")
        return adapter

    def _build(self, folder: Path, model: Model, shared: ActorWeights | None = None) -> list[PackedModel]:
        settings = self.settings
        label = label_number(folder, settings.label, settings.role) if settings.is_reward_model else None
        built_from = ModelSettings(
            model,
            settings.dtype,
            self.device,
            settings.batching.logits_chunk_tokens,
            settings.parallel,
            settings.recompute,
            settings.kernels,
            label,
            balance=settings.balance,
        )
        model_class = ScoreModel if settings.is_reward_model else MODELS[model.head]
        try:
            with megatron_device():
                return build_stages(model_class, built_from, self.groups, None if shared is None else shared.adopt)
        # Megatron-Core reports a layout that does not fit by either of these.
        except (ValueError, AssertionError) as error:
            role, first = settings.role, next(iter(str(error).splitlines()), "no message")
            raise EnvironmentProblemError(
                f"Megatron-Core cannot build `{folder}` with this `{role}.parallel`: {first}",
                hint=f"--set '{role}.parallel={{}}'",
            ) from error

    def _reference_from(self, source: str) -> Reference:
        """Return the reference with the weights of this model source, or the frozen model of a reward model."""
        kind = self.settings.reference_kind
        if kind == "adapters_off":
            return ActorWithoutAdapters(lambda: self.models)

        def build(actor: ActorWeights | None) -> list[PackedModel]:
            folder, shape = self._sources.of(source)
            return self._build(folder, Model(shape, self.settings.head), actor)

        actor = ActorWeights(lambda: self.models) if kind == "shared" else None
        return ReferenceModel(build, partial(self._sources.load, source), actor)

    def _build_once(self) -> list[PackedModel]:
        if not self._stages:
            models = self._build(self.source[0], self.settings.model_in(self.source[1]))
            for model in models:
                attach_adapters(model)
                freeze(model)
            is_sharded = self.settings.parallel.distributed_optimizer
            self._stages = optimizer.with_gradient_buffers(models, self.groups, is_sharded=is_sharded)
        return self.models

    def _build_optimizer(self) -> MegatronOptimizer:
        return optimizer.build_optimizer(self.stages, self.settings.dtype, self.settings.optimizer_on)

    def _cut(self, request: OutputRequest, *, with_gradient: bool) -> MicrobatchPlan:
        parallel, data = self.settings.parallel, self.groups.dp
        split = self.groups.cp if parallel.context > 1 else None
        chunks = CHUNKS_PER_RANK * parallel.context if split else 1
        multiple = (parallel.tensor if parallel.sequence else 1) * chunks
        return MicrobatchPlan(
            batching=self.settings.batching,
            reading=ReadSettings(self.device, request, self._ends(request), token_multiple=multiple, context=split),
            cost=token_cost(self.source[1]),
            rank=data.rank(),
            ranks=data.size(),
            count_multiple=parallel.pipeline if parallel.stages_per_rank > 1 else int(parallel.experts_span_data),
            with_gradient=with_gradient,
        )

    def _ends(self, request: OutputRequest) -> tuple[int, ...]:
        """Return the ids that end a response, if the request needs them."""
        if request.min_new_tokens == 0 or self.settings.head == "value":
            return ()
        return (*end_token_ids(self.source[0]), *request.stop_token_ids)

    def _with_reference(self, microbatches: list[Microbatch], request: OutputRequest) -> list[Microbatch]:
        """Return the microbatches. If full KL is requested, add the reference's hidden states to them."""
        if not request.full_kl:
            return microbatches
        self._host.reload("reference")
        return self._reference.add_to(microbatches)

    def _sees_outputs(self) -> bool:
        pipeline = self.groups.pp
        return pipeline.rank() == pipeline.size() - 1 and self.groups.tp.rank() == self.groups.cp.rank() == 0

    def _share(self, microbatches: Sequence[Microbatch], found: Sequence[MicrobatchResult]) -> RankOutputs | None:
        return share_of(microbatches, found) if self._sees_outputs() else None

    def _forward(
        self, run: Callable[[list[Microbatch]], list[MicrobatchResult]], sequences: Sequences, request: OutputRequest
    ) -> RankOutputs | None:
        settings, cut = self.settings, self._cut(request, with_gradient=False)
        microbatches = cut_rows(sequences, torch.arange(sequences.num_seqs), cut)
        # The reference's hidden states of all microbatches of a group are in memory together, so a group has only one
        # microbatch per pipeline rank.
        size = settings.parallel.pipeline if request.full_kl or request.reference else len(microbatches)
        results: list[MicrobatchResult] = []
        with megatron_device(), named_out_of_memory(settings.role, settings.batching, with_gradient=False):
            for start in range(0, len(microbatches), size):
                group = self._with_reference(microbatches[start : start + size], request)
                results += run(group)
        if request.experts:
            self._experts = experts_of(microbatches, self.groups.tp, is_split=settings.parallel.sequence)
        return self._share(microbatches, results)

    def _minibatch_step(
        self, sequences: Sequences, minibatch: Minibatch, objective: Objective, number: int
    ) -> RankStepResult:
        microbatches = cut_rows(sequences, minibatch.rows, self._cut(objective.request, with_gradient=True))

        def loss_of(microbatch: Microbatch, outputs: TokenOutputs) -> Float[Tensor, ""]:
            return objective(microbatch.rows, outputs, minibatch.totals)

        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()  # main weights have gradients of their own
        with named_out_of_memory(self.settings.role, self.settings.batching, with_gradient=True):
            microbatches = self._with_reference(microbatches, objective.request)
            results = run_forward_backward(self.stages, microbatches, loss_of)
        loss = total_loss(sum(result.loss for result in results), self.device, counts=self._sees_outputs())
        self._require_finite("loss", loss, number)
        grad_norm = optimizer.gradient_norm(self.optimizer)
        self._require_finite("gradient norm", grad_norm, number)
        optimizer.step(self.optimizer, minibatch.step, grad_norm)
        update_biases(self.models, self.settings.balance.bias_rate)
        return RankStepResult(loss, grad_norm, self._share(microbatches, results))

    def _require_finite(self, quantity: str, value: float, number: int) -> None:
        if not math.isfinite(value):
            role = self.settings.role
            raise NonFiniteError(
                f"{quantity} of the {role} is `{value}` in minibatch {number} of this update; no step was taken",
                hint=f"check this step's rewards and advantages; then lower `{role}.optimizer.lr`",
            )
