"""Reading the weights of a Hugging Face folder, tensor by tensor."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppoctl.convert.plain import load_plain
from ppoctl.errors import EnvironmentProblemError, quoted

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
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
"""As a safetensors header spells them."""


@dataclass(frozen=True)
class Spec:
    """What a tensor is before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@runtime_checkable
class Weights(Protocol):
    """A model's tensors under Hugging Face names, wherever they are; each is read when it is asked for."""

    @property
    def specs(self) -> dict[str, Spec]:
        """All of them, by name."""
        ...

    def tensor(self, name: str) -> Tensor: ...


class SafetensorsFolder:
    """`model.safetensors`, or the files that its index names. A file is open only while it is read, so that the
    pages of what has been converted do not count as memory in use.

    Raises EnvironmentProblemError naming the file that is missing or cut short, or the tensor of which index and
    files tell different things.
    """

    def __init__(self, folder: Path) -> None:
        self._place: dict[str, Path] = {}
        self.specs: dict[str, Spec] = {}
        for file in _files(folder, SAFETENSORS):
            for name, spec in _header(file).items():
                if name in self._place:
                    raise EnvironmentProblemError(f"tensor `{name}` is in `{self._place[name]}` and in `{file}`")
                self._place[name], self.specs[name] = file, spec
        index = folder / f"{SAFETENSORS}.index.json"
        if index.is_file():
            promised: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
            for name in sorted(promised.keys() ^ self._place.keys()):
                where = "in the index and in no file" if name in promised else "in a file and not in the index"
                raise EnvironmentProblemError(
                    f"tensor `{name}` of `{folder}` is {where}", hint="fetch the model again"
                )

    def tensor(self, name: str) -> Tensor:
        try:
            with safe_open(self._place[name], framework="pt") as file:
                found: Tensor = file.get_tensor(name)
                return found
        except (SafetensorError, OSError) as error:
            raise unreadable(self._place[name], error) from error


class PickledFolder:
    """`pytorch_model.bin`, or the files that its index names: pickles, loaded as weights only (no code runs)."""

    def __init__(self, folder: Path) -> None:
        self._place: dict[str, Path] = {}
        self._open: tuple[Path, dict[str, Tensor]] | None = None
        self.specs: dict[str, Spec] = {}
        for file in _files(folder, PICKLE):
            for name, tensor in self._tensors(file).items():
                self._place[name], self.specs[name] = file, Spec(tuple(tensor.shape), tensor.dtype)

    def tensor(self, name: str) -> Tensor:
        return self._tensors(self._place[name])[name]

    def _tensors(self, file: Path) -> dict[str, Tensor]:
        if self._open is None or self._open[0] != file:
            self._open = None
            try:
                found = load_plain(file, mmap=True)
            except Exception as error:  # a damaged pickle fails in many ways
                raise unreadable(file, error) from error
            self._open = file, found
        return self._open[1]


def open_weights(folder: Path, *, allow_pickle: bool) -> Weights:
    """The weights of a model folder: safetensors; with `allow_pickle`, and only where there are none, `.bin` files.

    Raises EnvironmentProblemError.
    """
    if any((folder / name).is_file() for name in (SAFETENSORS, f"{SAFETENSORS}.index.json")):
        return SafetensorsFolder(folder)
    has_pickle = any((folder / name).is_file() for name in (PICKLE, f"{PICKLE}.index.json"))
    if has_pickle and allow_pickle:
        return PickledFolder(folder)
    if has_pickle:
        raise EnvironmentProblemError(
            f"the weights in `{folder}` are pickles (`{PICKLE}`), which are not read unless you say so",
            hint="add --allow-pickle: they are loaded as weights only, no code in them runs",
        )
    raise EnvironmentProblemError(f"no `{SAFETENSORS}` in model folder `{folder}`", hint=f"ls {quoted(folder)}")


def unreadable(file: Path, error: Exception) -> EnvironmentProblemError:
    """A weight file that is not what it should be."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return EnvironmentProblemError(
        f"`{file}` cannot be read: {first}",
        hint=f"it is cut short or damaged, fetch it again: ls -la {quoted(file.parent)}",
    )


def _files(folder: Path, name: str) -> Iterator[Path]:
    index = folder / f"{name}.index.json"
    names = [name]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise unreadable(index, error) from error
    for each in names:
        file = folder / Path(each).name
        if not file.is_file():
            raise EnvironmentProblemError(
                f"`{file.name}` missing from model folder `{folder}`", hint="fetch the model again"
            )
        yield file


def _header(file: Path) -> dict[str, Spec]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: _spec(tensors.get_slice(name)) for name in tensors.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise unreadable(file, error) from error


def _spec(tensor: Any) -> Spec:
    return Spec(tuple(tensor.get_shape()), DTYPES[tensor.get_dtype()])
