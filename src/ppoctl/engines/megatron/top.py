"""The top of a model: the layers after the frozen trunk. It is computed from the hidden states that another model
with the same trunk has computed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ppoctl.engines.megatron.layer_input import captured_input
from ppoctl.engines.megatron.logprobs import PositionOutputs
from ppoctl.engines.megatron.microbatches import Microbatch
from ppoctl.engines.megatron.model import PackedModel
from ppoctl.engines.megatron.packed_input import PackedInput


class Top(torch.nn.Module):
    """The layers of a pipeline stage after the trunk, as a stage for Megatron-Core's schedule without gradients."""

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
            return stage.inv_freq.new_zeros(
                len(packed.tokens) // ranks, 1, stage.config.hidden_size, dtype=stage.settings.dtype
            )
        if not self.begins_here:
            return stage.forward(packed)
        assert packed.entering is not None, "the hidden states after the trunk must be given"
        return stage.outputs_from(self.start, packed.entering, packed)


@contextmanager
def after_trunk(tops: Sequence[Top], stages: Sequence[PackedModel]) -> Iterator[list[Tensor]]:
    """Context with a list to which each forward pass of `stages` appends the hidden states that enter these tops. The
    list remains empty if the tops begin on another rank."""
    for top, stage in zip(tops, stages, strict=True):
        if top.begins_here:
            with captured_input(stage, top.start) as captured:
                yield captured
            return
    yield []


def entering_tops(microbatches: Sequence[Microbatch], hidden: Sequence[Tensor]) -> list[Microbatch]:
    """Return the microbatches, each with the hidden states after the trunk if this rank has them."""
    if not hidden:
        return list(microbatches)
    return [
        replace(batch, input=batch.input.replaced(entering=states))
        for batch, states in zip(microbatches, hidden, strict=True)
    ]
