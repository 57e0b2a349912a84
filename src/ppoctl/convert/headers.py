"""Headers of the safetensors files of a model folder: names, shapes, kinds of numbers, and where each tensor lies.

Headers only, a few kilobytes of each file. Imports no torch: `hugging_face` reads the numbers.
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
    """Name of the dtype as the header spells it: `BF16`."""
    file: Path
    start: int
    """Byte of the file at which the tensor begins."""
    end: int


def headers(folder: Path) -> dict[str, Header]:
    """Every tensor of `model.safetensors`, or of the files that its index names.

    Raises EnvironmentProblemError naming the file that is missing, cut short or damaged, or the tensor of which index
    and files tell different things.
    """
    found: dict[str, Header] = {}
    for file in weight_files(folder, SAFETENSORS):
        for name, header in read_header(file).items():
            if name in found:
                raise EnvironmentProblemError(f"tensor `{name}` is in `{found[name].file}` and in `{file}`")
            found[name] = header
    promised = _promised(folder, SAFETENSORS) or found
    for name in sorted(promised.keys() ^ found.keys()):
        where = "in a file and not in the index" if name in found else "in the index and in no file"
        raise EnvironmentProblemError(f"tensor `{name}` of `{folder}` is {where}", hint="fetch the model again")
    return found


def weight_files(folder: Path, name: str) -> Iterator[Path]:
    """The weight file of this name, or those that its index names. Raises EnvironmentProblemError where one is
    missing."""
    for each in sorted(set(_promised(folder, name).values())) or [name]:
        file = folder / Path(each).name
        if not file.is_file():
            raise EnvironmentProblemError(
                f"`{file.name}` missing from model folder `{folder}`", hint="fetch the model again"
            )
        yield file


def has_weights(folder: Path, name: str) -> bool:
    """Whether there are weights of this name: the file, or its index."""
    return any((folder / each).is_file() for each in (name, f"{name}.index.json"))


def read_header(file: Path) -> dict[str, Header]:
    """The tensors of one file, whose bytes are all there. Raises EnvironmentProblemError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            table = json.loads(opened.read(min(length, size)))
        table.pop("__metadata__", None)
        found = {name: _header(name, entry, file, 8 + length) for name, entry in table.items()}
        covered = 8 + length
        for header in sorted(found.values(), key=lambda header: (header.start, header.end)):
            covered = header.end if header.start == covered else covered
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise unreadable(file, error) from error
    if covered != size:
        raise unreadable(file, ValueError(f"its tensors cover it up to byte {covered:,} of {size:,}"))
    return found


def _header(name: str, entry: Mapping[str, Any], file: Path, data: int) -> Header:
    """The header of a tensor, from its entry in the table; the file's numbers begin at byte `data`. Raises ValueError
    and the like where the entry says what cannot be."""
    shape, kind, (start, end) = tuple(entry["shape"]), entry["dtype"], entry["data_offsets"]
    whole = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    # What we do not know the size of cannot be trained: whoever looks at the tensor says so.
    if not whole or not isinstance(kind, str) or end - start != math.prod(shape) * _ITEM_BYTES.get(kind, end - start):
        raise ValueError(f"tensor `{name}` of {kind} and shape {list(shape)} lies at bytes {start} to {end}")
    return Header(shape, kind, file, data + start, data + end)


def unreadable(file: Path, error: Exception) -> EnvironmentProblemError:
    """The error for a weight file that is not what it should be."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return EnvironmentProblemError(
        f"`{file}` cannot be read: {first}",
        hint=f"it is cut short or damaged, fetch it again: ls -la {quoted(file.parent)}",
    )


def _promised(folder: Path, name: str) -> Mapping[str, str]:
    """File of each tensor by the index; empty where there is none."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return {}
    try:
        found = json.loads(index.read_text("utf-8"))["weight_map"]
        if not found:
            raise ValueError("it is empty")
        return {str(tensor): str(file) for tensor, file in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise unreadable(index, ValueError(f"it has no table `weight_map` of tensors and files: {error}")) from error
