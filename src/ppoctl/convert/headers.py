"""Headers of the safetensors files of a model folder: name, shape, dtype and position of each tensor.

This module reads only a few kilobytes of each file, and imports no torch. `hugging_face` reads the tensors.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.errors import EnvironmentProblemError, quoted

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
TRAINABLE = frozenset({"F64", "F32", "F16", "BF16"})
_ITEM_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class Header:
    """One tensor in the header of a file."""

    shape: tuple[int, ...]
    kind: str
    """Name of the dtype as in the header: `BF16`."""
    file: Path
    start: int
    """Position in the file at which the tensor begins, in bytes."""
    end: int


def headers(folder: Path) -> dict[str, Header]:
    """Return the headers of all tensors of `model.safetensors`, or of the files that the index of the folder names.

    Raises EnvironmentProblemError that names the file that is missing, truncated or damaged, or the tensor for which
    index and files disagree.
    """
    by_name: dict[str, Header] = {}
    for file in weight_files(folder, SAFETENSORS):
        for name, header in read_header(file).items():
            if name in by_name:
                raise EnvironmentProblemError(f"tensor `{name}` is in `{by_name[name].file}` and in `{file}`")
            by_name[name] = header
    indexed = _indexed(folder, SAFETENSORS) or by_name
    for name in sorted(indexed.keys() ^ by_name.keys()):
        location = "in a file but not in the index" if name in by_name else "in the index but in no file"
        raise EnvironmentProblemError(f"tensor `{name}` of `{folder}` is {location}", hint="fetch the model again")
    return by_name


def weight_files(folder: Path, name: str) -> Iterator[Path]:
    """Yield the weight file of this name, or the files that the index of this name lists. Raises
    EnvironmentProblemError if a file is missing."""
    for file_name in sorted(set(_indexed(folder, name).values())) or [name]:
        file = folder / Path(file_name).name
        if not file.is_file():
            raise EnvironmentProblemError(
                f"`{file.name}` is missing from model folder `{folder}`", hint="fetch the model again"
            )
        yield file


def has_weights(folder: Path, name: str) -> bool:
    """Whether the folder has weights of this name: a file of this name, or an index."""
    return any((folder / file).is_file() for file in (name, f"{name}.index.json"))


def read_header(file: Path) -> dict[str, Header]:
    """Return the headers of the tensors of one file, and check that the tensors cover the file. Raises
    EnvironmentProblemError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            table = json.loads(opened.read(min(length, size)))
        table.pop("__metadata__", None)
        by_name = {name: _header(name, entry, file, 8 + length) for name, entry in table.items()}
        covered = 8 + length
        for header in sorted(by_name.values(), key=lambda header: (header.start, header.end)):
            covered = header.end if header.start == covered else covered
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise unreadable(file, error) from error
    if covered != size:
        raise unreadable(file, ValueError(f"its tensors cover it up to byte {covered:,} of {size:,}"))
    return by_name


def _header(name: str, entry: Mapping[str, Any], file: Path, data: int) -> Header:
    """Return the header of a tensor from its entry in the table; tensor data begins at byte `data` of the file.
    Raises ValueError, TypeError or KeyError if the entry is not valid."""
    shape, kind, (start, end) = tuple(entry["shape"]), entry["dtype"], entry["data_offsets"]
    whole = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    # The size of an unknown dtype is not checked here; the code that uses the tensor rejects the dtype.
    if not whole or not isinstance(kind, str) or end - start != math.prod(shape) * _ITEM_BYTES.get(kind, end - start):
        raise ValueError(f"tensor `{name}` of {kind} and shape {list(shape)} is at bytes {start} to {end}")
    return Header(shape, kind, file, data + start, data + end)


def unreadable(file: Path, error: Exception) -> EnvironmentProblemError:
    """Return the error for a weight file that cannot be read."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return EnvironmentProblemError(
        f"`{file}` cannot be read: {first}",
        hint=f"it is truncated or damaged, fetch it again: ls -la {quoted(file.parent)}",
    )


def _indexed(folder: Path, name: str) -> Mapping[str, str]:
    """Return the file of each tensor according to the index; empty if there is no index."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return {}
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        if not weight_map:
            raise ValueError("it is empty")
        return {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise unreadable(index, ValueError(f"it has no table `weight_map` of tensors and files: {error}")) from error
