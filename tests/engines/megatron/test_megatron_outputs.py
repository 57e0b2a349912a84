"""Log-probs, entropies and values equal those of the Hugging Face model, packed or padded, next to any other
sequences.

Verified: agreement with transformers in float32 for all families, tied and untied, with and without grouped heads,
query biases, normalised queries and experts; independence of packed sequences from each other. Not verified: GPU
kernels.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from layout_lab import set_microbatches
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file, save_file

from ppoctl.algorithms.role_table import BySequences, ByTokens
from ppoctl.core.ports import OutputRequest
from ppoctl.engines.megatron.modules import ValueHead
from ppoctl.engines.megatron.trainer import MegatronActor
from tolerance import EXACT, FLOAT32


@pytest.mark.parametrize("kind", lab.MODELS)
def test_packed_logprobs_and_entropies_match_padded_transformers(fresh, kind):
    rollouts = lab.make_rollouts()
    for temperature in (1.0, 0.7):
        found = lab.scores(fresh(kind), rollouts, temperature)
        expected = lab.expected_logprobs(lab.hugging_face_model(kind), rollouts, temperature)
        for one, other in zip(found, expected, strict=True):
            FLOAT32.check(one, other)
            assert one.dtype == torch.float32


def test_end_tokens_are_masked_before_min_new_tokens(model, tmp_path):
    """The model's own end tokens and one more are masked, except a sampled end token. At the first position, where no
    token was sampled before, their probabilities are missing from the sum."""
    folder = lab.with_ends(model("llama"), tmp_path / "model", (5, 33))
    batch, request = lab.make_rollouts(), OutputRequest(min_new_tokens=3, stop_token_ids=(9,))
    tokens = batch.tokens.clone()
    tokens[1, 0] = 9
    rollouts, actor = replace(batch, tokens=tokens), lab.actor(folder)
    plain, said = actor.logprobs(rollouts, OutputRequest()).primary, actor.logprobs(rollouts, request).primary
    chances = {}
    for end in (5, 33, 9):
        tokens[:, 0] = end
        chances[end] = actor.logprobs(replace(batch, tokens=tokens.clone()), OutputRequest()).primary[:, 0].exp()
    missing = sum(chances.values())
    missing[1] -= chances[9][1]
    FLOAT32.check(said[:, 0], plain[:, 0] - torch.log1p(-missing))
    EXACT.check(said[:, 3:], plain[:, 3:])
    assert bool((said[:, :3] > plain[:, :3])[rollouts.mask[:, :3]].all())


def swap(tensors: dict[str, torch.Tensor], one: str, other: str) -> None:
    for name in [name for name in tensors if one in name]:
        there = name.replace(one, other)
        tensors[name], tensors[there] = tensors[there], tensors[name]


def drop_the_bias(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
        tensors[name] = torch.zeros_like(tensors[name])


def rope_as_halves(tensors: dict[str, torch.Tensor]) -> None:
    """Move the rows of rotated channels (2i, 2i + 1) to (i, i + 4), as other families have them."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        heads = tensors[name].view(6, 20, 48)
        tensors[name] = torch.cat([heads[:, :12], heads[:, 12:][:, order]], dim=1).flatten(0, 1).contiguous()
    for name in [name for name in tensors if "kv_a_proj" in name]:
        tensors[name] = torch.cat([tensors[name][:24], tensors[name][24:][order]])


def halves_of_rope_swapped(tensors: dict[str, torch.Tensor]) -> None:
    """Swap the halves of the rotated channels, in the key only."""
    for name in [name for name in tensors if "kv_a_proj" in name]:
        latent, first, second = tensors[name].split([24, 4, 4])
        tensors[name] = torch.cat([latent, second, first])


