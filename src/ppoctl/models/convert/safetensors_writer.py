"""Writer of the weights of a Hugging Face folder: sharded safetensors with an index, one tensor in memory at a time.

A safetensors file has three parts: the length of the header, the header (JSON: dtype, shape and position of every
tensor), and the tensor data. The header comes first, so the writer needs all specs before the first tensor; tensors
may then be written in any order.
"""

import json
from collections.abc import Mapping
from ctypes import c_ubyte
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from ppoctl.models.convert.headers import SAFETENSORS
from ppoctl.models.convert.hugging_face import DTYPES, Spec

SHARD_BYTES = 4 * 2**30
"""Maximum number of tensor bytes per file."""
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter:
    """Writer of safetensors files for tensors with these specs, in this order, into an existing folder. A file has at
    most `shard_bytes` of tensors; a larger tensor gets its own file. Every method raises OSError."""

    def __init__(self, folder: Path, specs: Mapping[str, Spec], shard_bytes: int) -> None:
        self._specs = specs
        shards = _shards(specs, shard_bytes)
        self._places: dict[str, tuple[Path, int]] = {}
        for number, names in enumerate(shards, start=1):
            stem = SAFETENSORS.removesuffix(".safetensors")
            shard_name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
            file = folder / (SAFETENSORS if len(shards) == 1 else shard_name)
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
        """Write one tensor at its position."""
        spec, (path, start) = self._specs[name], self._places[name]
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), f"`{name}` is not what was announced"
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = path, path.open("r+b")
        file = self._open[1]
        file.seek(start)
        on_host = tensor.detach().cpu().contiguous()
        # After `numpy()`, torch would refuse to free the storage when the role is offloaded.
        file.write((c_ubyte * on_host.nbytes).from_address(on_host.data_ptr()))
        self._missing.discard(name)

    def finish(self) -> None:
        """Close the files. Asserts that every tensor has been written."""
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
        with file.open("wb") as output:
            output.write(len(text).to_bytes(8, "little") + text)
            output.truncate(data + end)
        self._places |= {name: (file, data + self._places[name][1]) for name in names}


def _shards(specs: Mapping[str, Spec], shard_bytes: int) -> list[list[str]]:
    """Return the names of the tensors of each file."""
    shards: list[list[str]] = [[]]
    left = shard_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.nbytes > left:
            shards.append([])
            left = shard_bytes
        shards[-1].append(name)
        left -= spec.nbytes
    return shards
