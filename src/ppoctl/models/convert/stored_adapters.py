"""Adapters in a saved state (torch_dist), under the names of peft. Megatron's names are the keys of the folder."""

import torch
from torch import Tensor

from ppoctl.core.errors import StorageError, quoted
from ppoctl.models.convert.adapters import adapters, merged
from ppoctl.models.convert.hugging_face import Spec
from ppoctl.models.convert.torch_dist import TorchDist
from ppoctl.models.lora import is_adapter
from ppoctl.models.shape import ModelShape
from ppoctl.models.trainable import Trainable

_OPTIMIZER = ("optimizer.", "chained_")


class StoredAdapters:
    """Matrices of the adapters that `trainable` has, a `hugging_face.Weights`.

    Raises StorageError that names the first matrix that is missing, not of these adapters, or of another shape.
    """

    def __init__(self, state: TorchDist, shape: ModelShape, trainable: Trainable) -> None:
        assert trainable.lora is not None
        self._state, self._scale = state, trainable.lora.scale
        self._by_weight = {adapter.base.name: adapter for adapter in adapters(shape, trainable)}
        matrices = [matrix for adapter in self._by_weight.values() for matrix in (adapter.a, adapter.b)]
        self._key = {matrix.name: matrix.parameter for matrix in matrices}
        self.keys = set(self._key.values())
        """Keys of the matrices in the folder."""
        for matrix in matrices:
            stored = state.tensors.get(matrix.parameter)
            if stored is None:
                raise self._other(matrix.parameter, "missing")
            if tuple(stored.size) != matrix.shape:
                raise self._other(matrix.parameter, f"of shape {list(stored.size)}, not {list(matrix.shape)}")
        for key in sorted(state.tensors.keys() - self.keys):
            if is_adapter(key) and not key.startswith(_OPTIMIZER):
                raise self._other(key, "not of an adapter that it names")
        self.specs = {matrix.name: Spec(matrix.shape, self.dtype) for matrix in matrices}

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the role that trained the adapters."""
        dtype: torch.dtype = self._state.tensors[next(iter(self._key.values()))].properties.dtype
        return dtype

    def tensor(self, name: str) -> Tensor:
        """Return the matrix of this name."""
        return self._state.read(self._key[name])

    def merged_into(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight of this Hugging Face name with its adapter merged into it; a weight without an adapter
        unchanged."""
        adapter = self._by_weight.get(name)
        if adapter is None:
            return weight
        return merged(weight, self.tensor(adapter.a.name), self.tensor(adapter.b.name), self._scale)

    def _other(self, key: str, what: str) -> StorageError:
        folder = self._state.folder
        return StorageError(
            f"`{folder}` does not have the adapters that its frozen.json describes: `{key}` is {what}",
            hint=f"copy the checkpoint again: ls -la {quoted(folder)}",
        )
