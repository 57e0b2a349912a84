"""A reward scores as its table says, by the function that its child processes run."""

from importlib import import_module
from typing import Any

import pytest

from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.table import ProcessReward
from rewards.asking import request
from wiring.bench import with_keys
from wiring.cases import holds

EXACT = {"kind": "exact_match"}
GSM8K = {"kind": "gsm8k"}


def score(reward: dict[str, Any], response: str, truth: str) -> float:
    table = Recipe.model_validate(with_keys({"reward": reward})).reward
    assert isinstance(table, ProcessReward)
    module, _, name = table.scores_by.entry.partition(":")
    scored = getattr(import_module(module), name)(request(response, truth), **table.scores_by.options)
    return float(scored.value)


@holds("reward.kind", "reward.strict", "reward.ignore_case")
@pytest.mark.parametrize(
    ("reward", "response", "truth", "told"),
    [
        (EXACT, "Paris ", "Paris", 1.0),
        (EXACT, "thus #### 4", "4", 0.0),
        (GSM8K, "thus #### 4", "4", 1.0),
        (EXACT, "paris", "Paris", 0.0),
        ({**EXACT, "ignore_case": True}, "paris", "Paris", 1.0),
        (GSM8K, "it is 4", "4", 0.0),
        ({**GSM8K, "strict": False}, "it is 4", "4", 1.0),
        ({**GSM8K, "strict": True}, "it is 4", "4", 0.0),
    ],
)
def test_a_response_is_scored_by_the_kind_and_the_reading_of_the_recipe(
    reward: dict[str, Any], response: str, truth: str, told: float
) -> None:
    assert score(reward, response, truth) == told
