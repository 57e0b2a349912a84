"""Saved states of partly trained roles contain only what trained; the model that the role started from completes
them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from convert.test_conversion import run, same, weights
from convert.test_critic_start import opened, recipe
from ppoctl.algorithms.role_table import BySequences
from ppoctl.core.errors import EnvironmentProblemError, StorageError
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.trainer import MegatronCritic, MegatronTrainer
from ppoctl.models.convert.frozen_base import FROZEN_FILE
from ppoctl.models.convert.torch_dist import TorchDist
from ppoctl.models.trainable import Trainable
from ppoctl.start.preflight.model_checks import require_own_model

Model = Callable[[str], Path]


def trained(
    base: Path, role: str = "actor", trainable: Trainable | None = None, dtype: torch.dtype = torch.float32
) -> MegatronTrainer:
    """Return a trainer after three steps of the last layer, or of another part."""
    batching = BySequences(microbatch_seqs=2, logits_chunk_tokens=5)
    chosen = trainable or Trainable(top_layers=1)
    made = lab.started(TrainerSettings(role, str(base), dtype, batching, trainable=chosen))
    rollouts = lab.make_rollouts()
    objective = lab.policy_objective(rollouts) if role == "actor" else lab.value_objective(rollouts)
    for _ in range(3):
        made.update(rollouts, [lab.minibatch(rollouts)], objective)
    return made


def saved(trainer: MegatronTrainer, folder: Path) -> Path:
    folder.mkdir(parents=True)
    lab.save(trainer, folder)
    assert (folder / FROZEN_FILE).is_file()
    return folder


def exported(trainer: MegatronTrainer, folder: Path) -> dict[str, Tensor]:
    folder.mkdir()
    trainer.save_weights(folder)
    return weights(folder)


def with_change(base: Path, copy: Path, name: str) -> Path:
    """Copy a model folder, and change one number of one tensor by the least amount."""
    shutil.copytree(base, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors[name].view(-1).view(torch.int32)[3] ^= 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


@pytest.mark.parametrize(
    "kind",
    [
        "qwen2-tied",
        *(pytest.param(kind, marks=pytest.mark.ci("qwen2-tied")) for kind in ("qwen3-moe", "deepseek-v3")),
    ],
)
def test_converted_state_equals_the_export(model: Model, tmp_path: Path, kind: str) -> None:
    """Bit for bit, and in the logits of transformers; through a complete Megatron folder too."""
    base = model(kind)
    actor = trained(base)
    state, expected = saved(actor, tmp_path / "state"), exported(actor, tmp_path / "export")
    assert not any("word_embeddings" in key or "layers.0." in key for key in TorchDist(state).tensors)
    report = run(state, "hf", tmp_path / "hf")
    assert report["verified"] is True
    assert same(weights(tmp_path / "hf"), expected)
    assert not same(expected, weights(base))
    run(state, "megatron", tmp_path / "megatron", parity=False)
    assert not (tmp_path / "megatron" / FROZEN_FILE).exists()
    run(tmp_path / "megatron", "hf", tmp_path / "again", verify=False)
    assert same(weights(tmp_path / "again"), expected)
    ids = torch.arange(1, 30)[None]
    logits = [AutoModelForCausalLM.from_pretrained(tmp_path / name)(ids).logits for name in ("hf", "export")]
    assert torch.equal(*logits)


def test_frozen_weights_are_cast_to_the_dtype_of_the_state(model: Model, tmp_path: Path) -> None:
    actor = trained(model("qwen2"), dtype=torch.bfloat16)
    run(saved(actor, tmp_path / "state"), "hf", tmp_path / "hf", parity=False)
    found = weights(tmp_path / "hf")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert same(found, exported(actor, tmp_path / "export"))


def test_changed_or_missing_base_is_refused_with_the_option_that_names_it(model: Model, tmp_path: Path) -> None:
    base = shutil.copytree(model("qwen2"), tmp_path / "base")
    actor = trained(base)
    state, expected = saved(actor, tmp_path / "state"), exported(actor, tmp_path / "export")
    moved = base.rename(tmp_path / "moved")
    hint = f"ppoctl convert-ckpt {state} trained --to hf --like FOLDER"
    with pytest.raises(EnvironmentProblemError, match=f"those of `{base}`, which is not on this machine") as gone:
        run(state, "hf", tmp_path / "hf")
    assert hint in str(gone.value.hint)
    run(state, "hf", tmp_path / "hf", like=str(moved))
    assert same(weights(tmp_path / "hf"), expected)
    with_change(moved, base, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(EnvironmentProblemError, match=f"the weights in `{base}` have changed since then") as changed:
        run(state, "hf", tmp_path / "other")
    assert hint in str(changed.value.hint)
    shutil.rmtree(base)
    with_change(moved, base, "model.layers.1.mlp.up_proj.weight")  # which the state replaces
    run(state, "hf", tmp_path / "other", parity=False)
    assert same(weights(tmp_path / "other"), expected)


def test_critic_starts_from_a_state_without_frozen_weights(model: Model, tmp_path: Path) -> None:
    """Its base is a language model, whose output layer the value head replaces."""
    base = shutil.copytree(model("qwen2"), tmp_path / "base")
    first = trained(base, "critic")
    assert isinstance(first, MegatronCritic)
    state = saved(first, tmp_path / "state")
    assert require_own_model("critic", str(state), str(base)) != []
    second = opened(recipe(model("qwen2"), state, tmp_path))
    second.start()
    assert same(lab.weights_of(second), lab.weights_of(first))
    assert lab.weights_of(first)["score.weight"].any()
    run(state, "hf", tmp_path / "hf")
    assert same(weights(tmp_path / "hf"), exported(first, tmp_path / "export"))
    base.rename(tmp_path / "moved")
    with pytest.raises(EnvironmentProblemError, match="which is not on this machine"):
        require_own_model("critic", str(state), str(model("qwen2")))
    with_change(tmp_path / "moved", base, "model.embed_tokens.weight")
    with pytest.raises(EnvironmentProblemError, match="have changed since then"):
        opened(recipe(model("qwen2"), state, tmp_path)).start()


def test_state_whose_base_is_such_a_state_is_completed_by_both(model: Model, tmp_path: Path) -> None:
    base = model("qwen2")
    first = saved(trained(base, trainable=Trainable(freeze=("decoder.*", "embedding.*"))), tmp_path / "first")
    actor = trained(first)
    second = saved(actor, tmp_path / "second")
    run(second, "hf", tmp_path / "hf", like=None)
    assert same(weights(tmp_path / "hf"), exported(actor, tmp_path / "export"))


def test_unreadable_record_of_the_base_is_named(model: Model, tmp_path: Path) -> None:
    state = saved(trained(model("qwen2")), tmp_path / "state")
    (state / FROZEN_FILE).write_text('{"model": 1}', "utf-8")
    with pytest.raises(StorageError, match=r"frozen\.json` cannot be read"):
        run(state, "hf", tmp_path / "hf")
