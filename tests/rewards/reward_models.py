"""Tiny reward models, built from the quickstart's model."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart" / "model"


def reward_model(folder: Path, *labels: str, std: float = 0.1) -> Path:
    """Write the quickstart's model with a random head in place of logits: with one output, or with these labels."""
    shutil.copytree(QUICKSTART, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(QUICKSTART / "model.safetensors")
    hidden = weights["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(1)
    weights["score.weight"] = std * torch.randn(max(len(labels), 1), hidden, generator=generator)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    names = labels or ("LABEL_0",)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": dict(enumerate(names))}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
