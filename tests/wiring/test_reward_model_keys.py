"""Keys of a reward model: what it reads, what it is built from, and which of its outputs is the score."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ppoctl.core.batch.prompts import Message
from ppoctl.core.ports import TokenOutputs
from ppoctl.engines.megatron.factory import reward_settings
from ppoctl.engines.megatron.microbatches import RankOutputs
from ppoctl.engines.vllm.pooling import PoolingSettings
from ppoctl.recipe.schema import Recipe
from ppoctl.run.wire.reward_models import RewardModelsOf, settings_of
from rewards.asking import request
from rewards.reward_models import reward_model
from wiring.cases import holds
from wiring.harness import with_keys

CHAT = (Message("user", "1 + 1?"),)


class Counting:
    """Ranks whose score is the number of tokens; they record their calls."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def call(self, method: str, *arguments: Any) -> Sequence[Any]:
        self.called.append(method)
        if method == "scores":
            return [[float(len(text)) for text in arguments[0]]]
        if method != "reference_forward":
            return [None]
        lengths = arguments[0].prompt_lengths
        return [RankOutputs(torch.arange(len(lengths)), TokenOutputs(lengths.float()[:, None]))]

    def weights(self) -> Any:
        raise NotImplementedError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return reward_model(tmp_path / "judge", "bad", "good")


def recipe(folder: Path, **keys: Any) -> Recipe:
    reward = {"kind": "model", "path": str(folder), "label": "good", **keys}
    return Recipe.model_validate(with_keys({"reward": reward}))


def scored(of: Recipe, response: str) -> tuple[float | None, str]:
    """Return the score of the response to `1 + 1?`, and the message if it has none."""
    scorer = of.reward.open(RewardModelsOf(of, {"reward": Counting()}))
    score_request = replace(request(response, "2"), prompt="Q: 1 + 1? A:", messages=CHAT)
    score = scorer.submit(score_request).result()
    return score.value, score.message


@holds("reward.template", "reward.max_tokens")
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (15.0, "")),
        ({"template": "text"}, (18.0, "")),
        ({"max_tokens": 15}, (15.0, "")),
        ({"max_tokens": 14}, (None, "the text for the reward model has 15 tokens, more than 14")),
    ],
)
def test_reward_model_input_follows_the_recipe(
    folder: Path, keys: dict[str, Any], expected: tuple[float | None, str]
) -> None:
    assert scored(recipe(folder, **keys), "So it is 2") == expected


@holds("reward.path", "reward.label", "reward.dtype")
def test_reward_model_settings_follow_the_recipe(folder: Path, tmp_path: Path) -> None:
    settings = reward_settings(recipe(folder), ("reward",))
    assert (settings.model, settings.label, settings.dtype) == (str(folder), "good", torch.bfloat16)
    other = reward_model(tmp_path / "other", "bad", "good")
    keys = {"path": str(other), "label": "bad", "dtype": "float32"}
    settings = reward_settings(recipe(folder, **keys), ("reward",))
    assert (settings.model, settings.label, settings.dtype) == (str(other), "bad", torch.float32)


def test_reward_model_is_loaded_once_at_the_first_score(folder: Path) -> None:
    ranks, of = Counting(), recipe(folder)
    scorer = of.reward.open(RewardModelsOf(of, {"reward": ranks}))
    for response in ("2", "3"):
        assert ranks.called == ["start_frozen", "reference_forward"] * (response == "3")
        scorer.submit(replace(request(response, "2"), messages=CHAT)).result()
    assert ranks.called == ["start_frozen", "reference_forward", "reference_forward"]


def test_each_part_of_a_sum_has_its_own_model(folder: Path) -> None:
    parts = {
        "text": {"kind": "model", "path": str(folder), "label": "good", "template": "text"},
        "own": {"kind": "model", "path": str(folder), "label": "good", "weight": -1.0},
    }
    of = Recipe.model_validate(with_keys({"reward": {"kind": "sum", "parts": parts}}))
    ranks = {f"reward.parts.{name}": Counting() for name in parts}
    scorer = of.reward.open(RewardModelsOf(of, ranks))
    score = scorer.submit(replace(request("So it is 2", "2"), prompt="Q: 1 + 1? A:", messages=CHAT))
    assert not any(each.called for each in ranks.values())
    scorer.flush()
    found = score.result(timeout=0)
    assert (found.value, found.extras) == (3.0, {"text": 18.0, "own": 15.0})


@holds("reward.engine", "reward.label", "reward.dtype", "reward.max_tokens")
def test_vllm_runs_the_reward_model_if_the_recipe_says_so(folder: Path) -> None:
    keys = {"engine": "vllm", "dtype": "float32", "max_tokens": 77}
    of = Recipe.model_validate(with_keys({"reward": recipe(folder, **keys).reward.model_dump()}))
    settings = settings_of(of, ("reward",))
    assert isinstance(settings, PoolingSettings)
    engine = settings.engine
    assert (settings.role, settings.label, settings.step_tokens) == ("reward", 1, 8192)
    assert (engine.model, engine.dtype, engine.max_model_len, engine.sleeps) == (str(folder), "float32", 77, False)
    assert engine.key == "reward.path"
    ranks = Counting()
    scorer = of.reward.open(RewardModelsOf(of, {"reward": ranks}))
    score_request = replace(request("So it is 2", "2"), messages=CHAT)
    assert scorer.submit(score_request).result().value == 15.0
    assert ranks.called == ["start", "scores"]


def test_vllm_reward_cache_fits_one_scoring_step(folder: Path) -> None:
    """2 x 64 channels of keys and values x 4 layers x 4 bytes, for 8,192 tokens and one block for each of 64
    texts."""
    settings = settings_of(recipe(folder, engine="vllm", dtype="float32"), ("reward",))
    assert isinstance(settings, PoolingSettings)
    assert settings.cache_bytes == 2 * 64 * 4 * 4 * (8192 + 64 * 128)
