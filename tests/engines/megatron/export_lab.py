"""Trains a model, exports it as a Hugging Face folder, and checks that transformers and vLLM compute the same
outputs."""

from collections.abc import Callable
from pathlib import Path

import megatron_lab as lab
import torch
from transformers import AutoModelForCausalLM

from ppoctl.engines.vllm.engine import Engine
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.recipe.schema import GeneratorTable
from vllm_in_process import engines_are_guests
from vllm_prepared_once import prepare_once


def vllm_settings(folder: Path) -> VllmSettings:
    prepare_once()
    engines_are_guests()
    return VllmSettings(str(folder), "float32", 64, (0,), GeneratorTable(kv_cache_mib=64, max_concurrent_seqs=2))


def check_export(
    source: Path, target: Path, more: Callable[[Engine, torch.nn.Module], None] = lambda engine, model: None
) -> None:
    """Compare log-probs after three updates; `more` compares further outputs of the engine and transformers'
    model."""
    target.mkdir()
    rollouts = lab.make_rollouts()
    trainer = lab.actor(source)
    before, _ = lab.scores(trainer, rollouts)
    trainer.update(rollouts, [lab.minibatch(rollouts)] * 3, lab.policy_objective(rollouts))
    trainer.save_weights(target)
    logprobs, _ = lab.scores(trainer, rollouts)
    present = torch.arange(logprobs.shape[1])[None] < rollouts.lengths[:, None]
    assert (logprobs - before)[present].abs().max() > 0.1  # far more than the tolerance below

    exported = AutoModelForCausalLM.from_pretrained(target, **lab.EAGER).eval()
    expected, _ = lab.expected_logprobs(exported, rollouts, 1.0)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)

    engine = Engine(vllm_settings(target), folder=str(target))
    try:
        for row, sequence in enumerate(rollouts.unpadded()):
            start, length = int(rollouts.prompt_lengths[row]) - 1, int(rollouts.lengths[row])
            scored = torch.tensor(engine.score(tuple(sequence.tolist()), 1).prompt)[start : start + length]
            torch.testing.assert_close(scored, logprobs[row, :length], atol=1e-3, rtol=0)
        more(engine, exported)
    finally:
        engine.close()
