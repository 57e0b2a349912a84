"""One process of a trained role: its part of the model with its part of the optimizer.

A minibatch is one optimizer step: Megatron-Core's schedule runs forward and backward over its microbatches
(`schedule`), gradients add up in Megatron-Core's float32 buffers, and only when loss and gradient norm have been
found finite, on all ranks alike, does its optimizer step (`optimizer`).

    role (actor, critic)  =  data ranks  x  context ranks  x  pipeline ranks  x  tensor ranks
                             rows            tokens            layers            heads, columns, vocabulary
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from ppoctl.activity import track_items
from ppoctl.batch.digest import FileDigest
from ppoctl.batch.sequences import Sequences
from ppoctl.convert.torch_dist import is_torch_dist
from ppoctl.engines.megatron import checkpoint, optimizer
from ppoctl.engines.megatron.context_parallel import CHUNKS_PER_RANK
from ppoctl.engines.megatron.cpu_adaptation import megatron_device
from ppoctl.engines.megatron.microbatches import Microbatch, MicrobatchPlan, RankOutputs, cut_rows
from ppoctl.engines.megatron.model import (
    LogprobModel,
    ModelSettings,
    PackedModel,
    ScoreModel,
    ValueModel,
    build_stages,
)
from ppoctl.engines.megatron.offload import HostOffload
from ppoctl.engines.megatron.out_of_memory import named_out_of_memory
from ppoctl.engines.megatron.packed_input import ReadSettings
from ppoctl.engines.megatron.process_group import COLLECTIVE_S, ensure_process_group
from ppoctl.engines.megatron.reference import ReferenceModel
from ppoctl.engines.megatron.schedule import (
    MicrobatchResult,
    ModelChunks,
    reduce_gradients,
    run_forward,
    run_forward_backward,
    share_of,
    with_reference,
)
from ppoctl.engines.megatron.state_reader import load_torch_dist
from ppoctl.engines.megatron.state_writer import RankSaving
from ppoctl.engines.megatron.weights import gathered_weights, load_weights, sent_parts
from ppoctl.errors import EnvironmentProblemError, NonFiniteError
from ppoctl.machine.device import this_device
from ppoctl.model.cost import token_cost
from ppoctl.model.end_tokens import end_token_ids
from ppoctl.model.folder import model_folder
from ppoctl.model.labels import label_number, labels_of
from ppoctl.model.shape import ModelShape
from ppoctl.model.shape_reader import read_shape
from ppoctl.ports import Minibatch, Objective, OutputRequest, TokenOutputs
from ppoctl.recipe.schema import BySequences, ByTokens, ParallelTable, Recompute
from ppoctl.weights.bucket import TensorSpec
from ppoctl.weights.sending import SendingRank


@dataclass(frozen=True)
class TrainerSettings:
    """What each process of a role is made from."""

    role: str
    """actor or critic; of a reward model the key of its table, which is or begins with `reward`."""
    model: str
    """Hugging Face folder or hub id, or a Megatron folder with its config.json: where actor, critic and reference
    start."""
    dtype: torch.dtype
    """Type of weights and activations; float32 or bfloat16."""
    batching: BySequences | ByTokens
    parallel: ParallelTable = field(default_factory=ParallelTable)
    recompute: Recompute = "none"
    reshardable: str = "full"
    """Under which layouts a distributed optimizer's states can be loaded: full, dp."""
    device: str | None = None
    """Absent: this process's GPU, else the CPU."""
    collective_s: float = COLLECTIVE_S
    """How long ranks wait for each other in a collective (`process_group.Patience`)."""
    label: str | None = None
    """Label whose probability a reward model's score is; None: its head has one output."""

    @property
    def kind(self) -> str:
        """What the role is: actor, critic or reward."""
        return self.role.partition(".")[0]


@dataclass(frozen=True)
class RankStepResult:
    """What a rank saw of one optimizer step."""

    loss: float
    """Loss of the whole minibatch."""
    grad_norm: float
    """Norm (2-norm) of the whole gradient, before clipping."""
    share: RankOutputs | None
    """Outputs, from the ranks that see them: the first tensor and context rank of the last pipeline stage."""


