"""Hugging Face tensors <-> Megatron-Core parameters, tensor by tensor. Every tensor is accounted for, both ways.

A `Part` is one Hugging Face tensor, or this tensor rank's slice of it, seen as a view of the Megatron parameter that
holds it: loading is a copy into the view, exporting is reading it. Megatron fuses query, key and value into one,
grouped by key/value head (for each group its query heads, then key, then value), and the gated MLP's gate and up.
Experts go by their names on disk, one tensor each, although transformers 5 fuses them in memory.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors import safe_open
from torch import Tensor

from ppoctl.engines.megatron.families import ModelShape
from ppoctl.engines.megatron.model import PackedModel, ValueModel
from ppoctl.errors import EnvironmentProblemError

EMBEDDING, LM_HEAD, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"
ROPE_CONSTANTS = "rotary_emb.inv_freq"
"""End of the names of what some checkpoints carry besides the model."""


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor, or this tensor rank's slice of it, inside a Megatron parameter."""

    name: str
    """Hugging Face name."""
    view: Tensor
    """Its elements, in order, where they live; not always contiguous."""
    shape: tuple[int, ...]
    """Of the whole tensor, as Hugging Face has it."""
    split: int | None = None
    """The dimension that tensor ranks split evenly; along it the last ranks may hold padding. None: whole on each."""
    holder: int | None = None
    """Of an expert's: the expert rank that has it, split over expert tensor ranks; elsewhere the view is empty."""

    def is_here(self, groups: ProcessGroupCollection) -> bool:
        """Whether this rank has (a slice of) it."""
        return self.holder is None or self.holder == groups.ep.rank()

    def write(self, tensor: Tensor, groups: ProcessGroupCollection) -> None:
        """Copy this rank's slice in, cast to the parameter's dtype; padding becomes zero."""
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
        """The whole tensor, from all ranks that share it; a view where its elements lie together in this one."""
        whole = self._whole(groups) if self.is_here(groups) else self.view.new_empty(self.shape)
        if self.holder is not None and groups.ep.size() > 1:
            whole = whole.contiguous()
            torch.distributed.broadcast(whole, group=groups.ep, group_src=self.holder)
        return whole

    def _slices(self, groups: ProcessGroupCollection) -> torch.distributed.ProcessGroup:
        return groups.tp if self.holder is None else groups.expt_tp

    def _whole(self, groups: ProcessGroupCollection) -> Tensor:
        mine, group = self.view.reshape(self._held()), self._slices(groups)
        if self.split is None:
            return mine
        if group.size() > 1:
            slices = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(group.size())]
            torch.distributed.all_gather(slices, mine.contiguous(), group=group)
            mine = torch.cat(slices, self.split)
        return mine.narrow(self.split, 0, self.shape[self.split])

    def _held(self) -> tuple[int, ...]:
        """Shape of this rank's slice, padding included."""
        if self.split is None:
            return self.shape
        rest = math.prod(size for dim, size in enumerate(self.shape) if dim != self.split)
        count = self.view.numel() // rest
        return (*self.shape[: self.split], count, *self.shape[self.split + 1 :])


def parts_of(model: PackedModel) -> list[Part]:
    """All parameters of a pipeline stage as Hugging Face tensors, in the order of the layers."""
    return parts_in({name: weight.detach() for name, weight in model.named_parameters()}, model)


def parts_in(parameters: Mapping[str, Tensor], model: PackedModel) -> list[Part]:
    """The same for any tensors under Megatron's parameter names: weights, gradients."""
    parameters, shape = dict(parameters), model.settings.shape
    table = (shape.vocab_size, shape.hidden_size)
    parts = []
    if model.pre_process:
        parts.append(Part(EMBEDDING, parameters.pop("embedding.word_embeddings.weight"), table, 0))
    for layer in range(len(model.decoder.layers)):
        parts += _layer_parts(parameters, model, layer)
    if model.post_process:
        parts.append(_whole("model.norm.weight", parameters.pop("decoder.final_layernorm.weight")))
        head = parameters.pop("output_layer.weight", None)
        if head is not None and isinstance(model, ValueModel):
            # A critic is written as transformers' ...ForSequenceClassification with one label.
            parts.append(_whole(VALUE_HEAD, head))
        elif head is not None:
            # A tied head lives beside its embedding, or as a copy of it on the last pipeline rank.
            name = EMBEDDING if model.share_embeddings_and_output_weights else LM_HEAD
            parts.append(Part(name, head, table, 0))
    assert not parameters, f"parameters without a Hugging Face name: {sorted(parameters)}"
    return parts


