"""A trained deepseek_v3 model, exported as a Hugging Face folder, is the same model to transformers and to vLLM.

On a CPU vLLM computes latent attention as plain attention (see `engines.vllm.vllm_environment`), and loads new expert
weights in place incorrectly without an error. A generator therefore gets them through a folder.
"""

import json
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from export_lab import check_export, vllm_settings
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from ppoctl.core.errors import RecipeError
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.vllm.engine import Engine, GenerationRequest

KINDS = {
    # The channel sizes of DeepSeek-V3 and Moonlight.
    "latents of 512 + 64": {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_group": 1,
        "topk_group": 1,
    },
    "latent queries, YaRN, groups": {
        "q_lora_rank": 24,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "rope_parameters": lab.YARN,
        "norm_topk_prob": False,
    },
}


def peaked_model(folder: Path, kind: str) -> Path:
    """Write a model whose `rms_norm_eps` equals that of the latents: vLLM has one value for all, transformers 1e-6
    for latents."""
    torch.manual_seed(0)
    sizes = {**lab.SIZES, **lab.DEEPSEEK, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 64}
    sizes |= {"moe_intermediate_size": 64, "rms_norm_eps": 1e-6, "initializer_range": 0.2, **KINDS[kind]}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.2)
    folder.mkdir()
    model.save_pretrained(folder)
    return folder


@pytest.mark.ci("test_family_export.py, and the weights of test_deepseek.py")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_and_vllm_load_trained_deepseek_export(tmp_path, kind):
    source, target = peaked_model(tmp_path / "source", kind), tmp_path / "target"
    check_export(source, target, check_generated_tokens)
    biases = [load_file(folder / "model.safetensors") for folder in (source, target)]
    for name in (name for name in biases[0] if name.endswith("e_score_correction_bias")):
        assert torch.equal(biases[0][name], biases[1][name])


def test_engine_rejects_config_without_topk_method(tmp_path):
    """transformers does not know `topk_method`; vLLM uses the bias for one of its values only."""
    folder = peaked_model(tmp_path / "source", "latent queries, YaRN, groups")
    config = json.loads((folder / "config.json").read_text())
    del config["topk_method"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"its config\.json has no `topk_method`"):
        Engine(vllm_settings(folder), folder=str(folder))


def check_generated_tokens(engine: Engine, model: torch.nn.Module) -> None:
    """Generate token by token with the KV cache, which takes another path through the engine than a prompt."""
    requests = [GenerationRequest(str(n), tuple(range(3 + n, 9 + 3 * n)), seed=n) for n in range(3)]
    finished = engine.advance(requests, SamplingParams(temperature=1.0, max_new_tokens=20))
    while len(finished) < len(requests):
        finished += engine.advance([], SamplingParams(temperature=1.0, max_new_tokens=20))
    for output in finished:
        prompt = requests[int(output.id)].prompt
        ids = torch.tensor([(*prompt, *output.tokens)])
        with torch.no_grad():
            all_logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        expected = all_logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-3, rtol=0)
