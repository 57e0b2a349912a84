"""What actor and critic share: a model with its optimizer at one state, forwards without gradient, and updates.

One update of a minibatch, with Megatron-Core's own pieces: its schedule runs forward and backward over the
microbatches, gradients add up in its float32 buffers, its optimizer keeps float32 main weights and steps. Ours are
the loss (each microbatch's sum over the global count, handed in, so nothing is averaged afterwards) and the checks
that stand between gradients and step. Tensors of the rollouts' size cross to the CPU, where objectives are computed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from ppoctl.batch.records import Rollouts
from ppoctl.engines.megatron import checkpoint, optimizer
from ppoctl.engines.megatron.cpu_adaptation import megatron_device
from ppoctl.engines.megatron.export import save_hugging_face
from ppoctl.engines.megatron.families import ModelShape, model_folder, read_shape
from ppoctl.engines.megatron.microbatches import Cut, Microbatch, cut_rows, gather_grids
from ppoctl.engines.megatron.model import ModelSettings, PackedModel, TokenOutputs, build_model
from ppoctl.engines.megatron.process_group import ensure_process_group
from ppoctl.engines.megatron.weights import load_weights
from ppoctl.errors import NonFiniteError
from ppoctl.ports import Minibatch, MinibatchResult, Objective
from ppoctl.recipe.schema import BySequences, ByTokens


@dataclass(frozen=True)
class TrainerSettings:
    """What a trainer is made from."""

    model: str
    """Hugging Face folder or hub id: the model source, and the reference."""
    dtype: torch.dtype
    """Of weights and activations; float32 or bfloat16."""
    batching: BySequences | ByTokens
    device: torch.device
    temperature: float = 1.0
    """Divides the logits in updates, as it did when the rollouts were drawn; a critic does not read it."""


@dataclass(frozen=True)
class Outputs:
    """Token outputs of some rows on the response grid, on the CPU; 0 where not present."""

    outputs: Float[Tensor, "M R"]
    entropy: Float[Tensor, "M R"] | None


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
        """Weights from the model source, a fresh optimizer."""
        folder, _ = self.source
        self._optimizer = None
        with megatron_device():
            load_weights(self._model(), folder)
            # After the weights: the optimizer copies them as its main weights.
            self._optimizer = optimizer.build_optimizer(self.wrapped, self.settings.dtype, self._groups)

    def save(self, folder: Path) -> None:
        """Weights and optimizer, flushed to disk; see `checkpoint`."""
        with megatron_device():
            checkpoint.save_state(self.wrapped, self.optimizer, self._groups, folder)

    def load(self, folder: Path) -> None:
        """Bit for bit what `save` wrote; raises StorageError."""
        with megatron_device():
            self._model()
            self._optimizer = self._optimizer or optimizer.build_optimizer(
                self.wrapped, self.settings.dtype, self._groups
            )
            checkpoint.load_state(self.wrapped, self.optimizer, self._groups, folder)

    def save_weights(self, folder: Path) -> None:
        """Weights alone, as a Hugging Face folder."""
        save_hugging_face(self._model(), self.source[0], folder)

    def update(self, rollouts: Rollouts, minibatches: Sequence[Minibatch], objective: Objective) -> list[MinibatchResult]:
        """One optimizer step per minibatch, in order; raises NonFiniteError before a step that would spoil the
        weights."""
        with megatron_device():
            return [self._step(rollouts, minibatch, objective, number) for number, minibatch in enumerate(minibatches)]

    @property
    def source(self) -> tuple[Path, ModelShape]:
        """Folder of the model source, and what its configuration says."""
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
    def optimizer(self) -> MegatronOptimizer:
        assert self._optimizer is not None, f"the {self.role} is at no state: call `start` or `load` first"
        return self._optimizer

    def build(self) -> PackedModel:
        """A model of the source's shape, on the device, with undefined weights."""
        settings = self.settings
        chunk_tokens = settings.batching.logits_chunk_tokens
        model = ModelSettings(self.source[1], settings.dtype, settings.device, chunk_tokens)
        with megatron_device():
            return build_model(self.model_class, model, self._groups)

    def _model(self) -> PackedModel:
        if self._wrapped is None:
            model = self.build()
            buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
            self._wrapped = DistributedDataParallel(model.config, buffers, model, pg_collection=self._groups)
            model.config.finalize_model_grads_func = _reduce_gradients
            model.config.no_sync_func = self._wrapped.no_sync
        module = self._wrapped.module
        assert isinstance(module, PackedModel)
        return module

    def forward(self, model: torch.nn.Module, rollouts: Rollouts, *, temperature: float = 1.0) -> Outputs:
        """What `model` says about every response token, without gradient."""
        cut = Cut(self.settings.batching, self.settings.device, temperature, with_entropy=True)
        microbatches = cut_rows(rollouts, torch.arange(rollouts.num_seqs), cut)
        with megatron_device(), torch.no_grad():
            collected = _run(model, microbatches, _collect, forward_only=True)
        return _gathered(microbatches, collected)

    def _step(self, rollouts: Rollouts, minibatch: Minibatch, objective: Objective, number: int) -> MinibatchResult:
        temperature, with_entropy = self.settings.temperature, objective.needs_entropy
        cut = Cut(self.settings.batching, self.settings.device, temperature, with_entropy)
        microbatches = cut_rows(rollouts, minibatch.rows, cut)
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss_of = partial(_loss, objective=objective, num_tokens_global=minibatch.num_tokens_global)
        collected = _run(self.wrapped, microbatches, loss_of, forward_only=False)
        loss = math.fsum(float(one["loss"]) for one in collected)
        self._require_finite("loss", loss, number)
        grad_norm = optimizer.gradient_norm(self.optimizer)
        self._require_finite("gradient norm", grad_norm, number)
        optimizer.step(self.optimizer, minibatch.step, grad_norm)
        gathered = _gathered(microbatches, collected)
        return MinibatchResult(loss, grad_norm, gathered.outputs, gathered.entropy)

    def _require_finite(self, quantity: str, value: float, number: int) -> None:
        if not math.isfinite(value):
            raise NonFiniteError(
                f"{quantity} of the {self.role} is `{value}` in minibatch {number} of this update; no step was taken",
                hint=f"look at this step's rewards and advantages; then lower `{self.role}.optimizer.lr`",
            )


