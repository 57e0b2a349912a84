"""Headers of the safetensors files of a model folder: name, shape, dtype and position of each tensor.

This module reads only a few kilobytes of each file, and imports no torch. `hugging_face` reads the tensors.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.core.errors import EnvironmentProblemError, quoted

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
_ADAPTER = "adapter_model.safetensors"
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

    Raises EnvironmentProblemError that names the file that is missing, truncated or damaged, the tensor for which
    index and files disagree, or two files that both could be the weights.
    """
    by_name: dict[str, Header] = {}
    for file in weight_files(folder, SAFETENSORS):
        for name, header in read_header(file).items():
            if name in by_name:
                raise in_two_files(name, by_name[name].file, file)
            by_name[name] = header
    require_indexed(folder, SAFETENSORS, by_name)
    return by_name


def in_two_files(tensor: str, one: Path, other: Path) -> EnvironmentProblemError:
    """Return the error for a tensor that two files of a folder have."""
    return EnvironmentProblemError(f"tensor `{tensor}` is in `{one}` and in `{other}`", hint="fetch the model again")


def weight_files(folder: Path, name: str) -> list[Path]:
    """Return the weight file of this name, or the files that the index of this name lists: the files that
    transformers reads.

    Raises EnvironmentProblemError if a file is missing, or if other files of the folder could also be the weights.
    """
    single, index = folder / name, folder / f"{name}.index.json"
    indexed = sorted({folder / file for file in _indexed(folder, name).values()})
    others = [file for file in indexed if file != single and file.is_file()]
    if others and single.is_file():
        raise EnvironmentProblemError(
            f"`{folder}` has two sets of weights: `{name}`, which transformers reads, and the files that "
            f"`{index.name}` names, such as `{others[0].name}`",
            hint=f"rm {quoted(index)}  # keeps {name}; to keep the others: rm {quoted(single)}",
        )
    files = [single] if single.is_file() else indexed or [single]
    for file in files:
        if not file.is_file():
            raise EnvironmentProblemError(
                f"`{file.relative_to(folder)}` is missing from model folder `{folder}`", hint="fetch the model again"
            )
    if (folder / _ADAPTER).is_file() and (folder / "adapter_config.json").is_file():
        raise EnvironmentProblemError(
            f"`{folder}` has two sets of weights: `{files[0].name}`, and the adapter `{_ADAPTER}`, for which "
            "transformers reads the base model that adapter_config.json names",
            hint=f"mkdir {quoted(folder / 'adapter')} && mv {quoted(folder)}/adapter_* {quoted(folder / 'adapter')}",
        )
    return files


def require_indexed(folder: Path, name: str, found: Iterable[str]) -> None:
    """Raise EnvironmentProblemError that names a tensor for which the files of `weight_files` and the index disagree.
    An index whose files are all missing does not belong to the single file of this name."""
    indexed = _indexed(folder, name)
    if not indexed or ((folder / name).is_file() and name not in indexed.values()):
        return
    for tensor in sorted(indexed.keys() ^ set(found)):
        location = "in the index but in no file" if tensor in indexed else "in a file but not in the index"
        raise EnvironmentProblemError(f"tensor `{tensor}` of `{folder}` is {location}", hint="fetch the model again")


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
    """Return the file of each tensor according to the index, relative to the folder; empty if there is no index."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return {}
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if not weight_map:
            raise ValueError("it is empty")
        files = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise unreadable(index, ValueError(f"it has no table `weight_map` of tensors and files: {error}")) from error
    for file in files.values():
        if Path(file).name != file:
            raise unreadable(index, ValueError(f"it names `{file}`, but weights must be next to their index"))
    return files
