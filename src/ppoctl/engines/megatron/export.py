"""Trained weights as a Hugging Face folder that transformers and vLLM load: safetensors, config, tokenizer."""

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import save_file

from ppoctl.engines.megatron.model import PackedModel, ValueModel
from ppoctl.engines.megatron.weights import Part, parts_of

SHARD_BYTES = 4 * 2**30
"""Most bytes of tensors in one file."""

_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)


def save_hugging_face(model: PackedModel, source: Path, folder: Path) -> None:
    """Write `model` into `folder` under Hugging Face names, with config and tokenizer of the model it came from.

    A critic becomes the family's `...ForSequenceClassification` with one label. All of it is flushed to disk.
    """
    shards = _shards(parts_of(model))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({part.name: part.read().contiguous() for part in shard}, folder / name, metadata={"format": "pt"})
        weight_map |= {part.name: name for part in shard}
    if len(shards) > 1:
        metadata = {"total_size": sum(part.view.nbytes for shard in shards for part in shard)}
        _write_json(folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
    _write_json(folder / "config.json", _config(model, source))
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Have the operating system write out every file under `folder`, and the names themselves."""
    for path in (folder, *folder.rglob("*")):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _shards(parts: list[Part]) -> list[list[Part]]:
    shards: list[list[Part]] = [[]]
    room = SHARD_BYTES
    for part in parts:
        if shards[-1] and part.view.nbytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append(part)
        room -= part.view.nbytes
    return shards


def _config(model: PackedModel, source: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(model.settings.dtype).removeprefix("torch.")
    if isinstance(model, ValueModel):
        prefix = {"qwen2": "Qwen2", "llama": "Llama"}[model.settings.shape.family]
        config |= {"architectures": [f"{prefix}ForSequenceClassification"], "num_labels": 1}
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return config


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
