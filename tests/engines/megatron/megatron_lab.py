"""Tiny random models, made-up rollouts and simple objectives for the tests of the Megatron trainer."""

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ppoctl.algorithms.formulas.policy_loss import PolicyClip
from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.algorithms.stages.actor_update import Surrogate
from ppoctl.algorithms.stages.objective import LossInputs, Term, Terms
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import Minibatch, OptimizerStep, OutputRequest, TokenOutputs
from ppoctl.engines.megatron.factory import DTYPES
from ppoctl.engines.megatron.parameter_shards import parts_in
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import ThisProcess
from ppoctl.engines.megatron.trainer import MegatronActor, MegatronCritic, MegatronTrainer
from ppoctl.engines.weights.bucket import tensors_of
from tolerance import Level

VOCABULARY = 101
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {
    "head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
}
DEEPSEEK = {
    "num_key_value_heads": 6,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 2.446,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-2,  # not the eps of the latents
    "num_nextn_predict_layers": 0,
    # Fields that published files have in addition to transformers' fields, and that vLLM reads.
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
"""Like Moonlight, but with groups of experts."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "beta_slow": 0.05,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 56,
    "num_hidden_layers": 3,
}
EAGER = {"attn_implementation": "eager"}
"""transformers' other attention implementations omit Gemma 2's soft cap of scores."""
# Windows shorter than the sequences, and caps that scores and logits come close to.
GEMMA = {
    "head_dim": 12,
    "query_pre_attn_scalar": 7,
    "sliding_window": 4,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "num_hidden_layers": 4,
    **EAGER,
}
GEMMA3 = {
    "head_dim": 12,
    "query_pre_attn_scalar": 7,
    "sliding_window": 4,
    "num_hidden_layers": 4,
    "sliding_window_pattern": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    **EAGER,
}
"""Only the third layer has full attention, so the layers of the first of two pipeline ranks are alike."""
MODELS: dict[str, tuple[type[PreTrainedModel], type, dict[str, Any]]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen2-yarn": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": YARN}),
    "qwen2-deep": (Qwen2ForCausalLM, Qwen2Config, {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12}),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
    "qwen3-moe-mixed": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            **EXPERTS,
            "norm_topk_prob": False,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, DEEPSEEK),
    "deepseek-v3-low-rank": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {**DEEPSEEK, "q_lora_rank": 20, "norm_topk_prob": False, "rope_parameters": YARN},
    ),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, GEMMA),
    "gemma2-uncapped": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA3),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, SHARED_EXPERT),
    "qwen2-moe-mixed": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {**SHARED_EXPERT, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "qwen2-six": (Qwen2ForCausalLM, Qwen2Config, {"num_hidden_layers": 6}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 6}),
    "llama-small": (LlamaForCausalLM, LlamaConfig, {"num_hidden_layers": 1, "hidden_size": 24, "vocab_size": 130}),
    "llama-linear-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 4, "head_dim": 12}),
    "mistral-full": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
}


@cache
def hugging_face_model(kind: str) -> PreTrainedModel:
    """Write a model with random weights, none of which is neutral: biases are not 0, norms are not 1."""
    model_class, config_class, overrides = MODELS[kind]
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    model = model_class(config_class(**{**SIZES, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.1 if name.endswith("bias") or "norm" in name else 0.15
            parameter.add_(torch.randn_like(parameter) * spread)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    torch.random.set_rng_state(state)
    return model


def num_layers(kind: str) -> int:
    return int(hugging_face_model(kind).config.num_hidden_layers)


def model_folder(kind: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    hugging_face_model(kind).save_pretrained(folder)
    return folder


def with_ends(folder: Path, copy: Path, ends: Sequence[int]) -> Path:
    """Copy a model folder, and name the tokens that end a response."""
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ends)}))
    return copy


def with_scaled_weights(folder: Path, copy: Path) -> Path:
    """Copy a model folder, and multiply all its weights by 1.2."""
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    save_file({name: 1.2 * weight for name, weight in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    return copy


def wider_vocabulary(folder: Path) -> Path:
    """Write the "qwen2" model with one more token."""
    model_class, config_class, _ = MODELS["qwen2"]
    model_class(config_class(**{**SIZES, "vocab_size": VOCABULARY + 1})).save_pretrained(folder)
    return folder


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainerBatch(Sequences):
    """Inputs of a trainer, with the mask of tokens in the loss."""

    mask: Tensor


def make_rollouts(
    *, prompts: Sequence[int] = (3, 5, 2, 6, 1), lengths: Sequence[int] = (4, 7, 1, 5, 9), seed: int = 0
) -> TrainerBatch:
    """Return random ids; every seventh present token is masked out (like tool output)."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_columns = len(lengths), max(lengths)
    present = torch.arange(num_columns)[None] < torch.tensor(lengths)[:, None]
    counted = present & (torch.arange(present.numel()).view_as(present) % 7 != 3)
    return TrainerBatch(
        prompt_tokens=torch.randint(1, VOCABULARY, (sum(prompts),), generator=generator).int(),
        prompt_lengths=torch.tensor(prompts),
        tokens=(torch.randint(1, VOCABULARY, (num_rows, num_columns), generator=generator) * present).int(),
        lengths=torch.tensor(lengths),
        mask=counted,
    )


def expected_logprobs(model: PreTrainedModel, rollouts: TrainerBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the response tokens by transformers, on one padded batch. [B R] each."""
    sequences = rollouts.unpadded()
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    attended = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attended).logits.float() / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    logprobs, entropy = torch.zeros(rollouts.tokens.shape), torch.zeros(rollouts.tokens.shape)
    for row, (prompt, length) in enumerate(zip(rollouts.prompt_lengths, rollouts.lengths, strict=True)):
        place = slice(int(prompt) - 1, int(prompt + length) - 1)
        log_p = distribution.logits[row, place]
        logprobs[row, :length] = log_p.gather(1, rollouts.tokens[row, :length, None].long())[:, 0]
        entropy[row, :length] = distribution.entropy()[row, place]
    return logprobs, entropy


@dataclass(frozen=True)
class WeighedLogprobs:
    """Minus the weighted log-prob of each token, minus a fraction of its entropy."""

    weights: Tensor
    needs_entropy: bool

    def __call__(self, outputs: LossInputs, mask: Tensor) -> Tensor:
        losses = -outputs.primary * self.weights[outputs.rows]
        if self.needs_entropy:
            assert outputs.entropy is not None
            losses = losses - 0.3 * outputs.entropy
        return torch.where(mask, losses, 0.0)


@dataclass(frozen=True)
class SquaredDistance:
    """Half the squared distance of each value from `returns`."""

    returns: Tensor
    needs_entropy: bool = False

    def __call__(self, outputs: LossInputs, mask: Tensor) -> Tensor:
        return torch.where(mask, 0.5 * (outputs.primary - self.returns[outputs.rows]) ** 2, 0.0)


def ppo_objective(mask: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Terms:
    """Return the objective with the real clipped loss."""
    return Terms((Term(Surrogate(old_logprobs, advantages, PolicyClip(0.2, 0.2, None), old_logprobs), mask),))


def random_weights(rollouts: TrainerBatch) -> Tensor:
    return torch.randn(rollouts.tokens.shape, generator=torch.Generator().manual_seed(3))


def policy_objective(
    rollouts: TrainerBatch, *, needs_entropy: bool = False, weights: Tensor | None = None, temperature: float = 1.0
) -> Terms:
    """Return the objective of weighted log-probs, with a fraction of the entropies if requested; one term."""
    weights = random_weights(rollouts) if weights is None else weights
    return Terms(
        (Term(WeighedLogprobs(weights, needs_entropy), rollouts.mask),), OutputRequest(temperature=temperature)
    )


def value_objective(rollouts: TrainerBatch) -> Terms:
    returns = torch.randn(rollouts.tokens.shape, generator=torch.Generator().manual_seed(4))
    return Terms((Term(SquaredDistance(returns), rollouts.mask),))


def token_outputs(model: torch.nn.Module, rollouts: TrainerBatch, temperature: float) -> TokenOutputs:
    """Return log-probs and entropies by a model of transformers, with gradient, one sequence at a time."""
    dtype = next(model.parameters()).dtype
    logprobs, entropy = (torch.zeros(rollouts.tokens.shape, dtype=dtype) for _ in range(2))
    for row, sequence in enumerate(rollouts.unpadded()):
        prompt, length = int(rollouts.prompt_lengths[row]), int(rollouts.lengths[row])
        logits = model(input_ids=sequence[None]).logits[0, prompt - 1 : prompt + length - 1]
        log_p = (logits / temperature).log_softmax(-1)
        logprobs[row, :length] = log_p.gather(1, sequence[prompt:, None])[:, 0]
        entropy[row, :length] = -(log_p.exp() * log_p).sum(-1)
    return TokenOutputs(logprobs, entropy)


def expected_gradients(kind: str, rollouts: TrainerBatch, objective: Terms) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of `objective` by transformers and autograd, one sequence at a time, in float64."""
    model = copy.deepcopy(hugging_face_model(kind)).double()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the grouped product has no float64
    every = torch.arange(rollouts.num_seqs)
    outputs = token_outputs(model, rollouts, objective.request.temperature)
    loss = objective(every, outputs, objective.totals(every))
    loss.backward()
    return loss.detach(), on_disk({name: parameter.grad for name, parameter in model.named_parameters()})


def on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under their names in files: transformers 5 fuses experts in memory."""
    found = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor
            continue
        layer, kind = name.rsplit(".", 1)
        for expert, weight in enumerate(tensor):
            halves = {"gate_proj": weight[: len(weight) // 2], "up_proj": weight[len(weight) // 2 :]}
            for part, half in halves.items() if kind == "gate_up_proj" else [("down_proj", weight)]:
                found[f"{layer}.{expert}.{part}.weight"] = half
    return found


# For one gradient tensor, whose values may all be small: relative to its own largest value.
GRADIENT = Level("GRADIENT", 1e-4, floor=0.0)

STEP = OptimizerStep(lr=1e-3, weight_decay=0.0, grad_clip=0.0, beta1=0.9, beta2=0.95, eps=1e-8)


def minibatch(rollouts: TrainerBatch, rows: Sequence[int] | None = None, step: OptimizerStep = STEP) -> Minibatch:
    """Return a minibatch of an objective with one term over all unmasked tokens."""
    chosen = torch.arange(rollouts.num_seqs) if rows is None else torch.tensor(rows)
    return Minibatch(chosen, (int(rollouts.mask[chosen].sum()),), step)


Batching = BySequences | ByTokens


def actor(
    folder: Path, *, dtype: str = "float32", batching: Batching | None = None, reference: Path | None = None
) -> MegatronActor:
    batching = batching or BySequences(microbatch_seqs=2, logits_chunk_tokens=5)
    frozen = None if reference is None else str(reference)
    return started(TrainerSettings("actor", str(folder), DTYPES[dtype], batching, reference=frozen))


def scores(trained: MegatronActor, rollouts: Sequences, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies."""
    said = trained.logprobs(rollouts, OutputRequest(temperature=temperature, entropy=True))
    assert said.entropy is not None
    return said.primary, said.entropy


def critic(folder: Path, *, dtype: str = "float32", batching: Batching | None = None) -> MegatronCritic:
    batching = batching or BySequences(microbatch_seqs=2, logits_chunk_tokens=5)
    return started(TrainerSettings("critic", str(folder), DTYPES[dtype], batching))


def save(trainer: MegatronTrainer, folder: Path, *, in_background: bool = False) -> None:
    """Save and wait until it is complete."""
    trainer.save(folder, in_background=in_background).finish()


def rank_of(trainer: MegatronTrainer) -> MegatronRank:
    """Return the only rank of a trainer in this process."""
    assert isinstance(trainer.ranks, ThisProcess)
    return trainer.ranks.rank


def unstarted(settings: TrainerSettings) -> Any:
    """Return the trainer of a role in this process, not started."""
    kind = MegatronActor if settings.role == "actor" else MegatronCritic
    return kind(settings, ThisProcess(MegatronRank(settings)))


def started(settings: TrainerSettings) -> Any:
    """Return the started trainer of a role in this process."""
    made = unstarted(settings)
    made.start()
    return made


def weights_of(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """Return copies of the weights, under Hugging Face names."""
    return {name: tensor.clone() for name, tensor in tensors_of(trainer.ranks.weights().buckets())}


def gradients_of(trainer: MegatronTrainer) -> dict[str, Tensor]:
    """Return the contents of Megatron-Core's gradient buffers after the last update, under Hugging Face names."""
    [model] = rank_of(trainer).models
    gradients = {name: parameter.main_grad for name, parameter in model.named_parameters()}
    return {part.name: part.read(model.pg_collection).clone() for part in parts_in(gradients, model)}


def check_all(level: Level, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Require equal names, and each tensor equal at this level."""
    assert found.keys() == expected.keys()
    for name in found:
        level.check(found[name], expected[name])


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Require equal names, dtypes and bits."""
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face folder."""
    return load_file(folder / "model.safetensors")
