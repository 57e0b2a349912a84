"""Adapters as peft writes and reads them: peft is the judge. States are written here, tensor by tensor."""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import megatron_lab as lab
import pytest
import torch
from lora_lab import peft_targets
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from convert.conftest import edit_json
from convert.test_conversion import run, same, weights
from ppoctl.core.errors import EnvironmentProblemError, PpoctlError, RecipeError, StorageError
from ppoctl.models import model as models
from ppoctl.models.convert.accounted_tensors import Accounted
from ppoctl.models.convert.adapters import adapters, added, merged
from ppoctl.models.convert.frozen_base import FrozenBase, read_frozen_base, write_frozen_base
from ppoctl.models.convert.frozen_digest import frozen_digest
from ppoctl.models.convert.hugging_face import open_weights
from ppoctl.models.convert.megatron_folder import checksums_of, open_megatron
from ppoctl.models.convert.model_files import Companions
from ppoctl.models.convert.peft_config import IGNORED, READ
from ppoctl.models.convert.peft_folder import PeftFolder, require_fits
from ppoctl.models.convert.tensors import OUTPUT_LAYER, VALUE_HEAD, frozen_names
from ppoctl.models.convert.torch_dist_writer import TorchDistWriter
from ppoctl.models.head import Head
from ppoctl.models.lora import Lora
from ppoctl.models.shape_reader import read_shape
from ppoctl.models.trainable import Trainable

Model = Callable[[str], Path]

ALL = Trainable(lora=Lora(3, 5.0))
ATTENTION = Trainable(lora=Lora(3, 5.0, ("q_proj", "o_proj")))
LOW_RANK = Trainable(lora=Lora(3, 5.0, ("q_a_proj", "kv_b_proj", "gate_proj")))
MLPS = Trainable(lora=Lora(3, 5.0, ("up_proj", "down_proj")))
FAMILIES = {
    "deepseek-v3": ALL,
    "qwen2-tied": ALL,
    "qwen2-moe": ALL,
    "qwen3-moe-mixed": MLPS,
    "llama": ALL,
    "mistral": ALL,
    "qwen3": ALL,
    "gemma2": ALL,
    "gemma3": ALL,
    "deepseek-v3-low-rank": LOW_RANK,
}
QUICK = 3
MARKS = [[], *[pytest.mark.ci("the first family")] * (QUICK - 1), *[pytest.mark.slow] * (len(FAMILIES) - QUICK)]
KINDS = [pytest.param(kind, marks=marks) for kind, marks in zip(FAMILIES, MARKS, strict=True)]


def random_matrices(base: Path, trainable: Trainable, seed: int = 3) -> dict[str, Tensor]:
    """Return matrices under peft's names without the prefix, none of which is zero."""
    generator = torch.Generator().manual_seed(seed)
    matrices = [one for each in adapters(read_shape(base), trainable) for one in (each.a, each.b)]
    return {one.name: 0.3 * torch.randn(one.shape, generator=generator) for one in matrices}