def _layer_parts(parameters: dict[str, Tensor], model: PackedModel, layer: int) -> Iterator[Part]:
    """Of the stage's layer `layer`."""
    shape, number = model.settings.shape, model.first_layer + layer
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{number}."
    hidden, heads = shape.hidden_size, shape.num_heads * shape.head_dim
    yield _whole(f"{theirs}input_layernorm.weight", parameters.pop(f"{ours}input_layernorm.weight"))
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        fused = parameters.pop(f"{ours}self_attention.linear_qkv.{kind}")
        yield from _qkv_parts(fused, shape, f"{theirs}self_attn.{{}}_proj.{kind}")
    for letter in "qk" if shape.qk_norm else "":
        norm = parameters.pop(f"{ours}self_attention.{letter}_layernorm.weight")
        yield _whole(f"{theirs}self_attn.{letter}_norm.weight", norm)
    projection = parameters.pop(f"{ours}self_attention.linear_proj.weight")
    yield Part(f"{theirs}self_attn.o_proj.weight", projection, (hidden, heads), 1)
    yield _whole(f"{theirs}post_attention_layernorm.weight", parameters.pop(f"{ours}pre_mlp_layernorm.weight"))
    if shape.experts is not None and shape.experts.layers[number]:
        yield _whole(f"{theirs}mlp.gate.weight", parameters.pop(f"{ours}mlp.router.weight"))
        yield from _expert_parts(parameters, model, f"{ours}mlp.experts.local_experts.", f"{theirs}mlp.experts.")
        return
    fused, down = (parameters.pop(f"{ours}mlp.linear_{kind}.weight") for kind in ("fc1", "fc2"))
    yield from _mlp_parts(f"{theirs}mlp.", fused, down, (shape.ffn_hidden_size, hidden))


def _expert_parts(parameters: dict[str, Tensor], model: PackedModel, ours: str, theirs: str) -> Iterator[Part]:
    """Of all experts of a layer, in their order, so that all expert ranks go over the same parts."""
    experts, ranks = model.settings.shape.experts, model.pg_collection.ep
    assert experts is not None
    here = experts.count // ranks.size()
    weights = [
        [parameters.pop(f"{ours}{slot}.linear_{kind}.weight") for kind in ("fc1", "fc2")] for slot in range(here)
    ]
    for expert in range(experts.count):
        holder, slot = divmod(expert, here)
        fused, down = weights[slot] if holder == ranks.rank() else (weight.new_empty(0) for weight in weights[0])
        width = (experts.ffn_hidden_size, model.settings.shape.hidden_size)
        for part in _mlp_parts(f"{theirs}{expert}.", fused, down, width):
            yield replace(part, holder=holder)


def _mlp_parts(name: str, fused: Tensor, down: Tensor, shape: tuple[int, int]) -> Iterator[Part]:
    """Of one gated MLP; `shape` is its width and the hidden size."""
    half = len(fused) // 2
    yield Part(f"{name}gate_proj.weight", fused[:half], shape, 0)
    yield Part(f"{name}up_proj.weight", fused[half:], shape, 0)
    yield Part(f"{name}down_proj.weight", down, shape[::-1], 1)


def _qkv_parts(fused: Tensor, shape: ModelShape, name: str) -> Iterator[Part]:
    queries = shape.num_heads // shape.num_kv_heads
    rest = tuple(fused.shape[1:])
    grouped = fused.view(-1, queries + 2, shape.head_dim, *rest)  # a tensor rank has some of the groups
    for letter, start, heads in (("q", 0, queries), ("k", queries, 1), ("v", queries + 1, 1)):
        rows = shape.num_kv_heads * heads * shape.head_dim
        yield Part(name.format(letter), grouped[:, start : start + heads], (rows, *rest), 0)


