"""What was trained, written as a Hugging Face folder, is the same model to transformers and to vLLM: every family.

vLLM on a CPU takes new expert weights in place silently wrong, so there a folder is how a generator gets them.
"""

from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from transformers import AutoModelForCausalLM

from ppoctl.engines.vllm.engine import Engine
from ppoctl.engines.vllm.settings import VllmSettings
from ppoctl.recipe.schema import GeneratorTable

FAMILIES = ["gemma2", "llama", "llama-linear-rope", "qwen2", "qwen2-yarn", "qwen2-moe", "qwen3", "qwen3-moe"]


def peaked_model(kind: str, folder: Path) -> Path:
    """Heads of 32 channels: vLLM's CPU attention has no narrower ones."""
    torch.manual_seed(0)
    model, config, overrides = lab.MODELS[kind]
    sizes = {**lab.SIZES, **overrides, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 32, "moe_intermediate_size": 64, "initializer_range": 0.2}
    if "moe" not in kind:
        del sizes["moe_intermediate_size"]
    model(config(**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", FAMILIES)
def test_transformers_and_vllm_load_what_was_trained(tmp_path, kind):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    rollouts = lab.make_rollouts()
    trainer = lab.actor(peaked_model(kind, source))
    before, _ = trainer.logprobs(rollouts, temperature=1.0)
    trainer.update(rollouts, [lab.minibatch(rollouts)] * 3, lab.policy_objective(rollouts))
    trainer.save_weights(target)
    logprobs, _ = trainer.logprobs(rollouts, temperature=1.0)
    present = torch.arange(logprobs.shape[1])[None] < rollouts.lengths[:, None]
    assert (logprobs - before)[present].abs().max() > 0.1  # far more than the tolerance below

    exported = AutoModelForCausalLM.from_pretrained(target, **lab.EAGER).eval()
    expected, _ = lab.expected_logprobs(exported, rollouts, 1.0)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)

    settings = VllmSettings(str(target), "float32", 64, (0,), GeneratorTable(kv_cache_mib=64, max_concurrent_seqs=2))
    engine = Engine(settings)
    try:
        for row, sequence in enumerate(rollouts.sequences()):
            start, length = int(rollouts.prompt_lengths[row]) - 1, int(rollouts.lengths[row])
            scored = torch.tensor(engine.score(sequence.tolist()))[start : start + length]
            torch.testing.assert_close(scored, logprobs[row, :length], atol=1e-3, rtol=0)
    finally:
        engine.close()
