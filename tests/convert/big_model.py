"""Writer of a Hugging Face folder of any size with random weights, one tensor at a time, and the memory of its
conversions.

As a script, it converts such a folder to one format after another, and prints the memory that each conversion used.

    python tests/convert/big_model.py SOURCE OUT FORMAT [OUT FORMAT]
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any, Literal

import torch

from ppoctl.models.convert.hugging_face import Spec
from ppoctl.models.convert.safetensors_writer import SafetensorsWriter
from ppoctl.models.convert.tensors import placements
from ppoctl.models.shape_reader import read_shape
from ppoctl.run.conversion.convert_ckpt import ConvertRequest, convert

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def write_model(folder: Path, dtype: torch.dtype, shard_bytes: int, **sizes: int) -> int:
    """Write a model of these sizes (hidden_size, num_hidden_layers, ...); return the bytes of its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes}), "utf-8")
    specs = {placement.name: Spec(placement.shape, dtype) for placement in placements(read_shape(folder), "token")}
    writer = SafetensorsWriter(folder, specs, shard_bytes)
    generator = torch.Generator().manual_seed(1)
    for name, spec in specs.items():
        writer.write(name, torch.empty(spec.shape, dtype=dtype).normal_(generator=generator))
    writer.finish()
    writer.close()
    return sum(spec.nbytes for spec in specs.values())


def memory(name: str) -> int:
    """Return the current memory of this process (VmRSS), or its peak since `forget_peak` (VmHWM), in bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", "ascii")


def converted(source: Path, to: Literal["hf", "megatron"], out: Path) -> dict[str, Any]:
    request = ConvertRequest(source=str(source), to=to, out=out, shard_gib=1.0, parity=False)
    return convert(request, lambda _: None)


def memory_of_conversion(source: Path, to: Literal["hf", "megatron"], out: Path) -> dict[str, int]:
    """Convert; return the bytes that it needed, and the number of its digests."""
    ctypes.CDLL(None).malloc_trim(0)  # what this process has freed must not be used again
    before = memory("VmRSS")
    forget_peak()
    report = converted(source, to, out)
    counts = {check["name"]: check["count"] for check in report["checks"]}
    return {"peak": memory("VmHWM") - before, "digests": counts["digests"]}


def main() -> None:
    source, *rest = sys.argv[1:]
    read_shape(Path(source))  # the memory of imports is not part of the conversion
    for out, to in zip(rest[::2], rest[1::2], strict=True):
        print(json.dumps({"to": to, **memory_of_conversion(Path(source), to, Path(out))}))  # type: ignore[arg-type]
        source = out


if __name__ == "__main__":
    main()