class MegatronRank(SendingRank):
    """Nothing is read or built before `start` or `load`."""

    model_classes: ClassVar[dict[str, type[PackedModel]]] = {
        "actor": LogprobModel,
        "critic": ValueModel,
        "reward": ScoreModel,
    }

    def __init__(self, settings: TrainerSettings) -> None:
        super().__init__()
        self.settings = settings
        self.groups = ensure_process_group(settings.parallel, settings.collective_s)
        self.device = _device(settings.device)
        self._source: tuple[Path, ModelShape] | None = None
        self._stages: list[DistributedDataParallel] = []
        self._optimizer: MegatronOptimizer | None = None
        self._reference = ReferenceModel(self._build, self._read_source)
        self._saving: tuple[Path, RankSaving]
        self._host = HostOffload()

    def start(self) -> None:
        """Weights from the model source, a fresh optimizer.

        Raises EnvironmentProblemError or RecipeError when the source is missing, broken or not supported.
        """
        self._have("weights", "training")
        with megatron_device():
            self._read_source(self._build_once())
            # After the weights: the optimizer takes its float32 main weights from them.
            self._optimizer = optimizer.build_optimizer(self.stages, self.settings.dtype)

    def start_frozen(self) -> None:
        """Weights from the model source that never change: all that a reward model has. Raises as `start` does."""
        self._reference.stages()

    def begin_save(self, folder: Path, in_background: bool) -> None:  # noqa: FBT001 - asked by name and position
        """Write this rank's part of weights and optimizer into an existing folder, or a copy of it in the background.
        Raises StorageError."""
        self._have("weights", "training")
        with megatron_device():
            how = self.settings.reshardable
            saving = checkpoint.begin_save(self._trained(), folder, reshardable=how, in_background=in_background)
        self._saving = folder, saving

    def is_saved(self) -> bool:
        """Whether this rank's part is written."""
        return self._saving[1].is_written()

    def finish_save(self) -> dict[str, FileDigest]:
        """The files this rank has written, flushed, once all ranks have written theirs. Raises StorageError."""
        folder, saving = self._saving
        del self._saving
        return checkpoint.finish_save(saving, folder)

    def load(self, folder: Path) -> None:
        """Weights and optimizer bit for bit as they were saved. Raises StorageError."""
        self._have("weights", "training")
        with megatron_device():
            self._build_once()
            if self._optimizer is None:
                self._optimizer = optimizer.build_optimizer(self.stages, self.settings.dtype)
            checkpoint.load_state(self._trained(), folder)

    def update(
        self, sequences: Sequences, minibatches: Sequence[Minibatch], objective: Objective
    ) -> list[RankStepResult]:
        """One optimizer step per minibatch, in order.

        Raises NonFiniteError before the step when a minibatch's loss or gradient is not finite.
        """
        self._have("weights", "training")
        with megatron_device():
            return [
                self._minibatch_step(sequences, minibatch, objective, number)
                for number, minibatch in track_items(minibatches, "minibatch")
            ]

    def forward(self, sequences: Sequences, asked: OutputRequest) -> RankOutputs | None:
        """What the model says about every response token of this data rank's rows, without gradient."""
        self._have("weights")
        return self._forward(self.stages, sequences, asked)

    def reference_forward(self, sequences: Sequences, asked: OutputRequest) -> RankOutputs | None:
        """Log-probs, or scores of a reward model, under the frozen initial weights (see `Reference`)."""
        stages = self._reference.stages()
        self._have("reference")
        return self._forward(stages, sequences, asked)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """This pipeline rank's weights under Hugging Face names, whole; all tensor and expert ranks take part."""
        self._have("weights")
        return gathered_weights(self.models)

    def weight_specs(self) -> list[TensorSpec]:
        self._have("weights")  # a part is a view
        parts = [part for model in self.models for part in sent_parts(model)]
        return [TensorSpec(part.name, part.view.dtype, part.shape) for part in parts]

    def offload(self) -> None:
        """Move everything to the host, for others to use this device's memory; what is needed comes back when it is
        used. Gradients, which every minibatch begins with zeros, are dropped."""
        self.stop_sharing()
        if self._optimizer is not None:
            self._host.offload("weights", (weight for model in self.models for weight in model.parameters()))
            self._optimizer.zero_grad()
            self._host.offload("training", optimizer.gradient_buffers(self.stages), keep=False)
            self._host.offload("training", optimizer.held_tensors(self._optimizer))
        self._host.offload("reference", self._reference.weights())
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # other processes want it, not only others of this one

    def _have(self, *parts: str) -> None:
        """Have these on the device: weights, training (gradients and optimizer), reference. Engines can no longer
        read what was shared with them."""
        self.stop_sharing()
        for part in parts:
            self._host.reload(part)

    @property
    def source(self) -> tuple[Path, ModelShape]:
        """Folder of the model source, and the model its configuration describes."""
        if self._source is None:
            folder = model_folder(self.settings.model)
            labels = len(labels_of(folder)) if self.settings.kind == "reward" else 1
            self._source = folder, replace(read_shape(folder), labels=labels)
        return self._source

    @property
    def stages(self) -> list[DistributedDataParallel]:
        """This rank's pipeline stages inside Megatron-Core's gradient buffers."""
        assert self._stages, f"the {self.settings.role} is at no state: call `start` or `load` first"
        return self._stages

    @property
    def models(self) -> list[PackedModel]:
        """This rank's pipeline stages without Megatron-Core's gradient buffers around them."""
        return [stage.module for stage in self.stages]

    @property
    def optimizer(self) -> MegatronOptimizer:
        assert self._optimizer is not None, f"the {self.settings.role} is at no state: call `start` or `load` first"
        return self._optimizer

    def _read_source(self, stages: Sequence[PackedModel]) -> None:
        """Weights of the model source: a Hugging Face folder, or one that `convert-ckpt --to megatron` made."""
        folder = self.source[0]
        with megatron_device():
            if is_torch_dist(folder):
                load_torch_dist(stages, folder)
            else:
                load_weights(stages, folder)

    def _trained(self) -> checkpoint.TrainerState:
        return checkpoint.TrainerState(self.stages, self.optimizer, self.groups, self.settings.parallel)

    def _build(self) -> list[PackedModel]:
        settings = self.settings
        chunk_tokens = settings.batching.logits_chunk_tokens
        folder, shape = self.source
        label = label_number(folder, settings.label, settings.role) if settings.kind == "reward" else None
        model = ModelSettings(
            shape, settings.dtype, self.device, chunk_tokens, settings.parallel, settings.recompute, label
        )
        try:
            with megatron_device():
                return build_stages(self.model_classes[settings.kind], model, self.groups)
        except (ValueError, AssertionError) as error:
            role, first = settings.role, next(iter(str(error).splitlines()), "no words")
            raise EnvironmentProblemError(
                f"Megatron-Core cannot build `{self.source[0]}` as `{role}.parallel` asks: {first}",
                hint=f"--set '{role}.parallel={{}}'",
            ) from error

    def _build_once(self) -> list[PackedModel]:
        if not self._stages:
            buffers = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=self.settings.parallel.distributed_optimizer,
            )
            for model in self._build():
                wrapped = DistributedDataParallel(model.config, buffers, model, pg_collection=self.groups)
                model.config.finalize_model_grads_func = reduce_gradients
                self._stages.append(wrapped)
            no_sync = [stage.no_sync for stage in self._stages]
            self.models[0].config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        return self.models

    def _cut(self, asked: OutputRequest, *, with_gradient: bool) -> MicrobatchPlan:
        parallel, data = self.settings.parallel, self.groups.dp
        split = self.groups.cp if parallel.context > 1 else None
        multiple = (parallel.tensor if parallel.sequence else 1) * (
            CHUNKS_PER_RANK * parallel.context if split else 1
        )
        return MicrobatchPlan(
            batching=self.settings.batching,
            reading=ReadSettings(self.device, asked, self._ends(asked), token_multiple=multiple, context=split),
            cost=token_cost(self.source[1]),
            rank=data.rank(),
            ranks=data.size(),
            count_multiple=parallel.pipeline if parallel.stages_per_rank > 1 else int(parallel.experts_span_data),
            with_gradient=with_gradient,
        )

    def _ends(self, asked: OutputRequest) -> tuple[int, ...]:
        """Ids that end a response, where that is asked about."""
        if asked.min_new_tokens == 0 or self.settings.role == "critic":
            return ()
        return (*end_token_ids(self.source[0]), *asked.stop_token_ids)

    def _with_reference(self, microbatches: list[Microbatch], asked: OutputRequest) -> list[Microbatch]:
        """The microbatches, with what the reference says of them where full KL is asked."""
        if not asked.full_kl:
            return microbatches
        stages = self._reference.stages()
        self._host.reload("reference")
        return with_reference(stages, microbatches)

    def _sees_outputs(self) -> bool:
        groups = self.groups
        return groups.pp.rank() == groups.pp.size() - 1 and groups.tp.rank() == groups.cp.rank() == 0

    def _share(self, microbatches: Sequence[Microbatch], found: Sequence[MicrobatchResult]) -> RankOutputs | None:
        return share_of(microbatches, found) if self._sees_outputs() else None

    def _forward(self, stages: ModelChunks, sequences: Sequences, asked: OutputRequest) -> RankOutputs | None:
        rows = torch.arange(sequences.num_seqs)
        microbatches = cut_rows(sequences, rows, self._cut(asked, with_gradient=False))
        # The reference's hidden states of a group are in memory together: as many as pipeline ranks have under way.
        role, batching = self.settings.role, self.settings.batching
        size = self.settings.parallel.pipeline if asked.full_kl else len(microbatches)
        found: list[MicrobatchResult] = []
        with megatron_device(), named_out_of_memory(role, batching, with_gradient=False):
            for start in range(0, len(microbatches), size):
                group = self._with_reference(microbatches[start : start + size], asked)
                found += run_forward(stages, group)
        return self._share(microbatches, found)

    def _minibatch_step(
        self, sequences: Sequences, minibatch: Minibatch, objective: Objective, number: int
    ) -> RankStepResult:
        microbatches = cut_rows(sequences, minibatch.rows, self._cut(objective.request, with_gradient=True))

        def loss_of(microbatch: Microbatch, said: TokenOutputs) -> Float[Tensor, ""]:
            return objective(microbatch.rows, said, minibatch.totals)

        for stage in self.stages:
            stage.zero_grad_buffer()
        self.optimizer.zero_grad()
        with named_out_of_memory(self.settings.role, self.settings.batching, with_gradient=True):
            microbatches = self._with_reference(microbatches, objective.request)
            found = run_forward_backward(self.stages, microbatches, loss_of)
        loss = self._whole(sum(one.loss for one in found))
        self._require_finite("loss", loss, number)
        grad_norm = optimizer.gradient_norm(self.optimizer)
        self._require_finite("gradient norm", grad_norm, number)
        optimizer.step(self.optimizer, minibatch.step, grad_norm)
        return RankStepResult(loss, grad_norm, self._share(microbatches, found))

    def _whole(self, loss: float) -> float:
        """The sum over the data ranks, known to every rank, so that all of them go on or none."""
        world = torch.distributed.group.WORLD
        if torch.distributed.get_world_size(world) == 1:
            return loss
        total = torch.tensor(loss if self._sees_outputs() else 0.0, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total, group=world)
        return float(total)

    def _require_finite(self, quantity: str, value: float, number: int) -> None:
        if not math.isfinite(value):
            role = self.settings.role
            raise NonFiniteError(
                f"{quantity} of the {role} is `{value}` in minibatch {number} of this update; no step was taken",
                hint=f"look at this step's rewards and advantages; then lower `{role}.optimizer.lr`",
            )


def _device(name: str | None) -> torch.device:
    if name is not None:
        return torch.device(name)
    return this_device()
