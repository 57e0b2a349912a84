"""The frozen reference on a rank of the actor: a model that always has the weights of its source.

If the source is that of the actor and a part of the actor is frozen, reference and actor share the frozen weights:

    trunk  ->  top of the actor                trunk: layers before the first that trains (`trunk_layers`)
           ->  top of the reference            each top has frozen weights too, by `actor.freeze`: they are shared

If the actor trains adapters, all weights are frozen, and the reference is the actor with its adapters off.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.frozen_parameters import trained_names
from ppoctl.engines.megatron.layer_input import captured_input
from ppoctl.engines.megatron.low_rank import adapters_off
from ppoctl.engines.megatron.megatron_model import PackedModel
from ppoctl.engines.megatron.microbatches import Microbatch
from ppoctl.engines.megatron.output_logprobs import PositionOutputs
from ppoctl.engines.megatron.packed_input import PackedInput
from ppoctl.engines.megatron.schedule import MicrobatchResult, run_forward, with_reference
from ppoctl.models.convert.adapters import trunk_layers
from ppoctl.models.head import VALUE_HEAD_PREFIX


@dataclass(frozen=True)
class ActorWeights:
    """The stages of an actor that starts from the model of the reference."""

    stages: Callable[[], Sequence[PackedModel]]

    def adopt(self, stages: Sequence[PackedModel]) -> None:
        """Replace the frozen weights of a reference's stages by those of the actor. The reference keeps copies of its
        own of those that train."""
        for stage, actor in zip(stages, self.stages(), strict=True):
            trained = trained_names(actor)
            for name, parameter in actor.named_parameters():
                if name not in trained and not name.startswith(VALUE_HEAD_PREFIX):
                    module, _, weight = name.rpartition(".")
                    setattr(stage.get_submodule(module), weight, parameter)

    def addresses(self) -> set[int]:
        """Return the addresses of the storages of the actor's weights."""
        return {_address(weight) for stage in self.stages() for weight in stage.parameters()}


