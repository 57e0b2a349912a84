"""What actor and critic share: a model with its optimizer at one state, forwards without gradient, and updates.

A minibatch is one optimizer step: Megatron-Core's schedule runs forward and backward over its microbatches
(`schedule`), gradients add up in Megatron-Core's float32 buffers, and only when loss and gradient norm have been
found finite does its optimizer step (`optimizer`).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from ppoctl.batch.records import Rollouts
from ppoctl.engines.megatron import checkpoint, optimizer
from ppoctl.engines.megatron.cpu_adaptation import megatron_device
from ppoctl.engines.megatron.export import save_hugging_face
from ppoctl.engines.megatron.families import ModelShape, model_folder, read_shape
from ppoctl.engines.megatron.microbatches import Cut, Microbatch, cut_rows
from ppoctl.engines.megatron.model import ModelSettings, PackedModel, build_model
from ppoctl.engines.megatron.process_group import ensure_process_group
from ppoctl.engines.megatron.schedule import Collected, reduce_gradients, run_forward, run_forward_backward
from ppoctl.engines.megatron.weights import load_weights
from ppoctl.errors import NonFiniteError, OutOfMemoryError
from ppoctl.ports import Minibatch, MinibatchResult, Objective
from ppoctl.recipe.schema import BySequences, ByTokens


@dataclass(frozen=True)
class TrainerSettings:
    """What a trainer is made from."""

    model: str
    """Hugging Face folder or hub id: where actor, critic and reference start."""
    dtype: torch.dtype
    """Of weights and activations; float32 or bfloat16."""
    batching: BySequences | ByTokens
    device: torch.device
    temperature: float = 1.0
    """Divides the logits in updates, as it did when the rollouts were drawn; a critic does not read it."""


class MegatronTrainer:
    """A `ports.Trainer`. Nothing is read or built before `start` or `load`."""

    role: ClassVar[str]
    model_class: ClassVar[type[PackedModel]]

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings
        self._groups = ensure_process_group()
        self._source: tuple[Path, ModelShape] | None = None
        self._wrapped: DistributedDataParallel | None = None
        self._optimizer: MegatronOptimizer | None = None

    def start(self) -> None:
        """Weights from the model source, a fresh optimizer.

        Raises EnvironmentProblemError or RecipeError when the source is missing, broken or not supported.
        """
        with megatron_device():
            load_weights(self._build_once(), self.source[0])
            # After the weights: the optimizer takes its float32 main weights from them.
            self._optimizer = optimizer.build_optimizer(self.wrapped, self.settings.dtype, self._groups)

    def save(self, folder: Path) -> None:
        """Write weights and optimizer into an existing empty folder, flushed to disk. Raises StorageError."""
        with megatron_device():
            checkpoint.save_state(self.wrapped, self.optimizer, self._groups, folder)

    def load(self, folder: Path) -> None:
        """Weights and optimizer bit for bit as `save` wrote them. Raises StorageError."""
        with megatron_device():
            self._build_once()
            if self._optimizer is None:
                self._optimizer = optimizer.build_optimizer(self.wrapped, self.settings.dtype, self._groups)
            checkpoint.load_state(self.wrapped, self.optimizer, self._groups, folder)

    def save_weights(self, folder: Path) -> None:
        """Write the weights alone into an existing empty folder, as a Hugging Face model."""
        save_hugging_face(self.model, self.source[0], folder)

    def update(
        self, rollouts: Rollouts, minibatches: Sequence[Minibatch], objective: Objective
    ) -> list[MinibatchResult]:
        """One optimizer step per minibatch, in order.

        Raises NonFiniteError before the step when a minibatch's loss or gradient is not finite.
        """
        with megatron_device():
            return [
                self._minibatch_step(rollouts, minibatch, objective, number)
                for number, minibatch in enumerate(minibatches)
            ]

    @property
    def source(self) -> tuple[Path, ModelShape]:
        """Folder of the model source, and the model its configuration describes."""
        if self._source is None:
            folder = model_folder(self.settings.model)
            self._source = folder, read_shape(folder)
        return self._source

    @property
    def wrapped(self) -> DistributedDataParallel:
        """The model inside Megatron-Core's gradient buffers."""
        assert self._wrapped is not None, f"the {self.role} is at no state: call `start` or `load` first"
        return self._wrapped

    @property
    def model(self) -> PackedModel:
        module = self.wrapped.module
        assert isinstance(module, PackedModel)
        return module

    @property
    def optimizer(self) -> MegatronOptimizer:
        assert self._optimizer is not None, f"the {self.role} is at no state: call `start` or `load` first"
        return self._optimizer

    def build(self) -> PackedModel:
        """A model of the source's shape on the device, with undefined weights."""
        settings = self.settings
        chunk_tokens = settings.batching.logits_chunk_tokens
        model = ModelSettings(self.source[1], settings.dtype, settings.device, chunk_tokens)
        with megatron_device():
            return build_model(self.model_class, model, self._groups)

    def forward(self, model: torch.nn.Module, rollouts: Rollouts, *, temperature: float = 1.0) -> Collected:
        """What `model` says about every response token, without gradient."""
        cut = Cut(self.settings.batching, self.settings.device, temperature, with_entropy=True)
        microbatches = cut_rows(rollouts, torch.arange(rollouts.num_seqs), cut)
        with megatron_device(), self._named_out_of_memory():
            return run_forward(model, microbatches)

    def _build_once(self) -> PackedModel:
        if self._wrapped is None:
            model = self.build()
            buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
            self._wrapped = DistributedDataParallel(model.config, buffers, model, pg_collection=self._groups)
            model.config.finalize_model_grads_func = reduce_gradients
            model.config.no_sync_func = self._wrapped.no_sync
        return self.model

    def _minibatch_step(
        self, rollouts: Rollouts, minibatch: Minibatch, objective: Objective, number: int
    ) -> MinibatchResult:
        settings = self.settings
        cut = Cut(settings.batching, settings.device, settings.temperature, objective.needs_entropy)
        microbatches = cut_rows(rollouts, minibatch.rows, cut)

        def loss_of(microbatch: Microbatch, found: Collected) -> Float[Tensor, ""]:
            return objective(microbatch.rows, found.outputs, found.entropy, minibatch.num_tokens_global)

        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self._named_out_of_memory():
            found = run_forward_backward(self.wrapped, microbatches, loss_of)
        assert found.loss is not None
        self._require_finite("loss", found.loss, number)
        grad_norm = optimizer.gradient_norm(self.optimizer)
        self._require_finite("gradient norm", grad_norm, number)
        optimizer.step(self.optimizer, minibatch.step, grad_norm)
        return MinibatchResult(found.loss, grad_norm, found.outputs, found.entropy)

    def _require_finite(self, quantity: str, value: float, number: int) -> None:
        if not math.isfinite(value):
            raise NonFiniteError(
                f"{quantity} of the {self.role} is `{value}` in minibatch {number} of this update; no step was taken",
                hint=f"look at this step's rewards and advantages; then lower `{self.role}.optimizer.lr`",
            )

    @contextmanager
    def _named_out_of_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            key, *_ = type(self.settings.batching).model_fields
            raise OutOfMemoryError(
                f"the {self.role} ran out of device memory with `{self.role}.batching.{key} = "
                f"{getattr(self.settings.batching, key)}`",
                hint=f"lower it with `--set {self.role}.batching.{key}=...`; results do not change",
            ) from error
