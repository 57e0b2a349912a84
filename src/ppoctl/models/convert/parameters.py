"""Megatron's parameters of a whole model, assembled from Hugging Face tensors and split again, one at a time.

    parameters(shape, head)                      every parameter, with the tensors that it contains
    assembled(parameter, weights) -> Tensor      Hugging Face -> Megatron
    MegatronWeights(torch_dist).tensor(name)     Megatron -> Hugging Face

In torch_dist a parameter has a key. Layers of equal structure are slices of one tensor, and so are experts:

    decoder.layers.3.mlp.linear_fc2.weight                           decoder.layers.mlp.linear_fc2.weight [3]
    decoder.layers.3.mlp.experts.local_experts.5.linear_fc2.weight   decoder.layers.3.mlp.experts.experts... [5]
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.models.convert.fused_views import part_of
from ppoctl.models.convert.hugging_face import Spec, Weights
from ppoctl.models.convert.stored_adapters import StoredAdapters
from ppoctl.models.convert.tensors import EMBEDDING, LM_HEAD, ROUTER_BIAS, Placement, placements
from ppoctl.models.convert.torch_dist import TorchDist
from ppoctl.models.convert.transformer_engine import transformer_engine_name
from ppoctl.models.head import VALUE_HEAD_PREFIX, Head
from ppoctl.models.shape import ModelShape

_EXPERT = re.compile(r"\.local_experts\.\d+\.")
_NOT_WEIGHTS = ("optimizer.", "chained_", VALUE_HEAD_PREFIX)
"""Prefixes of the keys of optimizer tensors, and of a value head on the policy's model, which no Hugging Face class
has."""


@dataclass(frozen=True)
class ParameterKey:
    """The location of a parameter in a torch_dist folder: a tensor, or a slice of a tensor."""

    name: str
    leading: tuple[tuple[int, int], ...] = ()
    """Index and size of each dimension before the parameter's own: layers, experts."""

    @property
    def index(self) -> tuple[int, ...]:
        return tuple(index for index, _ in self.leading)


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter of the whole model, and the Hugging Face tensors that it consists of."""

    name: str
    """Name in the torch layer spec, with layers and experts numbered as in the whole model."""
    shape: tuple[int, ...]
    """Shape of the parameter, including vocabulary padding."""
    rows: int
    """Number of rows of the parameter without vocabulary padding."""
    parts: tuple[Placement, ...]

    def key(self, shape: ModelShape, *, layers_alike: bool, transformer_engine: bool = False) -> ParameterKey:
        """Return the location of the parameter in a torch_dist folder, under the names of either layer spec."""
        layer, expert = self.parts[0].layer, self.parts[0].expert
        name, leading = self.name, []
        if layer is None:
            return ParameterKey(name)
        if transformer_engine and expert is None:
            is_latent = shape.latent is not None
            name = transformer_engine_name(name, has_experts=shape.has_experts(layer), is_latent=is_latent)
        if layers_alike:
            name = name.replace(f"layers.{layer}.", "layers.", 1)
            leading.append((layer, shape.num_layers))
        if expert is not None:
            assert shape.experts is not None
            name = _EXPERT.sub(".experts.", name, count=1)
            leading.append((expert, shape.experts.count))
        return ParameterKey(name, tuple(leading))


def parameters(shape: ModelShape, head: Head) -> list[Parameter]:
    """Return all Megatron parameters of the model, in layer order."""
    by_name: dict[str, list[Placement]] = {}
    for placement in placements(shape, head):
        by_name.setdefault(placement.parameter, []).append(placement)
    return [_parameter(name, tuple(parts), shape) for name, parts in by_name.items()]


def layers_alike(shape: ModelShape) -> bool:
    """Whether Megatron-Core stores the layers as slices of one tensor. It does not if some layers may have
    experts."""
    return shape.experts is None


def assembled(parameter: Parameter, weights: Weights, shape: ModelShape) -> Tensor:
    """Return the tensor of the parameter, assembled from its Hugging Face tensors; padding is zero."""
    whole = torch.zeros(parameter.shape, dtype=weights.specs[parameter.parts[0].name].dtype)
    for placement, view in _views(whole, parameter, shape):
        view.copy_(weights.tensor(placement.name).view(view.shape))
    return whole


class MegatronWeights:
    """The weights in a torch_dist folder, under Hugging Face names. Adapters in the folder are merged into the
    weights.

    Raises EnvironmentProblemError that names the first tensor that is missing, not part of the model, or of another
    shape.
    """

    def __init__(
        self,
        state: TorchDist,
        shape: ModelShape,
        head: Head,
        base: Weights | None = None,
        adapters: StoredAdapters | None = None,
    ) -> None:
        """`base`: weights for parameters that are not in the folder. They are cast to the dtype of the folder. None:
        the folder must be complete. `adapters`: those that are merged into weights of the base."""
        self.state, self._shape, self._base, self.adapters = state, shape, base, adapters
        self.parameters = parameters(shape, head)
        in_layers = [parameter for parameter in self.parameters if parameter.parts[0].layer is not None]
        self.layers_alike = any(
            parameter.key(shape, layers_alike=True, transformer_engine=fused).name in state.tensors
            for parameter in in_layers
            for fused in (False, True)
        )
        """Whether the layers are slices of one tensor."""
        found = {parameter.name: self._find(parameter) for parameter in self.parameters}
        self.keys = {name: key for name, key in found.items() if key is not None}
        """Location of each parameter in the folder, by its name."""
        self.completed = [part.name for each in self.parameters if found[each.name] is None for part in each.parts]
        """Hugging Face names of the tensors that are read from the base."""
        self._by_tensor = {part.name: parameter for parameter in self.parameters for part in parameter.parts}
        self._require_nothing_else()
        self.specs = {
            part.name: Spec(part.shape, self._dtype(parameter))
            for parameter in self.parameters
            for part in parameter.parts
        }
        self._last: tuple[str, Tensor] | None = None

    def parameter(self, parameter: Parameter) -> Tensor:
        """Return the parameter as stored by Megatron, including padding. The last parameter with several parts stays
        in memory."""
        if self._last is not None and self._last[0] == parameter.name:
            return self._last[1]
        self._last = None  # released before the next read, so that only one parameter is in memory
        key = self.keys.get(parameter.name)
        tensor = assembled(parameter, self, self._shape) if key is None else self.state.read(key.name, key.index)
        if len(parameter.parts) > 1:
            self._last = parameter.name, tensor
        return tensor

    def tensor(self, name: str) -> Tensor:
        parameter = self._by_tensor[name]
        if parameter.name not in self.keys:
            frozen = self.frozen_tensor(name)
            return frozen if self.adapters is None else self.adapters.merged_into(name, frozen)
        views = _views(self.parameter(parameter), parameter, self._shape)
        [(placement, view)] = [entry for entry in views if entry[0].name == name]
        return view.reshape(placement.shape)

    def frozen_tensor(self, name: str) -> Tensor:
        """Return one of the `completed` tensors without its adapter."""
        assert self._base is not None
        return self._base.tensor(name).to(self.specs[name].dtype)

    def _dtype(self, parameter: Parameter) -> torch.dtype:
        key = self.keys.get(parameter.name)
        if key is None and parameter.name.endswith(ROUTER_BIAS):
            return torch.float32
        keys = [each for name, each in self.keys.items() if not name.endswith(ROUTER_BIAS)]
        if key is None and not keys:  # only adapters train
            assert self.adapters is not None
            return self.adapters.dtype
        return self.state.tensors[(key or keys[0]).name].properties.dtype

    def _find(self, parameter: Parameter) -> ParameterKey | None:
        """Return the location of the parameter in the folder; None: it is read from the base."""
        candidates = [
            parameter.key(self._shape, layers_alike=self.layers_alike, transformer_engine=fused)
            for fused in (False, True)
        ]
        for key in candidates:
            stored = self.state.tensors.get(key.name)
            if stored is None:
                continue
            expected = (*(size for _, size in key.leading), *parameter.shape)
            if stored.size != expected:
                mismatch = f"has shape {list(stored.size)}; config.json implies {list(expected)}"
                raise EnvironmentProblemError(f"tensor `{key.name}` in `{self.state.folder}` {mismatch}")
            return key
        if self._base is not None:
            return None
        raise EnvironmentProblemError(
            f"tensor `{candidates[0].name}` is missing from `{self.state.folder}`",
            hint="does the configuration belong to this checkpoint? name another with --like",
        )

    def _require_nothing_else(self) -> None:
        known = {key.name for key in self.keys.values()}
        known |= set() if self.adapters is None else self.adapters.keys
        for name in sorted(self.state.tensors.keys() - known):
            if not name.startswith(_NOT_WEIGHTS):
                raise EnvironmentProblemError(
                    f"tensor `{name}` in `{self.state.folder}` is not part of the model",
                    hint="does the configuration belong to this checkpoint? name another with --like",
                )


def _parameter(name: str, parts: tuple[Placement, ...], shape: ModelShape) -> Parameter:
    rows = sum(part.shape[0] for part in parts)
    padded = shape.padded_vocab_size if parts[0].name in (EMBEDDING, LM_HEAD) else rows
    return Parameter(name, (padded, *parts[0].shape[1:]), rows, parts)


def _views(whole: Tensor, parameter: Parameter, shape: ModelShape) -> Iterator[tuple[Placement, Tensor]]:
    for placement in parameter.parts:
        yield placement, part_of(whole[: parameter.rows], placement.place, shape)
