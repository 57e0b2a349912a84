"""The whole command on tiny models: a round trip is bitwise equal, and every planted defect is reported by name."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from convert.conftest import edit_json
from ppoctl.core.errors import ConversionError, EnvironmentProblemError, OutOfMemoryError, RecipeError
from ppoctl.engines.megatron.checkpoint_scoring import CheckpointScorer
from ppoctl.models.convert import fused_views, parameters, writers
from ppoctl.models.convert.tensor_mapping import FusedPart
from ppoctl.models.rope import Rope
from ppoctl.models.shape import ModelShape
from ppoctl.run.conversion import parity
from ppoctl.run.conversion.convert_ckpt import REPORT, ConvertRequest, convert

Model = Callable[[str], Path]


def run(
    source: Path, to: str, out: Path, notify: Callable[[str], None] = lambda _: None, **options: object
) -> dict[str, object]:
    return convert(ConvertRequest(source=str(source), to=to, out=out, **options), notify)  # type: ignore[arg-type]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(torch.equal(actual[name], expected[name]) for name in expected)


def copy(source: Path, target: Path, changes: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Copy a model folder with some tensors changed."""
    shutil.copytree(source, target)
    changed = weights(target)
    changes(changed)
    save_file(changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


ALIKE = {
    "qwen2": "qwen2-tied",
    "mistral": "llama3-rope",
    "qwen3": "an expert permuted",
    "gemma3": "gemma2",
    "qwen3-moe": "an expert permuted",
    "qwen3-moe-mixed": "an expert permuted; deepseek-v3-low-rank",
    "qwen2-moe": "an expert permuted",
    "deepseek-v3": "deepseek-v3-low-rank",
}
"""Family -> another one with the same kinds of layers, or the defect that a model with the same kinds of layers has
before its round trip."""


@pytest.fixture(scope="module")
def megatron(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return the checked Megatron folder of a model by kind."""
    root = tmp_path_factory.mktemp("megatron")

    def folder(kind: str) -> Path:
        if not (root / kind).exists():
            run(model(kind), "megatron", root / kind)
        return root / kind

    return folder


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2-tied", "llama3-rope", "gemma2", "deepseek-v3-low-rank"),
        *(pytest.param(kind, marks=pytest.mark.ci(other)) for kind, other in ALIKE.items()),
    ],
)
def test_conversion_round_trip_is_bit_exact(model: Model, tmp_path: Path, kind: str) -> None:
    to_megatron = run(model(kind), "megatron", tmp_path / "megatron")
    back = run(tmp_path / "megatron", "hf", tmp_path / "back", shard_gib=60 / 2**20)
    assert same(weights(tmp_path / "back"), weights(model(kind)))
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    for report in (to_megatron, back):
        checks = {check["name"]: check for check in report["checks"]}  # type: ignore[attr-defined]
        assert checks["log-probs"]["largest_gap"] < 1e-5
        assert checks["entropies"]["largest_gap"] < 1e-5
        assert checks["digests"]["count"] == len(report["tensors"])  # type: ignore[arg-type]
        assert report["verified"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (model(kind) / name).read_bytes()
    assert json.loads((tmp_path / "back" / REPORT).read_text("utf-8")) == back


def test_reward_model_converts_to_a_critic_and_back(model: Model, tmp_path: Path) -> None:
    torch.manual_seed(1)
    reward = AutoModelForSequenceClassification.from_pretrained(model("qwen2-tied"), num_labels=1)
    reward.save_pretrained(tmp_path / "reward")
    to_megatron = run(tmp_path / "reward", "megatron", tmp_path / "megatron")
    back = run(tmp_path / "megatron", "hf", tmp_path / "back")
    assert to_megatron["role"] == back["role"] == "critic"
    assert same(weights(tmp_path / "back"), weights(tmp_path / "reward"))
    gaps = {check["name"]: check["largest_gap"] for check in back["checks"]}  # type: ignore[attr-defined]
    assert gaps["values"] < 1e-5
    assert gaps["values under a probe"] < 1e-5


def test_base_model_converts_to_a_critic_with_a_zero_value_head(model: Model, tmp_path: Path) -> None:
    notes: list[str] = []
    convert(ConvertRequest(str(model("qwen2")), "megatron", tmp_path / "megatron", role="critic"), notes.append)
    assert notes[0] == f"note: `score.weight` is not in `{model('qwen2')}`: the value head is zero"
    assert notes[1] == "note: `lm_head.weight` is left out: a critic has a value head instead"
    run(tmp_path / "megatron", "hf", tmp_path / "back")
    assert not weights(tmp_path / "back")["score.weight"].any()


def test_weights_are_cast_to_the_requested_dtype(model: Model, tmp_path: Path) -> None:
    run(model("qwen2"), "megatron", tmp_path / "megatron", dtype="bfloat16")
    run(tmp_path / "megatron", "hf", tmp_path / "back")
    expected = {name: tensor.bfloat16() for name, tensor in weights(model("qwen2")).items()}
    assert same(weights(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text("utf-8"))["dtype"] == "bfloat16"


# Defects of the output, and the message that names each.


def change_tensor(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        changed = weights(folder)
        changed[name].view(torch.int16)[..., 0] ^= 1
        save_file(changed, folder / "model.safetensors")

    return damage


def swap(first: str, other: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        changed = weights(folder)
        changed[first], changed[other] = changed[other].clone(), changed[first].clone()
        save_file(changed, folder / "model.safetensors")

    return damage


def untie(folder: Path) -> None:
    changed = weights(folder)
    changed["lm_head.weight"] = changed["model.embed_tokens.weight"] + 1
    save_file(changed, folder / "model.safetensors")


def drop_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def cut(pattern: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = sorted(folder.glob(pattern))[-1]
        file.write_bytes(file.read_bytes()[:-100])

    return damage


def other_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    edit_json(folder / "config.json", rope_parameters={**config["rope_parameters"], "rope_theta": 20000.0})


LAYER = "model.layers.1."
DEFECTS = {
    "a shard dropped": ("qwen2", "hf", drop_shard, r"`model-00002-of-\d+\.safetensors` is missing"),
    "q and k swapped": (
        "llama",
        "hf",
        swap(f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn.k_proj.weight"),
        r"tensor `model\.layers\.1\.self_attn\.q_proj\.weight` differs from the source",
    ),
    "an expert permuted": (
        "qwen3-moe",
        "hf",
        swap(f"{LAYER}mlp.experts.0.up_proj.weight", f"{LAYER}mlp.experts.3.up_proj.weight"),
        r"tensor `model\.layers\.1\.mlp\.experts\.0\.up_proj\.weight` differs from the source",
    ),
    "one bit of a norm": ("qwen2", "hf", change_tensor("model.norm.weight"), r"tensor `model\.norm\.weight` differs"),
    "an untied embedding": (
        "qwen2-tied",
        "hf",
        untie,
        r"tensor `lm_head\.weight` was written but is not part of the model",
    ),
    "a truncated file": ("qwen2", "hf", cut("*.safetensors"), r"`.*safetensors` cannot be read"),
    "a truncated Megatron file": ("qwen2", "megatron", cut("*.distcp"), r"`__0_0\.distcp` is truncated"),
    "a wrong rope base": ("qwen2", "hf", other_rope, r"`rope` of the written config\.json is"),
    "a wrong rope base in Megatron's": ("qwen2", "megatron", other_rope, r"`rope` of the written config\.json is"),
}


RETRIED = ("a shard dropped", "an expert permuted", "a truncated Megatron file")
"""Both directions, several files, and a model with experts. The other models are those of other round trips."""


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_in_the_output_is_named_and_nothing_is_left(
    model: Model, megatron: Model, tmp_path: Path, defect: str
) -> None:
    kind, to, damage, words = DEFECTS[defect]
    source = megatron(kind) if to == "hf" else model(kind)

    def damage_written(message: str) -> None:
        if message.startswith("wrote "):
            damage(tmp_path / ".out.converting")

    shard_gib = 60 / 2**20 if damage is drop_shard else 4.0
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConversionError, match=words):
        run(source, to, tmp_path / "out", damage_written, shard_gib=shard_gib)
    assert sorted(tmp_path.iterdir()) == before
    if defect in RETRIED:
        run(source, to, tmp_path / "out", shard_gib=shard_gib)


def test_symmetric_mapping_error_is_found_by_logprobs(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swap keys and values: they have the same shape, so a round trip is bitwise equal."""
    part_of, other = fused_views.part_of, {FusedPart.KEY: FusedPart.VALUE, FusedPart.VALUE: FusedPart.KEY}
    monkeypatch.setattr(
        parameters, "part_of", lambda whole, place, shape: part_of(whole, other.get(place, place), shape)
    )
    with pytest.raises(ConversionError, match=r"log-probs of fixed prompts differ by .* family `qwen2`"):
        run(model("qwen2"), "megatron", tmp_path / "out")
    assert not list(tmp_path.iterdir())


COMPUTED_OTHERWISE = {
    "a norm not offset": ("gemma2", {"norm_offset": False}),
    "scores not capped": ("gemma2", {"attention_softcap": None}),
    "RoPE of full attention in windows": ("gemma3", {"window_rope": None}),
    "another rope base": ("llama", {"rope": Rope(20000.0)}),
    "experts not renormalised": ("qwen3-moe", {}),
}


SEEN = {
    "RoPE of full attention in windows": "a norm not offset",
    "scores not capped": "a norm not offset",
    "another rope base": "experts not renormalised",
}


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(defect, marks=[pytest.mark.ci(SEEN[defect])] if defect in SEEN else [])
        for defect in COMPUTED_OTHERWISE
    ],
)
def test_model_with_another_computation_is_found_by_logprobs(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    kind, changes = COMPUTED_OTHERWISE[defect]

    def scorer(folder: Path, shape: ModelShape, *rest: Any) -> CheckpointScorer:
        if shape.experts is not None:
            changes["experts"] = replace(shape.experts, renormalise=False)
        return CheckpointScorer(folder, replace(shape, **changes), *rest)

    monkeypatch.setattr(parity, "CheckpointScorer", scorer)
    with pytest.raises(ConversionError, match="log-probs of fixed prompts differ"):
        run(model(kind), "megatron", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_nonzero_padding_is_found(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def padded_with_ones(parameter: parameters.Parameter, *rest: Any) -> torch.Tensor:
        whole = parameters.assembled(parameter, *rest)
        whole[parameter.rows :] = 1
        return whole

    monkeypatch.setattr(writers, "assembled", padded_with_ones)
    with pytest.raises(ConversionError, match=r"padding rows of Megatron's `embedding\.word_embeddings\.weight`"):
        run(model("qwen2"), "megatron", tmp_path / "out")
    run(model("qwen2"), "megatron", tmp_path / "trained", verify=False)
    report = run(tmp_path / "trained", "hf", tmp_path / "back")
    [padding] = [check["says"] for check in report["checks"] if check["name"] == "padding rows"]  # type: ignore[attr-defined]
    assert padding == "left out; 54 were not zero"


# Defects of the source, and the message that names each. Others: test_megatron_weights.


def has(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda changed: changed.update({name: tensor})


SOURCES = {
    "has one too many": ("qwen2", has("model.extra", torch.ones(2)), {}, r"`model\.extra` .* not part of the actor"),
    "has several dtypes": (
        "qwen2",
        has("model.layers.1.input_layernorm.weight", torch.ones(48).bfloat16()),
        {},
        r"`model\.layers\.1\.input_layernorm\.weight` is torch\.bfloat16, others .* torch\.float32",
    ),
    "is a critic": (
        "qwen2-tied",
        has("score.weight", torch.ones(1, 48)),
        {"role": "actor"},
        r"`score\.weight` .* actor",
    ),
    "has a biased head": (
        "qwen2",
        lambda changed: changed.update({"score.weight": torch.ones(1, 48), "score.bias": torch.ones(1)}),
        {"role": "critic"},
        r"`score\.bias` .* not part of the critic",
    ),
    "has several labels": ("qwen2", has("score.weight", torch.ones(3, 48)), {"role": "critic"}, r"shape \[3, 48\]"),
}


@pytest.mark.parametrize("what", SOURCES)
def test_unsuitable_source_is_refused(model: Model, tmp_path: Path, what: str) -> None:
    kind, changes, options, words = SOURCES[what]
    source = copy(model(kind), tmp_path / "source", changes)
    with pytest.raises(EnvironmentProblemError, match=words):
        run(source, "megatron", tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_derived_tensors_are_left_out_and_reported(model: Model, tmp_path: Path) -> None:
    def add(changed: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            changed[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        changed["lm_head.weight"] = changed["model.embed_tokens.weight"].clone()

    source = copy(model("qwen2-tied"), tmp_path / "source", add)
    report = run(source, "megatron", tmp_path / "out")
    assert report["notes"] == [
        "`model.layers.0.self_attn.rotary_emb.inv_freq` and 1 more left out: computed from config.json",
        "`lm_head.weight` is left out: it is equal to `model.embed_tokens.weight`",
    ]


def test_megatron_folder_requires_its_configuration(model: Model, tmp_path: Path) -> None:
    run(model("qwen2"), "megatron", tmp_path / "megatron")
    (tmp_path / "megatron" / "config.json").unlink()
    with pytest.raises(RecipeError, match=r"has no config\.json"):
        run(tmp_path / "megatron", "hf", tmp_path / "out")
    edited = shutil.copytree(model("qwen2"), tmp_path / "other")
    edit_json(edited / "config.json", vocab_size=200)
    with pytest.raises(EnvironmentProblemError, match=r"`embedding\.word_embeddings\.weight` .* has shape"):
        run(tmp_path / "megatron", "hf", tmp_path / "out", like=str(edited))
    run(tmp_path / "megatron", "hf", tmp_path / "out", like=str(model("qwen2")))
    assert same(weights(tmp_path / "out"), weights(model("qwen2")))


def test_pickles_are_read_only_with_the_option(model: Model, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(model("qwen2"), source)
    torch.save(weights(source), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(EnvironmentProblemError, match="pickles"):
        run(source, "megatron", tmp_path / "no")
    run(source, "megatron", tmp_path / "out", allow_pickle=True)
    run(tmp_path / "out", "hf", tmp_path / "back")
    assert same(weights(tmp_path / "back"), weights(model("qwen2")))


def test_pickle_with_code_is_not_executed(model: Model, tmp_path: Path) -> None:
    source, witness = tmp_path / "source", tmp_path / "ran"
    shutil.copytree(model("qwen2"), source)
    (source / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Runs(witness)}, source / "pytorch_model.bin")
    with pytest.raises(EnvironmentProblemError, match="cannot be read"):
        run(source, "megatron", tmp_path / "out", allow_pickle=True)
    assert not witness.exists()


class Runs:
    """An object that writes a file when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.witness,)


def test_parity_check_without_memory_is_refused_before_writing(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(OutOfMemoryError, match="GiB are free"):
        run(model("qwen2"), "megatron", tmp_path / "out")
    assert not list(tmp_path.iterdir())