@runtime_checkable
class Reference(Protocol):
    """The frozen reference on a rank of the actor. Weights of its `parts` must be on the device for each pass."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts that must be on the device for a pass of the reference, as in `HostOffload`."""
        ...

    def weights(self) -> Iterator[Tensor]:
        """Yield the reference's own weights that are in memory."""
        ...

    def run(self, microbatches: Sequence[Microbatch]) -> list[MicrobatchResult]:
        """Return the outputs of the reference for each microbatch, as `run_forward` does."""
        ...

    def run_with_actor(
        self, actor: Sequence[PackedModel], microbatches: Sequence[Microbatch]
    ) -> list[MicrobatchResult]:
        """Return the outputs of the actor, and the log-probs of the reference, for each microbatch. Before the last
        pipeline stage the list is empty."""
        ...

    def add_to(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        """Return the microbatches with the reference's hidden states (`schedule.with_reference`)."""
        ...


class ActorWithoutAdapters:
    """The reference of an actor that trains adapters: the actor's own stages without them. It has no memory of its
    own."""

    parts = ("weights",)

    def __init__(self, stages: Callable[[], Sequence[PackedModel]]) -> None:
        self._stages = stages

    def weights(self) -> Iterator[Tensor]:
        yield from ()

    def run(self, microbatches: Sequence[Microbatch]) -> list[MicrobatchResult]:
        stages = self._stages()
        with adapters_off(stages):
            return run_forward(stages, microbatches)

    def run_with_actor(
        self, actor: Sequence[PackedModel], microbatches: Sequence[Microbatch]
    ) -> list[MicrobatchResult]:
        found = run_forward(actor, microbatches)
        return _with_logprobs(found, self.run([_unfiltered(batch) for batch in microbatches]))

    def add_to(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        stages = self._stages()
        with adapters_off(stages):
            return with_reference(stages, microbatches)


class ReferenceModel:
    """A model in the dtype of the actor. Its own weights are read from its source on first use, and never from a
    state of this run, so that a resumed run keeps its reference."""

    def __init__(
        self,
        build: Callable[[ActorWeights | None], Sequence[PackedModel]],
        read_source: Callable[[Sequence[PackedModel], Callable[[Tensor], bool]], None],
        actor: ActorWeights | None = None,
    ) -> None:
        """`build` creates a model without weights, except those that it adopts from the actor. `read_source` loads
        those weights of the source for which its second argument returns True. `actor`: None if nothing is shared."""
        self._build = build
        self._read_source = read_source
        self._actor = actor
        self._stages: list[PackedModel] = []
        self._weights: list[Tensor] = []

    @property
    def parts(self) -> tuple[str, ...]:
        return ("reference",) if self._actor is None else ("weights", "reference")

    def stages(self) -> Sequence[PackedModel]:
        """Return this rank's pipeline stages. Weights that they share must be on the device. Raises
        EnvironmentProblemError or RecipeError if the source is missing, broken or not supported."""
        if not self._stages:
            shared = set() if self._actor is None else self._actor.addresses()
            stages = [stage.requires_grad_(requires_grad=False) for stage in self._build(self._actor)]
            self._read_source(stages, lambda tensor: _address(tensor) not in shared)
            weights = (weight for stage in stages for weight in stage.parameters())
            self._weights = [weight for weight in weights if _address(weight) not in shared]
            self._stages = stages
        return self._stages

    def weights(self) -> Iterator[Tensor]:
        """Yield the reference's own weights that are in memory. Yields nothing before the first use."""
        yield from self._weights

    def run(self, microbatches: Sequence[Microbatch]) -> list[MicrobatchResult]:
        return run_forward(self.stages(), microbatches)

    def add_to(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        return with_reference(self.stages(), microbatches)

    def run_with_actor(
        self, actor: Sequence[PackedModel], microbatches: Sequence[Microbatch]
    ) -> list[MicrobatchResult]:
        """Return the outputs of the actor, and the log-probs of the reference, for each microbatch. Before the last
        pipeline stage the list is empty.

        A trunk is computed once: the reference starts from the hidden states after it. They are in memory for all
        microbatches together.
        """
        stages: Sequence[PackedModel | _Top] = self.stages()
        if trunk := self._trunk:
            tops = stages = [_Top(stage, trunk) for stage in self.stages()]
            with _after_trunk(tops, actor) as hidden:
                found = run_forward(actor, microbatches)
            microbatches = _entering_tops(microbatches, hidden)
        else:
            found = run_forward(actor, microbatches)
        return _with_logprobs(found, run_forward(stages, [_unfiltered(batch) for batch in microbatches]))

    @property
    def _trunk(self) -> int:
        """Number of layers that one pass computes for actor and reference; 0: none."""
        return 0 if self._actor is None else trunk_layers(self._actor.stages()[0].settings.model)


class _Top(torch.nn.Module):
    """The layers of a pipeline stage after the trunk, as a stage for Megatron-Core's schedule without gradients. They
    are computed from the hidden states that another model with the same trunk has computed."""

    def __init__(self, stage: PackedModel, trunk: int) -> None:
        """`trunk`: number of layers of the whole model that are below the top."""
        super().__init__()
        self.module = stage
        self.trunk = trunk

    @property
    def start(self) -> int:
        """First layer of the top, counted within the stage; negative: an earlier stage has it."""
        return self.trunk - self.module.first_layer

    @property
    def begins_here(self) -> bool:
        """Whether the top begins in this stage: with a layer or, if the trunk has all layers, with the final norm."""
        count = len(self.module.decoder.layers)
        return 0 <= self.start < count or (self.start == count and self.module.post_process)

    def forward(self, packed: PackedInput) -> PositionOutputs | Tensor:
        """Return the outputs of the stage as `PackedModel` does. A stage that has only layers of the trunk computes
        nothing: the next stage ignores its output, whose shape the schedule sends."""
        stage = self.module
        if not self.begins_here and self.start >= 0:
            ranks = stage.pg_collection.tp.size() if stage.config.sequence_parallel else 1
            size = (len(packed.tokens) // ranks, 1, stage.config.hidden_size)
            return torch.zeros(size, dtype=stage.settings.dtype, device=packed.tokens.device)
        if not self.begins_here:
            return stage.forward(packed)
        assert packed.entering is not None, "the hidden states after the trunk must be given"
        return stage.outputs_from(self.start, packed.entering, packed)


@contextmanager
def _after_trunk(tops: Sequence[_Top], stages: Sequence[PackedModel]) -> Iterator[list[Tensor]]:
    """Context with a list to which each forward pass of `stages` appends the hidden states that enter these tops. The
    list remains empty if the tops begin on another rank."""
    for top, stage in zip(tops, stages, strict=True):
        if top.begins_here:
            with captured_input(stage, top.start) as captured:
                yield captured
            return
    yield []


def _entering_tops(microbatches: Sequence[Microbatch], hidden: Sequence[Tensor]) -> list[Microbatch]:
    """Return the microbatches, each with the hidden states after the trunk if this rank has them."""
    if not hidden:
        return list(microbatches)
    return [
        replace(batch, input=batch.input.replaced(entering=states))
        for batch, states in zip(microbatches, hidden, strict=True)
    ]


def _with_logprobs(found: list[MicrobatchResult], frozen: list[MicrobatchResult]) -> list[MicrobatchResult]:
    """Return the results of the actor with the log-probs of the reference."""
    return [
        replace(one, outputs=replace(one.outputs, reference=other.outputs.primary))
        for one, other in zip(found, frozen, strict=True)
    ]


def _unfiltered(batch: Microbatch) -> Microbatch:
    """Return the microbatch for the reference: with the same temperature, but without filters, excluded ids and
    given experts."""
    request = OutputRequest(temperature=batch.input.request.temperature)
    unfiltered = batch.input.without_experts().replaced(request=request, excluded=None, reference=None)
    return replace(batch, input=unfiltered)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
