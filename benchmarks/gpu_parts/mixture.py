"""Experts that change in a running engine: does vLLM's kernel on this device allow it, and is the result right?"""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpu_parts.engines import engine_of, settings_of
from gpu_parts.lines import JOB, notify
from gpu_parts.measure import BF16, TINY
from gpu_parts.models import QUICKSTART, TOKENIZER
from ppoctl.models.convert.checksum import SentChecksums, checksum_of, require_equal

SIZES = {"hidden_size": 1024, "moe_intermediate_size": 768, "num_hidden_layers": 12, "num_experts": 64}
TINY_SIZES = {"hidden_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 2, "num_experts": 4}
MOST_GAP = 0.05
"""Largest difference of two log-probs of equal weights in bfloat16."""
PROMPT = tuple(range(5, 69))
BUCKET = 50
"""Number of tensors that are loaded together: fewer than a layer has."""


def mixture() -> None:
    """Load other weights into a running engine in buckets, and report the seconds; whether each expert that the
    engine computes with has the checksum of what was sent; and the difference of log-probs from an engine that starts
    with these weights."""
    model = _model()
    settings = replace(settings_of(), model=str(model))
    torch.manual_seed(1)
    moved = {name: weight + 0.02 * torch.randn_like(weight) for name, weight in _weights(model).items()}
    with engine_of(settings) as (engine, start_s):
        takes = engine.takes_weights()
        notify("mixture", takes=takes, start_s=start_s, parameters=sum(weight.numel() for weight in moved.values()))
        if not takes:
            return
        for weights in (_weights(model), moved):
            began, items = time.perf_counter(), list(weights.items())
            engine.begin_weights()
            for first in range(0, len(items), BUCKET):
                engine.load(items[first : first + BUCKET])
            loaded = engine.end_weights()
            took = time.perf_counter() - began
            require_equal(list(weights), SentChecksums({n: checksum_of(t) for n, t in weights.items()}), loaded)
            notify("mixture", s=round(took, 2))
        in_place = engine.score(PROMPT, 16)
    save_file(moved, model / "model.safetensors", {"format": "pt"})
    with engine_of(settings, folder=model) as (engine, _):
        new = engine.score(PROMPT, 16)
    gap = max(abs(one - other) for one, other in zip(in_place.prompt, new.prompt, strict=True))
    notify("mixture", gap_max=gap, right=gap < MOST_GAP)


def _model() -> Path:
    """Return a folder with a Qwen3 mixture with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = Path(mkdtemp(prefix="mixture-", dir=JOB.models))
    heads = {"num_attention_heads": 2 if TINY else 16, "num_key_value_heads": 2, "head_dim": 32 if TINY else 64}
    sizes: dict[str, Any] = {**(TINY_SIZES if TINY else SIZES), **heads, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(vocab_size=576, max_position_embeddings=1024, norm_topk_prob=True, **sizes)
    Qwen3MoeForCausalLM(config).to(BF16).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(QUICKSTART / name, folder)
    return folder


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