def _run(model: torch.nn.Module, microbatches: Sequence[Microbatch], loss_of: Any, *, forward_only: bool) -> list[Any]:
    """Megatron-Core's schedule over the microbatches; what `loss_of` collects from each, in their order."""

    def forward_step(data: Iterator[Microbatch], stage: torch.nn.Module) -> tuple[Any, Any]:
        microbatch = next(data)
        return stage(microbatch.input), partial(loss_of, microbatch)

    collected: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=model,
        num_microbatches=len(microbatches),
        seq_length=max(microbatch.packed.tokens.numel() for microbatch in microbatches),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return collected


def _collect(microbatch: Microbatch, outputs: TokenOutputs, *, non_loss_data: bool = True) -> dict[str, Tensor | None]:
    """Outputs on the grid of the microbatch's rows."""
    assert non_loss_data
    entropy = None if outputs.entropy is None else microbatch.packed.to_grid(outputs.entropy.cpu())
    return {"outputs": microbatch.packed.to_grid(outputs.outputs.cpu()), "entropy": entropy}


def _loss(
    microbatch: Microbatch, outputs: TokenOutputs, *, objective: Objective, num_tokens_global: int
) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    """What the schedule wants: the loss, a token count to divide by, and what to collect.

    The count is 0, which Megatron-Core takes for "do not divide": the loss is already over the global count.
    """
    grids = _collect(microbatch, outputs)
    loss = objective(microbatch.rows, grids["outputs"], grids["entropy"], num_tokens_global)
    detached = {name: None if grid is None else grid.detach() for name, grid in grids.items()}
    return loss, torch.zeros((), dtype=torch.int), {**detached, "loss": loss.detach()}


def _reduce_gradients(model: list[torch.nn.Module], num_tokens: Tensor | None, **groups: Any) -> None:
    """Megatron-Core's reduction over ranks, without its division by the number of tokens."""
    finalize_model_grads(model, None, **groups)


def _gathered(microbatches: Sequence[Microbatch], collected: Sequence[dict[str, Tensor | None]]) -> Outputs:
    def gather(name: str) -> Tensor | None:
        grids = [one[name] for one in collected if one[name] is not None]
        return gather_grids(microbatches, grids) if grids else None

    outputs = gather("outputs")
    assert outputs is not None
    return Outputs(outputs, gather("entropy"))
