"""Hugging Face tensors <-> Megatron-Core parameters, tensor by tensor. Every tensor is accounted for, both ways.

A `Part` is one Hugging Face tensor seen as a view of the Megatron parameter that holds it, so that loading is a copy
into the view and exporting is reading it. Megatron fuses query, key and value into one weight, grouped by key/value
head (for each group its query heads, then key, then value), and the gated MLP's gate and up into another.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ppoctl.engines.megatron.families import ModelShape
from ppoctl.engines.megatron.model import PackedModel
from ppoctl.errors import EnvironmentProblemError

EMBEDDING, LM_HEAD, VALUE_HEAD = "model.embed_tokens.weight", "lm_head.weight", "score.weight"


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor inside a Megatron parameter."""

    name: str
    """Hugging Face name."""
    view: Tensor
    """Its elements, in order, where they live; not always contiguous."""
    shape: tuple[int, ...]
    """As Hugging Face has it."""

    def read(self) -> Tensor:
        """The tensor; a view where its elements lie together, else a copy."""
        return self.view.reshape(self.shape)

    def write(self, tensor: Tensor) -> None:
        """Copy `tensor` in, cast to the parameter's dtype."""
        self.view.copy_(tensor.view(self.view.shape))


def parts_of(model: PackedModel) -> list[Part]:
    """All parameters of `model` as Hugging Face tensors, in the order of the layers."""
    return parts_in({name: weight.detach() for name, weight in model.named_parameters()}, model.settings.shape)


def parts_in(parameters: Mapping[str, Tensor], shape: ModelShape) -> list[Part]:
    """The same for any tensors under Megatron's parameter names: weights, gradients."""
    parameters = dict(parameters)
    parts = [Part(EMBEDDING, *_whole(parameters.pop("embedding.word_embeddings.weight")))]
    for layer in range(shape.num_layers):
        parts += _layer_parts(parameters, shape, layer)
    parts.append(Part("model.norm.weight", *_whole(parameters.pop("decoder.final_layernorm.weight"))))
    head = parameters.pop("output_layer.weight", None)
    if head is not None:
        # A critic is written as transformers' ...ForSequenceClassification with one label.
        parts.append(Part(LM_HEAD if len(head) == shape.vocab_size else VALUE_HEAD, *_whole(head)))
    assert not parameters, f"parameters without a Hugging Face name: {sorted(parameters)}"
    return parts


def _layer_parts(parameters: dict[str, Tensor], shape: ModelShape, layer: int) -> Iterator[Part]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    yield Part(f"{theirs}input_layernorm.weight", *_whole(parameters.pop(f"{ours}input_layernorm.weight")))
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        fused = parameters.pop(f"{ours}self_attention.linear_qkv.{kind}")
        yield from _qkv_parts(fused, shape, f"{theirs}self_attn.{{}}_proj.{kind}")
    for name, kept_as in (
        ("self_attn.o_proj.weight", "self_attention.linear_proj.weight"),
        ("post_attention_layernorm.weight", "pre_mlp_layernorm.weight"),
    ):
        yield Part(f"{theirs}{name}", *_whole(parameters.pop(f"{ours}{kept_as}")))
    gate, up = parameters.pop(f"{ours}mlp.linear_fc1.weight").chunk(2)
    yield Part(f"{theirs}mlp.gate_proj.weight", *_whole(gate))
    yield Part(f"{theirs}mlp.up_proj.weight", *_whole(up))
    yield Part(f"{theirs}mlp.down_proj.weight", *_whole(parameters.pop(f"{ours}mlp.linear_fc2.weight")))


def _qkv_parts(fused: Tensor, shape: ModelShape, name: str) -> Iterator[Part]:
    queries = shape.num_heads // shape.num_kv_heads
    rest = tuple(fused.shape[1:])
    grouped = fused.view(shape.num_kv_heads, queries + 2, shape.head_dim, *rest)
    for letter, start, heads in (("q", 0, queries), ("k", queries, 1), ("v", queries + 1, 1)):
        rows = shape.num_kv_heads * heads * shape.head_dim
        yield Part(name.format(letter), grouped[:, start : start + heads], (rows, *rest))


def _whole(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    return tensor, tuple(tensor.shape)


@torch.no_grad()
def load_weights(model: PackedModel, folder: Path) -> None:
    """Fill `model` from the safetensors files of `folder`, one tensor at a time.

    A value head that is not in the folder is set to zero; an `lm_head` that the model has no use for (a critic's, or
    a second copy of a tied embedding) is skipped. Raises EnvironmentProblemError naming the first tensor that is
    missing, not expected or of another shape.
    """
    wanted = {part.name: part for part in parts_of(model)}
    if VALUE_HEAD in wanted:
        wanted[VALUE_HEAD].view.zero_()
    missing = set(wanted) - {VALUE_HEAD}
    for file in _safetensors_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                part = wanted.get(name)
                if part is not None:
                    _fill(part, tensors.get_tensor(name), file)
                    missing.discard(name)
                elif not _is_superfluous(name, wanted):
                    raise EnvironmentProblemError(f"tensor `{name}` in `{file}` is not part of the model")
    if missing:
        first, others = min(missing), len(missing) - 1
        more = f" and {others} more" if others else ""
        raise EnvironmentProblemError(f"tensor `{first}`{more} missing from `{folder}`", hint="fetch the model again")


def _fill(part: Part, tensor: Tensor, file: Path) -> None:
    if tuple(tensor.shape) != part.shape:
        problem = f"has shape {list(tensor.shape)}; config.json says {list(part.shape)}"
        raise EnvironmentProblemError(f"tensor `{part.name}` in `{file}` {problem}")
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        problem = f"is {tensor.dtype}; quantised models cannot be trained"
        raise EnvironmentProblemError(f"tensor `{part.name}` in `{file}` {problem}")
    part.write(tensor)


def _is_superfluous(name: str, wanted: dict[str, Part]) -> bool:
    """What some checkpoints carry besides the model: a head that is not used here, and RoPE's constants."""
    return (name == LM_HEAD and LM_HEAD not in wanted) or name.endswith("rotary_emb.inv_freq")


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
