"""Conversion between Hugging Face tensors and Megatron-Core parameters, tensor by tensor. In both directions, no
tensor may be missing or left over.

A `ParameterShard` is one Hugging Face tensor, or this tensor rank's slice of the tensor, as a view of the Megatron
parameter that contains it. Loading copies into the view, and exporting reads the view. The tables in `convert` define
which part of which parameter each tensor is. Experts have the names of the checkpoint, with a tensor per expert,
although transformers 5 fuses experts in memory.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from ppoctl.engines.megatron.low_rank import ProjectionAdapter, adapters_in, names_of_adapters, random_a
from ppoctl.engines.megatron.megatron_model import PackedModel
from ppoctl.engines.weights.bucket import TensorSpec
from ppoctl.engines.weights.sending import Part
from ppoctl.models.convert.accounted_tensors import Accounted
from ppoctl.models.convert.adapters import constant_names, merged
from ppoctl.models.convert.fused_views import part_of
from ppoctl.models.convert.hugging_face import open_weights
from ppoctl.models.convert.peft_folder import PeftFolder
from ppoctl.models.convert.tensors import (
    EMBEDDING,
    VALUE_HEAD,
    Placement,
    placements,
    tied_copy,
)
from ppoctl.models.convert.transformer_engine import transformer_engine_name
from ppoctl.models.head import VALUE_HEAD_PREFIX
from ppoctl.models.lora import is_adapter
from ppoctl.models.trainable import EMBEDDING_PARAMETER


@dataclass(frozen=True)
class ParameterShard:
    """One Hugging Face tensor, or this tensor rank's slice of it, inside a Megatron parameter."""

    name: str
    """Hugging Face name."""
    view: Tensor
    """View of the tensor's elements in the parameter, in order. The view may be non-contiguous."""
    shape: tuple[int, ...]
    """Shape of the full tensor in the Hugging Face format."""
    split: int | None = None
    """Dimension that tensor ranks split evenly. The last ranks may have padding along this dimension. None: the
    tensor is not split."""
    holder: int | None = None
    """Expert rank that holds an expert's tensor, which expert tensor ranks split. On other ranks the view is empty.
    None: the tensor does not belong to an expert."""
    adapter: tuple[ProjectionAdapter, float] | None = None
    """Matrices whose product, times the factor, `read` adds to the weight. None: `read` returns the weight alone."""

    def is_here(self, groups: ProcessGroupCollection) -> bool:
        """Whether this rank has the tensor or a slice of it."""
        return self.holder is None or self.holder == groups.ep.rank()

    def write(self, tensor: Tensor, groups: ProcessGroupCollection) -> None:
        """Copy this rank's slice of `tensor` into the parameter, cast to the parameter's dtype. Padding becomes
        zero."""
        if self.split is None:
            self.view.copy_(tensor.view(self.view.shape))
            return
        held = self._held()
        start = self._slices(groups).rank() * held[self.split]
        count = max(0, min(held[self.split], self.shape[self.split] - start))
        if count == held[self.split]:
            self.view.copy_(tensor.narrow(self.split, start, count).reshape(self.view.shape))
            return
        self.view.zero_()
        if count:
            self.view.narrow(self.split, 0, count).copy_(tensor.narrow(self.split, start, count))

    def read(self, groups: ProcessGroupCollection) -> Tensor:
        """Return the full tensor, gathered from all ranks that split it. The result is a view if this rank has the
        full tensor contiguously."""
        full = self._gathered(groups) if self.is_here(groups) else self.view.new_empty(self.shape)
        if self.holder is not None and groups.ep.size() > 1:
            # Collectives require contiguous tensors, and a view of a fused parameter is not contiguous.
            full = full.contiguous()
            torch.distributed.broadcast(full, group=groups.ep, group_src=self.holder)
        return full

    def _slices(self, groups: ProcessGroupCollection) -> torch.distributed.ProcessGroup:
        return groups.tp if self.holder is None else groups.expt_tp

    def _gathered(self, groups: ProcessGroupCollection) -> Tensor:
        own, group = self.view.reshape(self._held()), self._slices(groups)
        if self.adapter is not None:
            matrices, scale = self.adapter
            own = merged(own, matrices.a.detach(), matrices.b.detach(), scale)
        if self.split is None:
            return own
        if group.size() > 1:
            slices = [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(group.size())]
            torch.distributed.all_gather(slices, own.contiguous(), group=group)
            own = torch.cat(slices, self.split)
        return own.narrow(self.split, 0, self.shape[self.split])

    def _held(self) -> tuple[int, ...]:
        """Return the shape of this rank's slice, including padding."""
        if self.split is None:
            return self.shape
        rest = math.prod(size for dim, size in enumerate(self.shape) if dim != self.split)
        count = self.view.numel() // rest
        return (*self.shape[: self.split], count, *self.shape[self.split + 1 :])