def state_of(
    base: Path,
    folder: Path,
    trainable: Trainable,
    matrices: dict[str, Tensor],
    head: Head = "token",
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the state of a role that trained adapters: the matrices, a value head, and moments."""
    shape = read_shape(base)
    folder.mkdir()
    with closing(TorchDistWriter(folder, 2**30)) as writer:
        for each in adapters(shape, trainable):
            for one in (each.a, each.b):
                writer.write(one.parameter, matrices[one.name].to(dtype))
                writer.write(f"optimizer.state.exp_avg.{one.parameter}", matrices[one.name])
        if head == "value":
            writer.write(OUTPUT_LAYER, matrices[VALUE_HEAD].to(dtype))
        writer.finish({})
    Companions(base, head, dtype).write_config(folder)
    source = Accounted(open_weights(base, allow_pickle=False), base, shape, head, dtype)
    digest = frozen_digest(checksums_of(source.tensor, frozen_names(models.Model(shape, head, trainable))))
    write_frozen_base(folder, FrozenBase(str(base), digest, trainable))
    return folder


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(1, 40)[None]).logits
        return found


def loaded(folder: Path) -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return found


def by_peft(base: Path, trainable: Trainable, folder: Path, **options: Any) -> tuple[PeftModel, Path]:
    """Return an adapter that peft made and saved, with random values."""
    lora = trainable.lora
    assert lora is not None
    plain = loaded(base)
    options = {**peft_targets(plain, lora), **options}
    dropout = 0.0 if options.get("target_parameters") else 0.25  # peft has none for weights
    torch.manual_seed(5)
    made = get_peft_model(plain, LoraConfig(r=lora.rank, lora_alpha=5, lora_dropout=dropout, **options)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    made.save_pretrained(folder)
    return made, folder


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_of_a_state_gives_the_logits_of_peft(model: Model, tmp_path: Path, kind: str) -> None:
    base, trainable = model(kind), FAMILIES[kind]
    state = state_of(base, tmp_path / "state", trainable, random_matrices(base, trainable))
    assert run(state, "peft", tmp_path / "peft")["verified"] is True
    run(state, "hf", tmp_path / "hf", parity=False)
    judge = PeftModel.from_pretrained(loaded(base), tmp_path / "peft").eval()
    expected, actual, start = logits(judge), logits(loaded(tmp_path / "hf")), logits(loaded(base))
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-5)
    assert (expected - start).abs().max() > 0.05
    ours, theirs = weights(tmp_path / "hf"), judge.merge_and_unload().state_dict()
    adapted = {each.base.name for each in adapters(read_shape(base), trainable)}
    for name, tensor in weights(base).items():
        assert torch.equal(ours[name], tensor) != (name in adapted), name
    for name in adapted:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_that_peft_wrote_is_read_and_written_without_loss(model: Model, tmp_path: Path, kind: str) -> None:
    base, trainable = model(kind), FAMILIES[kind]
    shape = read_shape(base)
    judge, folder = by_peft(base, trainable, tmp_path / "theirs")
    found = PeftFolder(folder)
    require_fits(found, trainable, shape, "token", "actor.train.lora")
    assert not found.has_head
    assert found.adapters(shape, "token") == adapters(shape, trainable)
    matrices = {name: found.tensor(name) for name in found.headers}
    for adapter in adapters(shape, trainable):
        theirs: Any = judge.get_submodule(f"base_model.model.{adapter.base.name.removesuffix('.weight')}")
        assert torch.equal(matrices[adapter.a.name], theirs.lora_A["default"].weight)
        assert torch.equal(matrices[adapter.b.name], theirs.lora_B["default"].weight)
        ours = added(matrices[adapter.a.name], matrices[adapter.b.name], 5 / 3)
        torch.testing.assert_close(ours, theirs.get_delta_weight("default"), rtol=0, atol=1e-6)
    state = state_of(base, tmp_path / "state", trainable, matrices)
    run(state, "peft", tmp_path / "ours")
    assert same(
        load_file(tmp_path / "ours/adapter_model.safetensors"), load_file(folder / "adapter_model.safetensors")
    )


def test_adapter_of_a_critic_has_its_value_head(model: Model, tmp_path: Path) -> None:
    base = model("qwen2")
    matrices = random_matrices(base, ALL) | {VALUE_HEAD: torch.linspace(-1, 2, 48)[None]}
    state = state_of(base, tmp_path / "state", ALL, matrices, "value")
    run(state, "peft", tmp_path / "peft")
    written = json.loads((tmp_path / "peft/adapter_config.json").read_text("utf-8"))
    assert (written["task_type"], written["modules_to_save"]) == ("SEQ_CLS", ["score"])
    run(state, "hf", tmp_path / "hf", parity=False)
    classes = AutoModelForSequenceClassification
    judge = PeftModel.from_pretrained(classes.from_pretrained(base, num_labels=1, pad_token_id=0), tmp_path / "peft")
    merged_model = classes.from_pretrained(tmp_path / "hf", pad_token_id=0).eval()
    torch.testing.assert_close(logits(merged_model), logits(judge.eval()), rtol=0, atol=2e-5)
    judge.save_pretrained(tmp_path / "again")
    found = PeftFolder(tmp_path / "again")
    require_fits(found, ALL, read_shape(base), "value", "critic.train.lora")
    assert torch.equal(found.tensor(VALUE_HEAD), matrices[VALUE_HEAD])
    with pytest.raises(EnvironmentProblemError, match=r"`score\.weight` of the adapter in .* is part of a critic"):
        require_fits(found, ALL, read_shape(base), "token", "actor.train.lora")


def test_frozen_projections_have_no_adapter_in_peft(model: Model, tmp_path: Path) -> None:
    """The modules are named in full, and a recipe without the pattern does not fit."""
    base = model("qwen2")
    trainable = Trainable(freeze=("decoder.layers.0.mlp.*",), lora=Lora(2, 8.0, ("v_proj", "up_proj")))
    state = state_of(base, tmp_path / "state", trainable, random_matrices(base, trainable))
    run(state, "peft", tmp_path / "peft")
    written = json.loads((tmp_path / "peft/adapter_config.json").read_text("utf-8"))
    expected = ["layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj", "layers.1.mlp.up_proj"]
    assert written["target_modules"] == [f"model.{name}" for name in expected]
    judge = PeftModel.from_pretrained(loaded(base), tmp_path / "peft")
    assert len([name for name, _ in judge.named_modules() if name.endswith("lora_A")]) == 3
    found, shape = PeftFolder(tmp_path / "peft"), read_shape(base)
    require_fits(found, trainable, shape, "token", "actor.train.lora")
    with pytest.raises(RecipeError, match=r"has no adapter for `model\.layers\.0\.mlp\.up_proj`") as raised:
        require_fits(found, Trainable(lora=trainable.lora), shape, "token", "actor.train.lora")
    assert "`actor.freeze`" in str(raised.value.hint)


def test_merged_weights_are_those_in_the_dtype_of_the_state(model: Model, tmp_path: Path) -> None:
    """Matrices and base are rounded to bfloat16, and their sum once."""
    base, matrices = model("qwen2"), random_matrices(model("qwen2"), ALL)
    state = state_of(base, tmp_path / "state", ALL, matrices, dtype=torch.bfloat16)
    run(state, "hf", tmp_path / "hf", parity=False)
    run(state, "peft", tmp_path / "peft")
    assert {tensor.dtype for tensor in load_file(tmp_path / "peft/adapter_model.safetensors").values()} == {
        torch.bfloat16
    }
    name, written = "model.layers.1.mlp.gate_proj", weights(tmp_path / "hf")
    a, b = (matrices[f"{name}.{each}.weight"].bfloat16() for each in ("lora_A", "lora_B"))
    weight = weights(base)[f"{name}.weight"].bfloat16()
    exact = weight.double() + 5 / 3 * b.double() @ a.double()
    assert torch.equal(written[f"{name}.weight"], merged(weight, a, b, 5 / 3))
    assert (written[f"{name}.weight"] != exact.bfloat16()).sum() <= 2  # a tie of two neighbours
    run(state, "peft", tmp_path / "cast", dtype="float32")
    cast = load_file(tmp_path / "cast/adapter_model.safetensors")
    assert torch.equal(cast[f"base_model.model.{name}.lora_A.weight"], a.float())


def test_state_on_a_state_with_adapters_has_both(model: Model, tmp_path: Path) -> None:
    base = model("qwen2")
    first = state_of(base, tmp_path / "first", ATTENTION, random_matrices(base, ATTENTION))
    run(first, "hf", tmp_path / "middle", parity=False)
    second = state_of(tmp_path / "middle", tmp_path / "second", ALL, random_matrices(base, ALL, seed=4))
    run(second, "hf", tmp_path / "expected", parity=False)
    frozen = read_frozen_base(second)
    assert frozen is not None
    write_frozen_base(second, FrozenBase(str(first), frozen.digest, ALL))
    run(second, "hf", tmp_path / "out", parity=False)
    assert same(weights(tmp_path / "out"), weights(tmp_path / "expected"))
    with pytest.raises(RecipeError, match="a Megatron folder, which peft cannot load") as raised:
        run(second, "peft", tmp_path / "peft")
    assert raised.value.hint == f"ppoctl convert-ckpt {first} base --to hf  # then add --like base"
    run(second, "peft", tmp_path / "peft", like=str(tmp_path / "middle"))
    written = json.loads((tmp_path / "peft/adapter_config.json").read_text("utf-8"))
    assert written["base_model_name_or_path"] == str(tmp_path / "middle")


def test_megatron_folder_of_a_state_is_merged(model: Model, tmp_path: Path) -> None:
    base = model("qwen2")
    state = state_of(base, tmp_path / "state", ALL, random_matrices(base, ALL))
    run(state, "megatron", tmp_path / "megatron")
    run(state, "hf", tmp_path / "hf", parity=False)
    run(tmp_path / "megatron", "hf", tmp_path / "again", parity=False)
    assert same(weights(tmp_path / "again"), weights(tmp_path / "hf"))


def test_checkpoint_without_adapters_is_not_an_adapter(model: Model, tmp_path: Path) -> None:
    base = model("qwen2")
    with pytest.raises(RecipeError, match=f"`{base}` has no adapters") as raised:
        run(base, "peft", tmp_path / "out")
    assert raised.value.hint == "write the whole model: --to hf"
    _, folder = by_peft(base, ATTENTION, tmp_path / "peft")
    for to in ("hf", "megatron", "peft"):
        with pytest.raises(RecipeError, match="is a peft adapter; `convert-ckpt` reads adapters only from") as raised:
            run(folder, to, tmp_path / "out")
    assert str(raised.value.hint).endswith(f"--set actor.train.lora.start={folder}")


def test_state_with_other_tensors_than_its_record_is_refused(model: Model, tmp_path: Path) -> None:
    base = model("qwen2")
    state = state_of(base, tmp_path / "state", ATTENTION, random_matrices(base, ATTENTION))
    frozen = read_frozen_base(state)
    assert frozen is not None
    assert frozen.adapters == ATTENTION
    others = {
        Lora(3, 5.0, ("q_proj",)): r"linear_proj\.adapters\.o_proj\.lora_A` is not of an adapter",
        Lora(3, 5.0, ("q_proj", "o_proj", "up_proj")): r"adapters\.up_proj\.lora_A` is missing",
        Lora(4, 5.0, ("q_proj", "o_proj")): r"q_proj\.lora_A` is of shape \[3, 48\], not \[4, 48\]",
    }
    for lora, words in others.items():
        write_frozen_base(state, FrozenBase(frozen.model, frozen.digest, Trainable(lora=lora)))
        with pytest.raises(StorageError, match=words):
            open_megatron(state, read_shape(base), "token")
    (state / "frozen.json").write_text(json.dumps({"model": "m", "digest": "0", "adapters": {"lora": {}}}), "utf-8")
    with pytest.raises(StorageError, match=r"frozen\.json` cannot be read"):
        read_frozen_base(state)


def test_changed_base_of_adapters_is_refused(model: Model, tmp_path: Path) -> None:
    state = state_of(model("qwen2"), tmp_path / "state", ALL, random_matrices(model("qwen2"), ALL))
    other = lab.with_scaled_weights(model("qwen2"), tmp_path / "other")
    for to in ("hf", "peft"):
        with pytest.raises(EnvironmentProblemError, match="have changed since then"):
            run(state, to, tmp_path / "out", like=str(other), parity=False)


# Settings and tensors for which an adapter folder is refused.

REFUSED: dict[str, Any] = {
    "use_dora": True,
    "use_rslora": True,
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "bias": "lora_only",
    "lora_bias": True,
    "fan_in_fan_out": True,
    "layers_to_transform": [1],
    "layers_pattern": "layers",
    "layer_replication": [[0, 2]],
    "exclude_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [1],
    "alora_invocation_tokens": [1],
    "use_qalora": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1},
    "monteclora_config": {"x": 1},
    "velora_config": {"x": 1},
}


def test_every_field_of_peft_is_decided() -> None:
    known = {field.name for field in fields(LoraConfig)}
    assert known == READ | IGNORED.keys() | REFUSED.keys()
    unset = vars(LoraConfig())
    assert all(unset[name] in (None, False, "none", {}) for name in REFUSED)


def test_adapter_with_another_setting_is_refused_by_the_name_of_the_setting(model: Model, tmp_path: Path) -> None:
    _, folder = by_peft(model("qwen2"), ATTENTION, tmp_path / "peft")
    file = folder / "adapter_config.json"
    plain = file.read_text("utf-8")

    def refused(name: str, value: Any) -> None:
        file.write_text(plain, "utf-8")
        edit_json(file, **{name: value})
        with pytest.raises(EnvironmentProblemError, match=f"`{name}` in `.*adapter_config.json` is"):
            PeftFolder(folder)

    cases = [*REFUSED.items(), ("peft_type", "IA3"), ("init_lora_weights", "pissa"), ("setting_of_a_later_peft", 1)]
    for name, value in cases:
        refused(name, value)
    file.write_text(plain, "utf-8")
    for changes in ({"r": 0}, {"r": True}, {"lora_alpha": "8"}, {"target_modules": "("}, {"target_modules": None}):
        edit_json(file, **changes)
        with pytest.raises(EnvironmentProblemError, match="is not the configuration of an adapter"):
            PeftFolder(folder)
        file.write_text(plain, "utf-8")
    edit_json(file, init_lora_weights="gaussian", lora_dropout=0.9, task_type="CAUSAL_LM")
    require_fits(PeftFolder(folder), ATTENTION, read_shape(model("qwen2")), "token", "actor.train.lora")


def test_targets_may_be_a_pattern_or_full_names(model: Model, tmp_path: Path) -> None:
    base, key = model("qwen2"), "actor.train.lora"
    pattern = r"model\.layers\.\d+\.(self_attn\.(q|o)_proj)"
    full = [f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1) for name in ("q_proj", "o_proj")]
    for number, targets in enumerate((pattern, full)):
        _, folder = by_peft(base, ATTENTION, tmp_path / str(number), target_modules=targets)
        require_fits(PeftFolder(folder), ATTENTION, read_shape(base), "token", key)
        with pytest.raises(RecipeError, match="targets"):
            require_fits(PeftFolder(folder), ALL, read_shape(base), "token", key)


def changed(name: str, tensor: Tensor | None) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(name, None)
        tensors.update({} if tensor is None else {name: tensor})

    return change


LAYER = "base_model.model.model.layers.1.self_attn"
DEFECTS = {
    "missing": (changed(f"{LAYER}.q_proj.lora_B.weight", None), "q_proj.lora_B.weight` .* is missing"),
    "shape": (changed(f"{LAYER}.o_proj.lora_A.weight", torch.ones(3, 47)), r"\[3, 47\], but the model .* \[3, 48\]"),
    "integers": (
        changed(f"{LAYER}.o_proj.lora_A.weight", torch.ones(3, 48).char()),
        "is I8, which cannot be trained",
    ),
    "other target": (changed(f"{LAYER}.k_proj.lora_A.weight", torch.ones(3, 48)), "module that has no adapter"),
    "head": (changed("base_model.model.lm_head.lora_A.weight", torch.ones(3, 48)), "`lm_head.lora_A.weight` of"),
    "bias": (changed(f"{LAYER}.q_proj.bias", torch.ones(48)), "self_attn.q_proj.bias` of the adapter"),
    "no prefix": (changed("model.norm.weight", torch.ones(48)), "is not named as peft names tensors"),
}


def test_defect_of_an_adapter_is_named(model: Model, tmp_path: Path) -> None:
    _, folder = by_peft(model("qwen2"), ATTENTION, tmp_path / "peft")
    file, shape = folder / "adapter_model.safetensors", read_shape(model("qwen2"))
    plain = load_file(file)

    def named(change: Callable[[dict[str, Tensor]], None], words: str) -> None:
        tensors = dict(plain)
        change(tensors)
        save_file(tensors, file)
        with pytest.raises(EnvironmentProblemError, match=words):
            PeftFolder(folder).adapters(shape, "token")

    for change, words in DEFECTS.values():
        named(change, words)
    save_file(plain, file)
    edit_json(folder / "adapter_config.json", modules_to_save=["lm_head"])
    with pytest.raises(EnvironmentProblemError, match=r"`lm_head` .* is trained whole"):
        PeftFolder(folder).adapters(shape, "token")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(EnvironmentProblemError, match="cannot be read"):
        PeftFolder(folder)
    file.rename(folder / "adapter_model.bin")
    with pytest.raises(EnvironmentProblemError, match="pickles are not read"):
        PeftFolder(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(PpoctlError, match="is not a peft adapter"):
        PeftFolder(folder)


def test_recipe_with_other_settings_is_refused_with_the_keys_that_fix_it(model: Model, tmp_path: Path) -> None:
    _, folder = by_peft(model("qwen2"), ATTENTION, tmp_path / "peft")
    shape = read_shape(model("qwen2"))
    with pytest.raises(RecipeError) as raised:
        require_fits(PeftFolder(folder), Trainable(lora=Lora(8, 32.0)), shape, "token", "actor.train.lora")
    assert raised.value.message == (
        f"`actor.train.lora.start` is `{folder}`, an adapter with rank `3` and alpha `5` and targets "
        '`["o_proj", "q_proj"]`, but `actor.train.lora.rank` is `8` and `actor.train.lora.alpha` is `32` and '
        "`actor.train.lora.targets` is `all-linear`"
    )
    assert raised.value.hint == (
        "--set actor.train.lora.rank=3 --set actor.train.lora.alpha=5 "
        '--set \'actor.train.lora.targets=["o_proj", "q_proj"]\''
    )
