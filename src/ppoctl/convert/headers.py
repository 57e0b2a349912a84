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
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits of one number, by a header's names for dtypes."""
TRAINABLE = frozenset({"F64", "F32", "F16", "BF16"})
_LARGEST_HEADER = 100_000_000
"""Largest header that the format allows, in bytes."""


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
    for name in sorted(_promised(folder, SAFETENSORS).keys() ^ found.keys()):
        if not (folder / f"{SAFETENSORS}.index.json").is_file():
            break
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
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise _WrongError(f"its header has {length:,} bytes, the file {size:,}")
            table = json.loads(opened.read(length))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(file, error) from error
    if not isinstance(table, dict):
        raise unreadable(file, _WrongError("its header is no table of tensors"))
    table.pop("__metadata__", None)
    try:
        found = {name: _header(file, name, entry, 8 + length) for name, entry in table.items()}
        _require_all_bytes(found, 8 + length, size)
    except _WrongError as error:
        raise unreadable(file, error) from error
    return found


def unreadable(file: Path, error: Exception) -> EnvironmentProblemError:
    """The error for a weight file that is not what it should be."""
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return EnvironmentProblemError(
        f"`{file}` cannot be read: {first}",
        hint=f"it is cut short or damaged, fetch it again: ls -la {quoted(file.parent)}",
    )


class _WrongError(ValueError):
    """A header says something that cannot be."""


def _promised(folder: Path, name: str) -> Mapping[str, str]:
    """File of each tensor by the index; empty where there is none."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return {}
    try:
        found = json.loads(index.read_text("utf-8"))["weight_map"]
        if not all(isinstance(text, str) for text in (*found, *found.values())):
            raise _WrongError("`weight_map` does not name files")
        return dict(found)
    except KeyError as error:
        raise unreadable(index, _WrongError("it has no `weight_map`")) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise unreadable(index, error) from error


def _header(file: Path, name: str, entry: Any, data: int) -> Header:
    try:
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        is_right = all(isinstance(number, int) and number >= 0 for number in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise _WrongError(f"what its header says of `{name}` is no tensor")
    if kind in BITS and math.prod(shape) * BITS[kind] != (end - start) * 8:
        raise _WrongError(f"`{name}` of shape {list(shape)} in {kind} does not have {end - start:,} bytes")
    return Header(shape, str(kind), file, data + start, data + end)


def _require_all_bytes(found: Mapping[str, Header], data: int, size: int) -> None:
    """Raise unless tensors lie side by side and the last ends where the file does."""
    at = data
    for name, header in sorted(found.items(), key=lambda pair: (pair[1].start, pair[1].end)):
        if header.start != at:
            raise _WrongError(f"`{name}` begins at byte {header.start:,}, and what is before it ends at {at:,}")
        at = header.end
    if at != size:
        raise _WrongError(f"its tensors end at byte {at:,}, the file at {size:,}")