DEFECTS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], None]]] = {
    "q and k swapped": ("llama", lambda t: swap(t, "layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj")),
    "gate and up swapped": ("gemma2", lambda t: swap(t, "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")),
    "an expert permuted": ("qwen2-moe", lambda t: swap(t, "layers.2.mlp.experts.0.", "layers.2.mlp.experts.3.")),
    "a norm offset once more": ("gemma2", lambda t: t["model.layers.0.input_layernorm.weight"].add_(1.0)),
    "a window's layer moved": ("gemma2", lambda t: swap(t, "layers.0.", "layers.1.")),
    "a layer with full attention moved": ("gemma3", lambda t: swap(t, "layers.2.", "layers.3.")),
    "norms of queries and keys swapped": ("gemma3", lambda t: swap(t, "q_norm", "k_norm")),
    "a shared expert's gate and up swapped": (
        "deepseek-v3",
        lambda t: swap(t, "shared_experts.gate_proj", "shared_experts.up_proj"),
    ),
    "a router bias dropped": ("deepseek-v3", drop_the_bias),
    "rope by halves": ("deepseek-v3", rope_as_halves),
    "halves of the shared key swapped": ("deepseek-v3", halves_of_rope_swapped),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_weight_defect_exceeds_tolerance(model, tmp_path, defect):
    """An error in the mapping tables would show as this difference from transformers."""
    kind, plant = DEFECTS[defect]
    tensors = {name: tensor.clone() for name, tensor in load_file(model(kind) / "model.safetensors").items()}
    plant(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((model(kind) / "config.json").read_text())
    rollouts = lab.make_rollouts()
    found, _ = lab.scores(lab.actor(tmp_path), rollouts)
    expected, _ = lab.expected_logprobs(lab.hugging_face_model(kind), rollouts, 1.0)
    assert (found - expected).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gemma3", "qwen2-moe", "qwen3-moe", "deepseek-v3"])
def test_packing_does_not_change_logprobs(model, kind):
    rollouts, actor = lab.make_rollouts(), lab.actor(model(kind), batching=BySequences(microbatch_seqs=1))
    one_by_one = lab.scores(actor, rollouts)
    for batching in (BySequences(microbatch_seqs=5), ByTokens(max_tokens_per_microbatch=16)):
        set_microbatches(lab.rank_of(actor), batching)
        for found, expected in zip(lab.scores(actor, rollouts), one_by_one, strict=True):
            FLOAT32.check(found, expected)


def test_embedding_scale_is_rounded_as_in_transformers(model):
    """In bfloat16 the square root of 48, 6.9282, is 6.9375."""
    rollouts, seen = lab.make_rollouts(prompts=(3,), lengths=(4,)), []
    trainer = lab.actor(model("gemma2"), dtype="bfloat16")
    decoder = lab.rank_of(trainer).models[0].decoder
    decoder.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True)
    lab.scores(trainer, rollouts)
    embedding = copy.deepcopy(lab.hugging_face_model("gemma2").model.embed_tokens).bfloat16()
    [tokens] = rollouts.unpadded()
    EXACT.check(seen[0][:, 0], embedding(tokens[: len(seen[0])]))


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_forward_batch_limit_changes_only_number_of_passes(model, role):
    """Five rows: three microbatches of the training limit, two of the forward limit. An update keeps the training
    limit."""
    rollouts = lab.make_rollouts()
    objective = lab.policy_objective(rollouts) if role == "actor" else lab.value_objective(rollouts)
    found, passes = [], []
    for batching in (BySequences(microbatch_seqs=2), BySequences(microbatch_seqs=2, forward_microbatch_seqs=4)):
        trainer = getattr(lab, role)(model("qwen2"), batching=batching)
        trainer.update(rollouts, [lab.minibatch(rollouts)], objective)
        seen: list[int] = []
        lab.rank_of(trainer).models[0].register_forward_hook(lambda *_, seen=seen: seen.append(1))
        if isinstance(trainer, MegatronActor):
            found.append(torch.stack([*lab.scores(trainer, rollouts, 0.9)]))
        else:
            found.append(trainer.values(rollouts))
        forwards = len(seen)
        trainer.update(rollouts, [lab.minibatch(rollouts)], objective)
        passes.append((forwards, len(seen) - forwards))
    FLOAT32.check(found[1], found[0])
    assert found[0].abs().max() > 0.01
    assert passes == [(3, 3), (2, 3)]


def test_reference_uses_forward_batch_limit(model):
    batching = ByTokens(max_tokens_per_microbatch=8, forward_max_tokens_per_microbatch=40)
    trainer = lab.actor(model("qwen2"), batching=batching)  # a sequence of 11 tokens fits only the second limit
    rollouts = lab.make_rollouts()
    reference = trainer.reference_logprobs(rollouts, OutputRequest(temperature=0.9))
    FLOAT32.check(reference, lab.scores(trainer, rollouts, 0.9)[0])


@pytest.mark.parametrize(
    ("kind", "level"), [("qwen2", EXACT), ("gemma2", EXACT), ("qwen2-moe", FLOAT32), ("qwen3-moe", FLOAT32)]
)
def test_packed_sequences_do_not_affect_each_other(model, kind, level):
    """Except for rounding where a token shares its expert's matrix product with tokens of others."""
    trainer = lab.actor(model(kind), batching=BySequences(microbatch_seqs=8))
    first, second = (lab.make_rollouts(prompts=(4, 5), lengths=(6, 7), seed=seed) for seed in (1, 2))
    # The first row of one batch, next to the second row of the other.
    mixed_tokens = torch.stack([first.tokens[0], second.tokens[1]])
    mixed_prompts = torch.cat([first.prompt_tokens[:4], second.prompt_tokens[4:]])
    mixed = replace(first, tokens=mixed_tokens, prompt_tokens=mixed_prompts)
    for found, expected in zip(lab.scores(trainer, mixed), lab.scores(trainer, first), strict=True):
        level.check(found[0], expected[0])
        assert not torch.equal(found[1], expected[1])


def test_reference_keeps_source_weights_while_actor_trains(model, tmp_path: Path):
    rollouts = lab.make_rollouts()
    trainer = lab.actor(model("qwen2"))
    before, _ = lab.scores(trainer, rollouts, 0.9)
    trainer.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts, temperature=0.9))
    EXACT.check(trainer.reference_logprobs(rollouts, OutputRequest(temperature=0.9)), before)
    assert not torch.equal(lab.scores(trainer, rollouts, 0.9)[0], before)
    lab.save(trainer, tmp_path)
    resumed = lab.actor(model("qwen2"))
    resumed.load(tmp_path)
    EXACT.check(resumed.reference_logprobs(rollouts, OutputRequest(temperature=0.9)), before)


