"""A critic that starts from a reward model: its head at the first value, and what does not fit is refused by name."""

import shutil
from collections.abc import Callable
from pathlib import Path

import megatron_lab as lab
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from convert.conftest import edit_json
from convert.test_conversion import run
from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.ranks import ThisProcess
from ppoctl.engines.megatron.trainer import MegatronCritic
from ppoctl.errors import RecipeError
from ppoctl.preflight.model import require_critic
from ppoctl.recipe.load import load
from ppoctl.recipe.schema import Recipe
from recipe.conftest import SMALLEST

Model = Callable[[str], Path]


@pytest.fixture
def reward(model: Model, tmp_path: Path) -> Path:
    """A reward model made from "qwen2"."""
    torch.manual_seed(1)
    made = AutoModelForSequenceClassification.from_pretrained(model("qwen2"), num_labels=1)
    with torch.no_grad():
        made.score.weight.normal_()
    made.save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def recipe(base: Path, critic: Path | str, folder: Path) -> Recipe:
    text = SMALLEST.replace('"base"', f'"{base}"\ndtype = "float32"\ncritic = "{critic}"')
    (folder / "r.toml").write_text(text, "utf-8")
    return load([folder / "r.toml"], environ={}).recipe


def values(made_from: Recipe) -> torch.Tensor:
    settings = trainer_settings(made_from, "critic")
    critic = MegatronCritic(settings, ThisProcess(MegatronRank(settings)))
    critic.start()
    return critic.values(lab.make_rollouts())


def test_first_values_are_the_reward_models_in_either_format(model: Model, reward: Path, tmp_path: Path) -> None:
    run(reward, "megatron", tmp_path / "megatron")
    theirs = AutoModelForSequenceClassification.from_pretrained(reward).eval()
    rollouts = lab.make_rollouts()
    for start in (reward, tmp_path / "megatron"):
        found = values(recipe(model("qwen2"), start, tmp_path))
        for row, sequence in enumerate(rollouts.unpadded()):
            prompt, length = int(rollouts.prompt_lengths[row]), int(rollouts.lengths[row])
            with torch.no_grad():
                hidden = theirs.model(input_ids=sequence[None]).last_hidden_state[0]
            wanted = theirs.score(hidden)[prompt - 1 : prompt - 1 + length, 0]
            torch.testing.assert_close(found[row, :length], wanted.detach(), atol=1e-4, rtol=0)
        assert found.abs().max() > 0.1


def test_only_the_critic_starts_there(model: Model, reward: Path, tmp_path: Path) -> None:
    made = recipe(model("qwen2"), reward, tmp_path)
    assert [trainer_settings(made, role).model for role in ("actor", "critic")] == [str(model("qwen2")), str(reward)]


def test_paths_start_at_the_recipe_and_hub_ids_stay(model: Model, reward: Path, tmp_path: Path) -> None:
    assert recipe(model("qwen2"), "reward", tmp_path).model.critic == str(reward)
    assert recipe(model("qwen2"), "org/reward", tmp_path).model.critic == "org/reward"


def test_another_architecture_is_refused_by_name(model: Model, reward: Path, tmp_path: Path) -> None:
    require_critic(str(reward), str(model("qwen2")))
    other = shutil.copytree(reward, tmp_path / "other")
    edit_json(other / "config.json", num_key_value_heads=3)
    with pytest.raises(RecipeError, match=r"`model\.critic` is `.*`, whose `num_kv_heads` is `3`; .* is `2`"):
        require_critic(str(other), str(model("qwen2")))


def test_a_model_without_a_value_head_is_no_start_of_a_critic(model: Model) -> None:
    with pytest.raises(RecipeError, match=r"which has no value head \(`score\.weight`\)"):
        require_critic(str(model("qwen2")), str(model("qwen2")))
