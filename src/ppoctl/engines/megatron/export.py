"""Trained weights as a Hugging Face folder that transformers and vLLM load: safetensors, config, tokenizer."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ppoctl.convert.families import FAMILIES

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


@dataclass(frozen=True)
class Exported:
    """What the files of a model are written from."""

    weights: Iterator[tuple[str, Tensor]]
    """Under Hugging Face names; each is valid until the next one is taken."""
    source: Path
    """Folder of the model it came from, with config and tokenizer."""
    dtype: torch.dtype
    is_critic: bool
    """Becomes the family's `...ForSequenceClassification` with one label."""


def save_hugging_face(model: Exported, folder: Path) -> None:
    """Write `model` into `folder` under Hugging Face names, one file's tensors in memory at a time.

    All of it is flushed to disk.
    """
    written: list[tuple[Path, list[str]]] = []
    total = 0
    for number, shard in enumerate(_shards(model.weights), start=1):
        file = folder / f"model-{number:05d}.safetensors"
        save_file(shard, file, metadata={"format": "pt"})
        written.append((file, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
    weight_map = _name_files(written, folder)
    if len(written) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", _config(model))
    for pattern in _COMPANIONS:
        for path in model.source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
    flush_folder(folder)


def flush_folder(folder: Path) -> None:
    """Have the operating system write out every file under `folder`, and the names themselves."""
    for path in (folder, *folder.rglob("*")):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _shards(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Copies of the tensors, as many as fit one file."""
    shard: dict[str, Tensor] = {}
    room = SHARD_BYTES
    for name, tensor in weights:
        if shard and tensor.nbytes > room:
            yield shard
            shard, room = {}, SHARD_BYTES
        shard[name] = tensor.clone(memory_format=torch.contiguous_format)
        room -= tensor.nbytes
    yield shard


def _name_files(written: list[tuple[Path, list[str]]], folder: Path) -> dict[str, str]:
    """Give the files the names that transformers looks for, now that their number is known."""
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(written, start=1):
        whole = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        name = "model.safetensors" if len(written) == 1 else whole
        file.rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    return weight_map


def _config(model: Exported) -> dict[str, object]:
    config: dict[str, object] = json.loads((model.source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    if model.is_critic:
        prefix = FAMILIES[str(config["model_type"])].classes
        config |= {"architectures": [f"{prefix}ForSequenceClassification"], "num_labels": 1}
        config |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    return config


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
