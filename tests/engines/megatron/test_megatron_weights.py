"""Weights go from Hugging Face to Megatron-Core and back without a changed bit; every tensor is accounted for."""

import json
import re
from itertools import chain
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from ppoctl.algorithms.role_table import BySequences
from ppoctl.core.batch.records import State
from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.parameter_shards import parts_in
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.weights.bucket import tensors_of
from ppoctl.engines.weights.sending import PARTS
from ppoctl.models.convert.transformer_engine import transformer_engine_name
from tolerance import EXACT, FLOAT32

STATE = State(role="actor", step=0, updates=0, lineage="0" * 64)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def copy_with(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    (target / "config.json").write_text((source / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("kind", lab.MODELS)
def test_weights_round_trip_through_megatron(model, fresh, kind):
    weights = fresh(kind).weights(STATE)
    found = dict(tensors_of(weights.buckets()))
    assert weights.names == tuple(found)
    lab.check_all(EXACT, found, tensors_in(model(kind)))
    # A new iterator each time.
    assert len(list(tensors_of(weights.buckets()))) == len(found)


@pytest.mark.parametrize("kind", ["gemma2", "qwen2-moe-mixed"])
def test_finds_parameters_of_transformer_engine_layer_spec(model, kind):
    [stage] = lab.rank_of(lab.actor(model(kind))).models
    parameters = {name: weight.detach() for name, weight in stage.named_parameters()}
    renamed = {}
    for name, weight in parameters.items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        has_experts = layer is not None and stage.settings.shape.has_experts(layer)
        renamed[transformer_engine_name(name, has_experts=has_experts)] = weight
    assert len(renamed.keys() - parameters.keys()) > 4
    for found, expected in zip(parts_in(renamed, stage), parts_in(parameters, stage), strict=True):
        assert found.name == expected.name
        assert torch.equal(found.read(stage.pg_collection), expected.read(stage.pg_collection))


def test_gathered_weights_are_views_except_qkv(model):
    trainer = lab.actor(model("qwen2"))
    addresses = [p.untyped_storage().data_ptr() for p in lab.rank_of(trainer).models[0].parameters()]
    gathered = list(chain.from_iterable(lab.rank_of(trainer).weights(PARTS)))
    copied = {name for name, tensor in gathered if tensor.untyped_storage().data_ptr() not in addresses}
    assert all(name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") for name in copied)


def test_sent_weights_have_recipe_dtype(model):
    trainer = lab.actor(model("qwen2"), dtype="bfloat16")
    found = dict(tensors_of(trainer.weights(STATE).buckets(PARTS)))
    lab.check_all(EXACT, found, {name: t.bfloat16() for name, t in tensors_in(model("qwen2")).items()})


def test_sharded_files_are_read_through_their_index(model, tmp_path):
    lab.hugging_face_model("qwen2").save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    lab.check_all(EXACT, lab.weights_of(lab.actor(tmp_path)), tensors_in(model("qwen2")))
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(EnvironmentProblemError, match=r"`model-\d+-of-\d+\.safetensors` is missing"):
        lab.actor(tmp_path)


DAMAGED = {
    "missing": ("qwen2", "model.layers.1.self_attn.k_proj.bias", None, "`{}` missing"),
    "missing expert": ("qwen3-moe", "model.layers.2.mlp.experts.3.up_proj.weight", None, "`{}` missing"),
    "missing router bias": (
        *("deepseek-v3", "model.layers.2.mlp.gate.e_score_correction_bias", None),
        "`{}` missing",
    ),
    "expert of a dense layer": (
        *("qwen3-moe-mixed", "model.layers.0.mlp.experts.0.up_proj.weight", torch.zeros(32, 48)),
        "`{}` in .* is not part",
    ),
    "unknown": ("llama", "model.layers.0.self_attn.q_proj.bias", torch.zeros(48), "`{}` in .* is not part"),
    "wrong shape": (
        *("llama", "model.norm.weight", torch.ones(47)),
        r"`{}` in .* has shape \[47\]; .* implies \[48\]",
    ),
    "quantised": ("llama", "model.norm.weight", torch.ones(48, dtype=torch.int8), "is I8; quantized"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_tensor_is_named_in_error(model, tmp_path, damage):
    kind, name, tensor, says = DAMAGED[damage]
    tensors = tensors_in(model(kind))
    tensors.pop(name, None)
    found = copy_with(model(kind), tmp_path, tensors if tensor is None else {**tensors, name: tensor})
    with pytest.raises(EnvironmentProblemError, match=says.format(re.escape(name))):
        lab.actor(found)


def test_output_layer_differing_from_tied_embedding_is_rejected(model, tmp_path):
    tensors = tensors_in(model("qwen2-tied"))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(EnvironmentProblemError, match=r"`lm_head\.weight` .* although config\.json ties them"):
        lab.actor(copy_with(model("qwen2-tied"), tmp_path, tensors))


def test_truncated_safetensors_file_is_named_in_error(model, tmp_path):
    folder = copy_with(model("llama"), tmp_path, tensors_in(model("llama")))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(EnvironmentProblemError, match=r"`.*model\.safetensors` cannot be read"):
        lab.actor(folder)


def test_missing_reward_model_head_raises_instead_of_zero(model, tmp_path):
    folder = copy_with(model("llama"), tmp_path, tensors_in(model("llama")))
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EnvironmentProblemError, match=r"`score\.weight` missing"):
        lab.critic(folder)


def test_known_extra_tensors_are_skipped(model, tmp_path):
    """A second copy of a tied embedding, RoPE's constants; for a critic the language model's head."""
    tensors = tensors_in(model("qwen2-tied"))
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    folder = copy_with(model("qwen2-tied"), tmp_path, tensors | extra)
    lab.check_all(EXACT, lab.weights_of(lab.actor(folder)), tensors)
    found = lab.weights_of(lab.critic(model("qwen2")))
    head = found.pop("score.weight")
    expected = tensors_in(model("qwen2"))
    del expected["lm_head.weight"]
    lab.check_all(EXACT, found, expected)
    EXACT.check(head, torch.zeros(1, 48))


@pytest.mark.parametrize(
    ("kind", "shard_bytes"),
    [
        ("qwen2", 2**30),
        ("qwen2-tied", 2**14),
        ("llama3-rope", 2**30),
        ("gemma2", 2**30),
        ("qwen2-moe", 2**30),
        ("qwen3-moe", 2**30),
    ],
)
def test_transformers_loads_trained_export(model, tmp_path, kind, shard_bytes):
    rollouts = lab.make_rollouts()
    trainer = lab.actor(model(kind))
    trainer.update(rollouts, [lab.minibatch(rollouts)], lab.policy_objective(rollouts))
    trainer.export(tmp_path, shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 2**14)
    exported, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **lab.EAGER)
    assert not any(info.values())
    weights = lab.weights_of(trainer)
    found = {name: tensor for name, tensor in lab.on_disk(exported.state_dict()).items() if name in weights}
    lab.check_all(EXACT, found, weights)
    logprobs, _ = lab.scores(trainer, rollouts)
    FLOAT32.check(logprobs, lab.expected_logprobs(exported.eval(), rollouts, 1.0)[0])
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_export_copies_companion_files(model, tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    copy_with(model("qwen2"), source, tensors_in(model("qwen2")))
    (source / "additional_chat_templates").mkdir()
    wanted = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json"}
    wanted.add("additional_chat_templates/tool_use.jinja")
    for name in (*wanted, "README.md", "additional_chat_templates/README.md"):
        (source / name).write_text(name)
    lab.actor(source).save_weights(target)
    copied = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert copied - {"config.json", "model.safetensors"} == wanted


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen2-moe", "qwen3", "gemma2", "gemma3", "qwen3-moe"])
def test_critic_export_is_classifier_that_can_be_loaded(model, tmp_path, kind):
    rollouts = lab.make_rollouts()
    trainer = lab.critic(model(kind))
    trainer.update(rollouts, [lab.minibatch(rollouts)] * 2, lab.value_objective(rollouts))
    values = trainer.values(rollouts)
    trainer.save_weights(tmp_path)
    exported: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(tmp_path, **lab.EAGER).eval()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(exported).__name__]
    with torch.no_grad():
        for row, sequence in enumerate(rollouts.unpadded()):
            hidden = exported.model(sequence[None]).last_hidden_state[0]
            start, length = int(rollouts.prompt_lengths[row]) - 1, int(rollouts.lengths[row])
            FLOAT32.check(values[row, :length], exported.score(hidden)[start : start + length, 0])
    EXACT.check(lab.critic(tmp_path).values(rollouts), values)


def test_layout_rejected_by_megatron_is_named_with_key(model):
    """A rule between recipe keys refuses this layout; another version of Megatron-Core may refuse others."""
    settings = TrainerSettings(
        role="critic",
        model=str(model("qwen2")),
        dtype=torch.float32,
        batching=BySequences(microbatch_seqs=2),
        parallel=ParallelTable(sequence=True),
    )
    with pytest.raises(EnvironmentProblemError) as caught:
        MegatronRank(settings).start()
    assert caught.value.message == (
        f"Megatron-Core cannot build `{model('qwen2')}` with this `critic.parallel`: Cannot use sequence parallelism "
        "without tensor parallelism"
    )
    assert caught.value.hint == "--set 'critic.parallel={}'"