def parts_of(model: PackedModel) -> list[ParameterShard]:
    """Return all parameters and buffers of a pipeline stage as Hugging Face tensors, in the order of the layers."""
    parameters = {name: weight.detach() for name, weight in model.named_parameters()}
    return parts_in(parameters | dict(model.named_buffers()), model)


def parts_in(parameters: Mapping[str, Tensor], model: PackedModel) -> list[ParameterShard]:
    """Return tensors under Megatron's parameter names (weights, gradients) as Hugging Face tensors. Buffers have no
    gradient. A value head on the policy's model and adapters have no Hugging Face name and are left out."""
    parts, known = [], set()
    buffers = {name for name, _ in model.named_buffers()}
    for placement in _placements_of(model):
        name = _name_in(parameters, placement, model)
        if name in buffers and name not in parameters:
            continue
        known.add(name)
        parts.append(_part(placement, parameters[name], model))
    own = (name for name in set(parameters) - known if not name.startswith(VALUE_HEAD_PREFIX))
    left = sorted(name for name in own if not is_adapter(name))
    assert not left, f"parameters without a Hugging Face name: {left}"
    return parts


def _placements_of(model: PackedModel) -> Iterator[Placement]:
    """Yield the Hugging Face tensors that a pipeline stage holds."""
    shape = model.settings.shape
    layers = range(model.first_layer, model.first_layer + len(model.decoder.layers))
    for placement in placements(shape, model.head):
        is_here = model.pre_process if placement.name == EMBEDDING else model.post_process
        if is_here if placement.layer is None else placement.layer in layers:
            yield placement
    if model.post_process and not model.pre_process and model.share_embeddings_and_output_weights:
        yield tied_copy(shape)


def _name_in(parameters: Mapping[str, Tensor], placement: Placement, model: PackedModel) -> str:
    """Return the name of the parameter in the stage. For an expert on another rank, return the name for the first
    local expert."""
    if placement.layer is None:
        return placement.parameter
    slot = None
    if placement.expert is not None:
        holder, slot = _held_at(placement.expert, model)
        slot = slot if holder == model.pg_collection.ep.rank() else 0
    name = placement.numbered(placement.layer - model.first_layer, slot)
    if name in parameters:
        return name
    shape = model.settings.shape
    has_experts, is_latent = shape.has_experts(placement.layer), shape.latent is not None
    return transformer_engine_name(name, has_experts=has_experts, is_latent=is_latent)


def _part(placement: Placement, parameter: Tensor, model: PackedModel) -> ParameterShard:
    view = part_of(parameter, placement.place, model.settings.shape)
    if placement.expert is None:
        return ParameterShard(placement.name, view, placement.shape, placement.split)
    holder, _ = _held_at(placement.expert, model)
    if holder != model.pg_collection.ep.rank():
        view = parameter.new_empty(0)
    return ParameterShard(placement.name, view, placement.shape, placement.split, holder)