def _whole(name: str, tensor: Tensor) -> Part:
    return Part(name, tensor, tuple(tensor.shape))


def weight_names(shape: ModelShape) -> Iterator[str]:
    """Hugging Face names of an actor's weights, in the order of the layers."""
    yield EMBEDDING
    kinds = ("weight", "bias") if shape.qkv_bias else ("weight",)
    for layer in range(shape.num_layers):
        names = ["input_layernorm.weight"]
        names += [f"self_attn.{letter}_proj.{kind}" for kind in kinds for letter in "qkv"]
        names += [f"self_attn.{letter}_norm.weight" for letter in "qk" if shape.qk_norm]
        names += ["self_attn.o_proj.weight", "post_attention_layernorm.weight", *_mlp_names(shape, layer)]
        yield from (f"model.layers.{layer}.{name}" for name in names)
    yield "model.norm.weight"
    if not shape.tied_embeddings:
        yield LM_HEAD


def _mlp_names(shape: ModelShape, layer: int) -> list[str]:
    letters = ("gate", "up", "down")
    if shape.experts is None or not shape.experts.layers[layer]:
        return [f"mlp.{letter}_proj.weight" for letter in letters]
    experts = range(shape.experts.count)
    return ["mlp.gate.weight", *(f"mlp.experts.{n}.{letter}_proj.weight" for n in experts for letter in letters)]


def gathered_weights(stages: Sequence[PackedModel]) -> Iterator[tuple[str, Tensor]]:
    """The whole Hugging Face tensors of these pipeline stages, one at a time; all tensor and expert ranks take part.
    A copy of a tied embedding is left out."""
    for stage in stages:
        for part in parts_of(stage):
            if part.name != EMBEDDING or stage.pre_process:
                yield part.name, part.read(stage.pg_collection)


@torch.no_grad()
def load_weights(stages: Sequence[PackedModel], folder: Path) -> None:
    """Fill this rank's pipeline stages from the safetensors files of `folder`, one tensor at a time.

    A value head that is not in the folder is set to zero; an `lm_head` that the model has no use for (a critic's, or
    a second copy of a tied embedding) is skipped. Raises EnvironmentProblemError naming the first tensor that is
    missing, not expected or of another shape.
    """
    wanted: dict[str, list[Part]] = {}
    for stage in stages:
        for part in parts_of(stage):
            if part.is_here(stage.pg_collection):
                wanted.setdefault(part.name, []).append(part)
    for part in wanted.get(VALUE_HEAD, []):
        part.view.zero_()
    missing = set(wanted) - {VALUE_HEAD}
    known, groups = {*weight_names(stages[0].settings.shape), LM_HEAD}, stages[0].pg_collection
    for file in _safetensors_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                for part in wanted.get(name, []):
                    _fill(part, tensors.get_tensor(name), groups, file)
                missing.discard(name)
                if name not in wanted and name not in known and not name.endswith(ROPE_CONSTANTS):
                    raise EnvironmentProblemError(f"tensor `{name}` in `{file}` is not part of the model")
    if missing:
        first, others = min(missing), len(missing) - 1
        more = f" and {others} more" if others else ""
        raise EnvironmentProblemError(f"tensor `{first}`{more} missing from `{folder}`", hint="fetch the model again")


def _fill(part: Part, tensor: Tensor, groups: ProcessGroupCollection, file: Path) -> None:
    if tuple(tensor.shape) != part.shape:
        problem = f"has shape {list(tensor.shape)}; config.json says {list(part.shape)}"
        raise EnvironmentProblemError(f"tensor `{part.name}` in `{file}` {problem}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        problem = f"is {tensor.dtype}; quantised models cannot be trained"
        raise EnvironmentProblemError(f"tensor `{part.name}` in `{file}` {problem}")
    part.write(tensor, groups)


def _safetensors_files(folder: Path) -> Sequence[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise EnvironmentProblemError(
                f"`{file.name}` missing from model folder `{folder}`", hint="save the model in safetensors format"
            )
    return files
