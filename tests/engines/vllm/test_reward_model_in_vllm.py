"""A reward model in vLLM scores as transformers and the Megatron path do, next to an engine that generates."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.engines.vllm.pooling import PoolingEngine, PoolingSettings
from ppoctl.recipe.schema import Recipe
from ppoctl.run.wire.engines import place_roles
from ppoctl.run.wire.reward_models import RewardModelsOf, settings_of
from rewards.asking import request
from rewards.reward_models import reward_model
from wiring.harness import with_keys

pytestmark = pytest.mark.engines

WEIGHTS = "model.safetensors"
TEXTS = [(5, 9, 2, 77, 31), (8,), (3, 3, 60, 14, 2, 2, 90, 41, 17), (64, 12)] * 33
"""More than the engine reads in one step."""


def recipe(folder: Path, **keys: Any) -> Recipe:
    reward = {"kind": "model", "path": str(folder), "dtype": "float32", "max_tokens": 200, **keys}
    return Recipe.model_validate(with_keys({"reward": reward}))


def logits(folder: Path) -> torch.Tensor:
    """Return transformers' logits. [text label]"""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([text])).logits for text in TEXTS])


@pytest.fixture
def engine_of() -> Iterator[Callable[[Recipe], PoolingEngine]]:
    made: list[PoolingEngine] = []

    def engine(of: Recipe) -> PoolingEngine:
        settings = settings_of(of, ("reward",))
        assert isinstance(settings, PoolingSettings)
        made.append(PoolingEngine(settings))
        made[-1].start()
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.mark.usefixtures("tied")  # a generating engine in the same process
def test_vllm_scores_match_transformers_and_keep_rng_state(
    tmp_path: Path, engine_of: Callable[[Recipe], PoolingEngine]
) -> None:
    folder = reward_model(tmp_path / "judge")
    for other in ("old.safetensors", "consolidated.safetensors"):  # transformers reads neither
        save_file({name: 2 * tensor for name, tensor in load_file(folder / WEIGHTS).items()}, folder / other)
    engine, random = engine_of(recipe(folder, engine="vllm")), torch.random.get_rng_state()
    torch.testing.assert_close(torch.tensor(engine.scores(TEXTS)), logits(folder)[:, 0], atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.random.get_rng_state(), random)


def test_vllm_score_is_probability_of_named_label(
    tmp_path: Path, engine_of: Callable[[Recipe], PoolingEngine]
) -> None:
    folder = reward_model(tmp_path / "judge", "bad", "fair", "good")
    found = engine_of(recipe(folder, engine="vllm", label="fair")).scores(TEXTS)
    torch.testing.assert_close(torch.tensor(found), logits(folder).softmax(1)[:, 1], atol=1e-5, rtol=1e-5)


@pytest.mark.ci("test_vllm_scores_match_transformers_and_keep_rng_state")
def test_vllm_score_of_response_matches_megatron(tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "judge")
    score_requests: list[ScoreRequest] = [request(f"{n} + 1 = {n + 1}", "2") for n in range(5)]

    def scores(engine: str) -> list[float | None]:
        of = recipe(folder, engine=engine, template="text")
        placed = place_roles(of)
        scorer = of.reward.open(RewardModelsOf(of, placed.rewards))
        futures = [scorer.submit(each) for each in score_requests]
        found = [future.result().value for future in futures]
        placed.close()
        return found

    megatron = scores("megatron")
    assert len(set(megatron)) == len(score_requests)
    assert scores("vllm") == pytest.approx(megatron, abs=1e-4)


def test_unloadable_reward_model_error_names_recipe_key(tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "judge")
    settings = settings_of(recipe(folder, engine="vllm"), ("reward",))
    assert isinstance(settings, PoolingSettings)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(EnvironmentProblemError, match=r"vLLM could not start with `reward\.path`"):
        PoolingEngine(settings).start()