def test_another_reference_computes_like_an_actor_that_starts_from_it(model, tmp_path: Path):
    """The reference is read from a Hugging Face folder, and from a saved actor."""
    base, rollouts, request = model("qwen2"), lab.make_rollouts(), OutputRequest(temperature=0.9)
    other = lab.with_scaled_weights(base, tmp_path / "other")
    started = lab.actor(other)
    expected = started.logprobs(rollouts, request).primary
    (tmp_path / "state").mkdir()
    lab.save(started, tmp_path / "state")
    for folder in (other, tmp_path / "state"):
        trainer = lab.actor(base, reference=folder)
        own = trainer.logprobs(rollouts, request).primary
        EXACT.check(trainer.reference_logprobs(rollouts, request), expected)
        assert (own - expected)[rollouts.mask].abs().min() > 1e-4
        trainer.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
        EXACT.check(trainer.reference_logprobs(rollouts, request), expected)


def test_fresh_critic_returns_exactly_zero(model):
    values = lab.critic(model("qwen2-tied")).values(lab.make_rollouts())
    assert values.dtype == torch.float32
    EXACT.check(values, torch.zeros(5, 9))


def test_value_head_starts_at_zero_and_returns_float32():
    config = TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, params_dtype=torch.bfloat16, cuda_graph_scope=[]
    )
    head = ValueHead(config, torch.device("cpu"))
    hidden = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.bfloat16)
    EXACT.check(head(hidden), torch.zeros(1))
    torch.nn.init.constant_(head.weight, 1.0078125)
    values = head(hidden)
    assert values.dtype == torch.float32
    EXACT.check(values, torch.tensor([10.078125]))  # bfloat16 would give 10.0625


def test_value_depends_only_on_tokens_before_its_position(model):
    """Tokens at or after r do not change value r, and the token just before it does: with prompt a b and response c d
    e, value 0 is read at b, value 1 at c, value 2 at d; none is read at e."""
    rollouts = lab.make_rollouts(prompts=(2,), lengths=(3,))
    trainer = lab.critic(model("llama"))
    trainer.update(rollouts, [lab.minibatch(rollouts)], lab.value_objective(rollouts))
    values = trainer.values(rollouts)
    for column in range(3):
        tokens = rollouts.tokens.clone()
        tokens[0, column] = (tokens[0, column] + 1) % lab.VOCABULARY
        changed = trainer.values(replace(rollouts, tokens=tokens))
        moved = (changed != values)[0].tolist()
        assert moved == [place > column for place in range(3)]


def test_values_are_zero_at_padding(model):
    rollouts = lab.make_rollouts()
    trainer = lab.critic(model("qwen2"))
    trainer.update(rollouts, [lab.minibatch(rollouts)], lab.value_objective(rollouts))
    values = trainer.values(rollouts)
    present = torch.arange(9)[None] < rollouts.lengths[:, None]
    EXACT.check(values[~present], torch.zeros(int((~present).sum())))
    assert bool((values[present] != 0).all())
