"""A critic that starts from a reward model: its head computes the first values, and a model that does not fit is
rejected."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_lab as lab
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from convert.conftest import edit_json
from convert.test_conversion import run
from ppoctl.core.errors import EnvironmentProblemError, RecipeError
from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.engines.megatron.trainer import MegatronCritic
from ppoctl.models.model_tables import CriticModelTable
from ppoctl.models.shape_reader import read_shape
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe
from ppoctl.run.run_recipe import as_recorded
from ppoctl.start.preflight.check import check
from ppoctl.start.preflight.model_checks import require_own_model
from ppoctl.store import run_dir
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import MANIFEST, RunPaths
from recipe.conftest import SMALLEST

Model = Callable[[str], Path]


@pytest.fixture
def reward(model: Model, tmp_path: Path) -> Path:
    """Return a reward model built from "qwen2"."""
    torch.manual_seed(1)
    reward_model = AutoModelForSequenceClassification.from_pretrained(model("qwen2"), num_labels=1)
    with torch.no_grad():
        reward_model.score.weight.normal_()
    reward_model.save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def recipe(base: Path, critic: Path | str, folder: Path) -> Recipe:
    text = SMALLEST.replace('"base"', f'"{base}"\ndtype = "float32"\ncritic = "{critic}"')
    (folder / "r.toml").write_text(text, "utf-8")
    return load([folder / "r.toml"], environ={}).recipe


def opened(made_from: Recipe) -> MegatronCritic:
    return lab.unstarted(trainer_settings(made_from, "critic"))


def values(made_from: Recipe) -> torch.Tensor:
    critic = opened(made_from)
    critic.start()
    return critic.values(lab.make_rollouts())


def test_first_values_equal_the_reward_model_in_both_formats(model: Model, reward: Path, tmp_path: Path) -> None:
    run(reward, "megatron", tmp_path / "megatron")
    theirs = AutoModelForSequenceClassification.from_pretrained(reward).eval()
    rollouts = lab.make_rollouts()
    for start in (reward, tmp_path / "megatron"):
        actual = values(recipe(model("qwen2"), start, tmp_path))
        for row, sequence in enumerate(rollouts.unpadded()):
            prompt, length = int(rollouts.prompt_lengths[row]), int(rollouts.lengths[row])
            with torch.no_grad():
                hidden = theirs.model(input_ids=sequence[None]).last_hidden_state[0]
            expected = theirs.score(hidden)[prompt - 1 : prompt - 1 + length, 0]
            torch.testing.assert_close(actual[row, :length], expected.detach(), atol=1e-4, rtol=0)
        assert actual.abs().max() > 0.1


def test_only_the_critic_starts_from_the_reward_model(model: Model, reward: Path, tmp_path: Path) -> None:
    resolved = recipe(model("qwen2"), reward, tmp_path)
    assert [trainer_settings(resolved, role).model for role in ("actor", "critic")] == [
        str(model("qwen2")),
        str(reward),
    ]


def test_relative_critic_paths_are_resolved_and_hub_ids_kept(model: Model, reward: Path, tmp_path: Path) -> None:
    for written, path in (("reward", str(reward)), ("org/reward", "org/reward")):
        resolved = recipe(model("qwen2"), written, tmp_path)
        assert resolved.model.critic == CriticModelTable(path=path)
        table = [f"model.critic={{path='{written}', dtype='bfloat16'}}"]
        assert load([tmp_path / "r.toml"], table, {}).recipe.model.critic == CriticModelTable(
            path=str(Path(written).absolute()) if written == "reward" else path, dtype="bfloat16"
        )


def test_critic_of_another_family_and_size_trains_with_the_actor(model: Model, tmp_path: Path) -> None:
    """The head starts at zero; one step changes its values; it is saved and exported as a value head."""
    base, other = model("qwen2"), lab.model_folder("llama-small", tmp_path / "small")
    assert require_own_model("critic", str(other), str(base)) == [
        f"`model.critic.path` is `{other}`, which has no value head: the value head starts at zero"
    ]
    critic, rollouts = opened(recipe(base, other, tmp_path)), lab.make_rollouts()
    critic.start()
    assert not critic.values(rollouts).any()
    critic.update(rollouts, [lab.minibatch(rollouts)], lab.value_objective(rollouts))
    values = critic.values(rollouts)
    assert values.abs().max() > 0
    for folder in (tmp_path / "state", tmp_path / "exported"):
        folder.mkdir()
    lab.save(critic, tmp_path / "state")
    critic.export(tmp_path / "exported")
    for folder, is_state in ((tmp_path / "state", True), (tmp_path / "exported", False)):
        assert read_shape(folder) == read_shape(other)
        notes = require_own_model("critic", str(folder), str(base))
        assert ["its tokenizer is not compared" in note for note in notes] == [True] * is_state
        reopened = opened(recipe(base, folder, tmp_path))
        reopened.start()
        assert torch.equal(reopened.values(rollouts), values)


def test_saved_critic_starts_with_a_fresh_optimizer(model: Model, tmp_path: Path) -> None:
    """Two steps from the state equal two steps of a model with its weights, not those of a continued run."""
    base, rollouts = model("qwen2"), lab.make_rollouts()
    step = [lab.minibatch(rollouts)]
    first = lab.critic(base)
    first.update(rollouts, step, lab.value_objective(rollouts))
    for folder in (tmp_path / "state", tmp_path / "weights"):
        folder.mkdir()
    lab.save(first, tmp_path / "state")
    first.export(tmp_path / "weights")
    values_of = {}
    for name in ("state", "weights"):
        critic = opened(recipe(base, tmp_path / name, tmp_path))
        critic.start()
        critic.update(rollouts, step, lab.value_objective(rollouts))
        values_of[name] = critic.values(rollouts)
    first.update(rollouts, step, lab.value_objective(rollouts))
    assert torch.equal(values_of["state"], values_of["weights"])
    assert not torch.equal(values_of["state"], first.values(rollouts))


def test_critic_must_have_the_vocabulary_of_the_actor(model: Model, reward: Path, tmp_path: Path) -> None:
    base = shutil.copytree(model("qwen2"), tmp_path / "base")
    other = shutil.copytree(reward, tmp_path / "other")
    for folder, ids in ((base, {"a": 0, "b": 1}), (other, {"a": 0, "b": 1, "more": 2})):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}), "utf-8")
    assert require_own_model("critic", str(other), str(base)) == []
    added = {"model": {"vocab": [["a", 0.0], ["c", 0.0]]}, "added_tokens": [{"id": 7, "content": "b"}]}
    (other / "tokenizer.json").write_text(json.dumps(added), "utf-8")
    with pytest.raises(
        RecipeError, match=r"`model\.critic\.path` is `.*`, whose tokenizer maps `b` to `7`, .* maps it to `1`"
    ):
        require_own_model("critic", str(other), str(base))
    edit_json(other / "config.json", vocab_size=100)
    with pytest.raises(RecipeError, match=r"whose `vocab_size` is `100`, but `model\.path` has `101`"):
        require_own_model("critic", str(other), str(base))


def test_saved_critic_has_the_vocabulary_of_its_source_model(model: Model, reward: Path, tmp_path: Path) -> None:
    base, layout = shutil.copytree(model("qwen2"), tmp_path / "base"), RunPaths(tmp_path / "first")
    state = layout.state("critic", 2)
    run_dir.create(layout, recipe_toml="", resolved=as_recorded(recipe(base, reward, tmp_path)), facts={})
    state.parent.mkdir(parents=True, exist_ok=True)
    run(reward, "megatron", state, verify=False)
    rest: dict[str, Any] = {"inputs": (), "fingerprint": "", "files": {}, "seconds": 0.0, "committed_at": 0.0}
    (state / MANIFEST).write_text(Manifest("state/critic", 2, "abc", attempt=1, **rest).to_text(), "ascii")
    for folder, ids in ((base, {"a": 0, "b": 1}), (reward, {"a": 0, "b": 1})):
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}), "utf-8")
    assert require_own_model("critic", str(state), str(base)) == []
    (reward / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0, "a": 1}}}), "utf-8")
    with pytest.raises(RecipeError, match=r"whose tokenizer maps `a` to `1`, .* maps it to `0`"):
        require_own_model("critic", str(state), str(base))


def test_critic_with_a_shorter_context_is_refused(model: Model, reward: Path, tmp_path: Path) -> None:
    resolved = recipe(model("qwen2"), reward, tmp_path)

    def messages() -> list[str]:
        return [problem.what for problem in check(resolved, rows=False) if "window" in problem.what]

    edit_json(reward / "config.json", max_position_embeddings=33)  # 20 prompt tokens and 13 response tokens
    assert messages() == []
    edit_json(reward / "config.json", max_position_embeddings=32)
    assert [line.partition(" (")[0] for line in messages()] == ["a window of 33 tokens"]
    assert messages()[0].endswith("does not fit the critic's 32 positions")


def test_megatron_folder_of_an_actor_is_refused_as_a_critic(model: Model, tmp_path: Path) -> None:
    base, actor = model("qwen2"), tmp_path / "actor"
    run(base, "megatron", actor, verify=False)
    with pytest.raises(RecipeError, match="the weights of an actor in Megatron format") as caught:
        require_own_model("critic", str(actor), str(base))
    assert f"ppoctl convert-ckpt {actor} CRITIC --to hf" in str(caught.value.hint)
    (actor / "config.json").unlink()
    with pytest.raises(RecipeError, match=r"the folder has no config\.json"):
        require_own_model("critic", str(actor), str(base))


def test_reward_model_without_its_head_is_refused(model: Model, reward: Path) -> None:
    weights = load_file(reward / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if name != "score.weight"}, reward / "model.safetensors"
    )
    with pytest.raises(EnvironmentProblemError, match=r"tensor `score\.weight` missing"):
        require_own_model("critic", str(reward), str(model("qwen2")))


def test_reference_must_be_a_language_model_with_the_tokens_of_the_actor(
    model: Model, reward: Path, tmp_path: Path
) -> None:
    base, key = model("qwen2"), r"`model\.reference\.path` is `.*`, "
    other = shutil.copytree(base, tmp_path / "other")
    assert require_own_model("reference", str(other), str(base)) == []
    with pytest.raises(EnvironmentProblemError, match=r"tensor `lm_head\.weight` missing"):
        require_own_model("reference", str(reward), str(base))
    for start, name in ((base, "actor"), (reward, "critic")):
        run(start, "megatron", tmp_path / name, verify=False)
    assert len(require_own_model("reference", str(tmp_path / "actor"), str(base))) <= 1
    with pytest.raises(RecipeError, match=f"{key}which has the weights of a critic in Megatron format") as caught:
        require_own_model("reference", str(tmp_path / "critic"), str(base))
    assert caught.value.hint == "use the weights of an actor: a state in `states/actor` of a run"
    for folder, ids in ((tmp_path / "base", {"a": 0, "b": 1}), (other, {"b": 0, "a": 1})):
        shutil.copytree(base, folder, dirs_exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}), "utf-8")
    with pytest.raises(RecipeError, match=f"{key}whose tokenizer maps `a` to `1`, .* maps it to `0`") as caught:
        require_own_model("reference", str(other), str(tmp_path / "base"))
    assert str(caught.value.hint).endswith("omit the key: the reference then is the actor's initial model")


def test_problems_of_a_reference_are_found_before_anything_starts(model: Model, tmp_path: Path) -> None:
    resolved = recipe(model("qwen2"), model("qwen2"), tmp_path)
    keys = {"model": {**resolved.model.model_dump(), "reference": {"path": str(tmp_path / "gone")}}}
    found = check(Recipe.model_validate({**resolved.model_dump(by_alias=True), **keys}), rows=False)
    assert [problem.what for problem in found if "reference" in problem.what] == [
        f"`model.reference.path` is `{tmp_path / 'gone'}`: no such folder"
    ]
