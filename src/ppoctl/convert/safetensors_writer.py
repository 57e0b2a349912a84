"""Writing of the weights of a Hugging Face folder: sharded safetensors with an index, one tensor in memory at a time.

A safetensors file is the length of its header, the header (JSON: dtype, shape and place of every tensor), and the
bytes. The header comes first, so all tensors are known before the first is written; they may come in any order.
"""

import json
from collections.abc import Mapping
from ctypes import c_ubyte
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from ppoctl.convert.headers import SAFETENSORS
from ppoctl.convert.hugging_face import DTYPES, Spec

SHARD_BYTES = 4 * 2**30
"""Largest number of bytes of tensors in one file."""
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter:
    """Writer of safetensors files for tensors of these specs, in this order, into an existing folder, at most
    `shard_bytes` to a file (a larger tensor has its own). Every method raises OSError."""

    def __init__(self, folder: Path, specs: Mapping[str, Spec], shard_bytes: int) -> None:
        self._specs = specs
        shards = _shards(specs, shard_bytes)
        self._places: dict[str, tuple[Path, int]] = {}
        for number, names in enumerate(shards, start=1):
            stem = SAFETENSORS.removesuffix(".safetensors")
            whole = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            file = folder / (SAFETENSORS if len(shards) == 1 else whole)
            self._begin(file, names)
        if len(shards) > 1:
            total = sum(spec.nbytes for spec in specs.values())
            index = {
                "metadata": {"total_size": total},
                "weight_map": {name: file.name for name, (file, _) in self._places.items()},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / f"{SAFETENSORS}.index.json").write_text(text, "utf-8")
        self._missing = set(specs)
        self._open: tuple[Path, BinaryIO] | None = None

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor into its place."""
        spec, (path, start) = self._specs[name], self._places[name]
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), f"`{name}` is not what was announced"
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = path, path.open("r+b")
        file = self._open[1]
        file.seek(start)
        here = tensor.detach().cpu().contiguous()
        # Not by `numpy()`, after which torch would refuse to free the storage when its role leaves the memory.
        file.write((c_ubyte * here.nbytes).from_address(here.data_ptr()))
        self._missing.discard(name)

    def finish(self) -> None:
        """Close the files; every tensor must have been written."""
        assert not self._missing, f"never written: {sorted(self._missing)}"
        self.close()

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()

    def _begin(self, file: Path, names: list[str]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            spec = self._specs[name]
            begin, end = end, end + spec.nbytes
            header[name] = {"dtype": _SPELLED[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
            self._places[name] = file, begin
        text = json.dumps(header, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % 8)
        data = 8 + len(text)
        with file.open("wb") as made:
            made.write(len(text).to_bytes(8, "little") + text)
            made.truncate(data + end)
        self._places |= {name: (file, data + self._places[name][1]) for name in names}


def _shards(specs: Mapping[str, Spec], shard_bytes: int) -> list[list[str]]:
    """Names of the tensors, file by file."""
    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= spec.nbytes
    return shards
