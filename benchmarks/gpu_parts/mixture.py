"""Experts that change in a running engine: does vLLM's kernel on this device allow it, and is the result right? And
experts that the engine chose: do they reach the trainer, and do log-probs then agree better?"""

import shutil
import time
from collections.abc import Sequence
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
from ppoctl.algorithms.role_table import ByTokens
from ppoctl.core.batch.rollouts import grids_of
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import OutputRequest, SamplingParams
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import OpenRank, ThisProcess
from ppoctl.engines.megatron.trainer import MegatronActor
from ppoctl.engines.vllm.engine import Engine, GenerationOutput, GenerationRequest
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
    settings = replace(settings_of(), model=str(model), returns_experts=True)
    torch.manual_seed(1)
    moved = {name: weight + 0.02 * torch.randn_like(weight) for name, weight in _weights(model).items()}
    with engine_of(replace(settings, returns_experts=False)) as (engine, start_s):
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
        outputs = _generated(engine)
    gap = max(abs(one - other) for one, other in zip(in_place.prompt, new.prompt, strict=True))
    notify("mixture", gap_max=gap, right=gap < MOST_GAP)
    _replay(model, outputs)


def _generated(engine: Engine) -> list[GenerationOutput]:
    """Return responses with the experts of their tokens."""
    requests, ended = [GenerationRequest(str(seed), PROMPT, seed) for seed in range(8)], list[GenerationOutput]()
    params = SamplingParams(temperature=1.0, max_new_tokens=64, returns_experts=True)
    while len(ended) < 8:
        ended += engine.advance(requests, params)
        requests = []
    return ended


def _replay(model: Path, outputs: Sequence[GenerationOutput]) -> None:
    """Report the mean difference between log-probs of engine and trainer, with the trainer's own experts and with
    those of the engine, and the fraction of the engine's experts that the trainer would not choose. The second
    difference must be smaller, unless it is only rounding."""
    settings = TrainerSettings("actor", str(model), BF16, ByTokens(max_tokens_per_microbatch=4096))
    actor = MegatronActor(settings, ThisProcess(OpenRank(settings, 60.0)(0, 1, "")))
    actor.start()
    lengths, tokens, sampler = grids_of([(output.tokens, output.logprobs) for output in outputs])
    prompts = torch.tensor(PROMPT * len(outputs), dtype=torch.int32)
    sequences = Sequences(prompts, torch.full_like(lengths, len(PROMPT)), tokens, lengths)
    joined = bytearray(b"".join(output.experts for output in outputs))
    experts = torch.frombuffer(joined, dtype=torch.uint8).view(int(sequences.input_lengths.sum()), -1)
    own = actor.logprobs(sequences, OutputRequest(experts=True))
    assert own.experts is not None
    given = actor.logprobs(replace(sequences, experts=experts.short()), OutputRequest())
    present = sequences.present
    gaps = [float((each.primary - sampler)[present].abs().mean()) for each in (own, given)]
    per_layer = (len(experts), -1, 2)
    same = (experts.view(per_layer)[..., None] == own.experts.view(per_layer)[:, :, None, :]).any(dim=-1)
    differ = 1 - float(same.float().mean())
    notify("mixture", gap_own=gaps[0], gap_given=gaps[1], differ=differ, right=gaps[1] < max(MOST_GAP, gaps[0]))


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