def _held_at(expert: int, model: PackedModel) -> tuple[int, int]:
    """Return the expert rank that holds the expert, and the index of the expert on that rank."""
    experts = model.settings.shape.experts
    assert experts is not None
    return divmod(expert, experts.count // model.pg_collection.ep.size())


def names_in_whole_model(model: PackedModel) -> dict[str, str]:
    """Return name of each parameter of a pipeline stage -> its name in the whole model. The copy of a tied embedding
    has the name of the embedding."""
    parameters = dict(model.named_parameters())
    names = {name: name for name in parameters if name.startswith(VALUE_HEAD_PREFIX)}
    for placement in _placements_of(model):
        if placement.expert is not None and _held_at(placement.expert, model)[0] != model.pg_collection.ep.rank():
            continue
        name = _name_in(parameters, placement, model)
        if name in parameters:  # an untrained tensor is a buffer
            names[name] = EMBEDDING_PARAMETER if placement.name == EMBEDDING else placement.parameter
    return names | names_of_adapters(names, list(parameters))


def gathered_weights(stages: Sequence[PackedModel], part: Part = "changing") -> Iterator[tuple[str, Tensor]]:
    """Yield the full Hugging Face tensors of these pipeline stages, one at a time: those of a part of the weights.
    Collective over all tensor and expert ranks."""
    for shard in _shards_in(stages, part):
        yield shard.name, shard.read(stages[0].pg_collection)


def specs_in(stages: Sequence[PackedModel], part: Part) -> Iterator[TensorSpec]:
    """Yield name, dtype and shape of each tensor that `gathered_weights` yields."""
    for shard in _shards_in(stages, part):
        yield TensorSpec(shard.name, shard.view.dtype, shard.shape)


def _shards_in(stages: Sequence[PackedModel], part: Part) -> Iterator[ParameterShard]:
    """Yield the tensors that these pipeline stages send with this part of the weights: merged with adapters."""
    constant, adapters = constant_names(stages[0].settings.model), adapters_in(stages)
    for stage in stages:
        for shard in sent_parts(stage):
            if (shard.name in constant) == (part == "constant"):
                yield replace(shard, adapter=adapters.get(shard.name))


def sent_parts(stage: PackedModel) -> list[ParameterShard]:
    """Return the tensors that a pipeline stage sends: all tensors except the copy of a tied embedding. Adapters are
    not merged."""
    return [part for part in parts_of(stage) if part.name != EMBEDDING or stage.pre_process]


@torch.no_grad()
def load_weights(
    stages: Sequence[PackedModel], folder: Path, is_read: Callable[[Tensor], bool] = lambda _: True
) -> None:
    """Load the weights of this rank's pipeline stages from the safetensors files of `folder`, one tensor at a time.
    Tensors of the stages for which `is_read` returns False keep their values.

    A value head that is not in the folder is set to zero. Raises EnvironmentProblemError if the folder does not
    contain exactly the tensors of the model (`convert.accounted_tensors`).
    """
    source = open_weights(folder, allow_pickle=False)
    weights = Accounted(source, folder, stages[0].settings.shape, stages[0].head)
    for stage in stages:
        for part in parts_of(stage):
            if part.is_here(stage.pg_collection) and is_read(part.view):
                part.write(weights.tensor(part.name), stage.pg_collection)


@torch.no_grad()
def start_adapters(stages: Sequence[PackedModel], seed: Sequence[object], saved: PeftFolder | None) -> None:
    """Set the initial matrices of the adapters of these pipeline stages: the saved ones or, if there are none, A
    random from the seed and B zero. A saved value head replaces that of a critic."""
    for own, _ in adapters_in(stages).values():
        for placement, matrix in ((own.adapter.a, own.a), (own.adapter.b, own.b)):
            shard = ParameterShard(placement.name, matrix.detach(), placement.shape, placement.split)
            if saved is not None:
                shard.write(saved.tensor(placement.name), stages[0].pg_collection)
            elif matrix is own.a:
                shard.write(random_a(placement, *seed), stages[0].pg_collection)
            else:
                matrix.zero_()
    if saved is not None and saved.has_head:
        for part in parts_of(stages[-1]):
            if part.name == VALUE_HEAD:
                part.write(saved.tensor(VALUE_HEAD), stages[0].pg_collection)
