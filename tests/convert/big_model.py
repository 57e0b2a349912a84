"""Writer of a Hugging Face folder of any size with random weights, one tensor at a time.

As a script, it converts such a folder to one format after another, and prints the memory that each conversion used.

    python tests/convert/big_model.py SOURCE OUT FORMAT [OUT FORMAT]
"""

import json
import sys
from pathlib import Path

import torch

from ppoctl.convert.hugging_face import Spec
from ppoctl.convert.safetensors_writer import SafetensorsWriter
from ppoctl.convert.tensors import placements
from ppoctl.model.shape_reader import read_shape

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


def main() -> None:
    from ppoctl.convert.command.convert_ckpt import ConvertRequest, convert

    source, *rest = sys.argv[1:]
    read_shape(Path(source))  # the memory of imports is not part of the conversion
    for out, to in zip(rest[::2], rest[1::2], strict=True):
        before = memory("VmRSS")
        forget_peak()
        request = ConvertRequest(source=source, to=to, out=Path(out), shard_gib=1.0, parity=False)  # type: ignore[arg-type]
        report = convert(request, lambda _: None)
        counts = {check["name"]: check["count"] for check in report["checks"]}
        print(json.dumps({"to": to, "peak": memory("VmHWM") - before, "digests": counts["digests"]}))
        source = out


if __name__ == "__main__":
    main()
