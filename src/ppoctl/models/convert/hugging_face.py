"""Reader of the weights of a Hugging Face folder, tensor by tensor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppoctl.core.errors import EnvironmentProblemError, quoted
from ppoctl.models.convert.headers import (
    PICKLE,
    SAFETENSORS,
    Header,
    has_weights,
    headers,
    in_two_files,
    require_indexed,
    unreadable,
    weight_files,
)
from ppoctl.models.convert.safe_pickle import load_plain

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Torch dtypes by their names in a safetensors header."""
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """Name of the dtype in a safetensors header."""
        return _SPELLED.get(self.dtype, str(self.dtype))

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@runtime_checkable
class Weights(Protocol):
    """Tensors of a model under Hugging Face names, from any storage. Each tensor is read when it is requested."""

    @property
    def specs(self) -> dict[str, Spec]:
        """Shape and dtype of all tensors, by name."""
        ...

    def tensor(self, name: str) -> Tensor: ...


class SafetensorsFolder:
    """Weights in `model.safetensors`, or in the files that the index of the folder names. A file is open only during
    a read, so that pages of converted tensors do not count as used memory. Raises the errors of `headers`."""

    def __init__(self, folder: Path) -> None:
        by_name = headers(folder)
        self._file = {name: header.file for name, header in by_name.items()}
        self.specs = {name: _spec(name, header) for name, header in by_name.items()}

    def tensor(self, name: str) -> Tensor:
        try:
            with safe_open(self._file[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise unreadable(self._file[name], error) from error


class PickledFolder:
    """Weights in `pytorch_model.bin`, or in the files that the index of the folder names. The files are pickles,
    which are loaded with `weights_only`, so that no code runs. Raises the errors of `SafetensorsFolder`."""

    def __init__(self, folder: Path) -> None:
        self._file: dict[str, Path] = {}
        self._open: tuple[Path, dict[str, Tensor]] | None = None
        self.specs: dict[str, Spec] = {}
        for file in weight_files(folder, PICKLE):
            for name, tensor in self._tensors(file).items():
                if name in self._file:
                    raise in_two_files(name, self._file[name], file)
                self._file[name], self.specs[name] = file, Spec(tuple(tensor.shape), tensor.dtype)
        require_indexed(folder, PICKLE, self.specs)

    def tensor(self, name: str) -> Tensor:
        return self._tensors(self._file[name])[name]

    def _tensors(self, file: Path) -> dict[str, Tensor]:
        if self._open is None or self._open[0] != file:
            self._open = None
            try:
                tensors = load_plain(file, mmap=True)
            except Exception as error:  # a damaged pickle fails in many ways
                raise unreadable(file, error) from error
            self._open = file, tensors
        return self._open[1]


def open_weights(folder: Path, *, allow_pickle: bool) -> Weights:
    """Open the weights of a model folder: safetensors; or, with `allow_pickle` and without safetensors, `.bin` files.

    Raises EnvironmentProblemError.
    """
    if has_weights(folder, SAFETENSORS):
        return SafetensorsFolder(folder)
    has_pickle = has_weights(folder, PICKLE)
    if has_pickle and allow_pickle:
        return PickledFolder(folder)
    if has_pickle:
        raise EnvironmentProblemError(
            f"the weights in `{folder}` are pickles (`{PICKLE}`), which are read only with --allow-pickle",
            hint="add --allow-pickle: they are loaded with `weights_only`, so no code in them runs",
        )
    raise EnvironmentProblemError(
        f"neither `{SAFETENSORS}` nor its index is in model folder `{folder}`", hint=f"ls {quoted(folder)}"
    )


def _spec(name: str, header: Header) -> Spec:
    if header.kind not in DTYPES:
        raise unreadable(header.file, ValueError(f"`{name}` has the unknown dtype {header.kind}"))
    return Spec(header.shape, DTYPES[header.kind])
