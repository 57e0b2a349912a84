"""Plan of a recipe with an environment: windows, records and processes are those of episodes."""

from typing import Any

import pytest

from fakes.components import fake_recipe
from ppoctl.algorithms.choose import trace_at
from ppoctl.algorithms.sizes import environment_processes, generator_window, longest_sequence
from ppoctl.plan.algorithm import algorithm
from ppoctl.plan.memory.assumptions import TEXT_BYTES_PER_TOKEN
from ppoctl.plan.memory.driver import batch_of, records_of
from ppoctl.plan.run_plan import plan
from ppoctl.recipe.schema import Recipe

TOOLS = {"kind": "tools", "tools": ["calculator"], "turns": 3, "tokens": 17, "tokens_per_turn": 5, "workers": 2}


def with_environment(**changes: Any) -> Recipe:
    """Return a recipe of 8 sequences, prompts of at most 4 tokens and at most 6 generated tokens."""
    return fake_recipe(**{"environment": TOOLS, **changes})


def test_window_has_all_tokens_of_an_episode() -> None:
    recipe = with_environment(eval={"environment": {**TOOLS, "tokens": 19}})
    assert (longest_sequence(recipe), generator_window(recipe)) == (4 + 17 - 1, 4 + 19)
    batch = plan(recipe).batch
    assert (batch.window_tokens, batch.tokens_per_step_max) == (21, 8 * 21)
    assert batch.new_tokens_per_step_max == 8 * 6
    one_turn = fake_recipe()
    assert (longest_sequence(one_turn), generator_window(one_turn)) == (9, 10)


def test_records_have_all_tokens_and_the_texts_of_episodes() -> None:
    def rollouts(recipe: Recipe) -> int:
        return records_of(trace_at(recipe, 1), recipe, batch_of(recipe))["rollout"]

    per_token, fixed = 4 + 1 + 4 + TEXT_BYTES_PER_TOKEN, 8 * (4 * 4 + 8 * 4)
    assert rollouts(fake_recipe()) == 8 * 6 * per_token + fixed
    assert rollouts(with_environment()) == 8 * 17 * (per_token + TEXT_BYTES_PER_TOKEN) + fixed


@pytest.mark.parametrize(
    ("eval_environment", "processes"),
    [
        (None, 2),
        (TOOLS, 2),
        ({**TOOLS, "workers": 3}, 5),
        ({"kind": "none"}, 2),
        ({**TOOLS, "kind": "choose", "field": "source", "tools": None}, 2 + 4 + 1),
    ],
)
def test_processes_of_environments_are_counted_once(eval_environment: Any, processes: int) -> None:
    if eval_environment is not None and eval_environment["kind"] == "choose":
        python = {"kind": "python", "path": "env:Counts", "workers": 4}
        single = {"kind": "tools", "tools": ["python"], "workers": 1}
        eval_environment = {"kind": "choose", "turns": 2, "tokens": 9, "cases": {"a": python, "b": single}}
    recipe = with_environment(eval={"environment": eval_environment})
    assert environment_processes(recipe) == processes
    assert environment_processes(fake_recipe()) == 0


def test_description_names_the_limits_of_episodes() -> None:
    recipe = with_environment()
    assert algorithm(recipe)["environment"] == (
        "tools: at most 3 turns of at most 5 tokens, 17 tokens with observations"
    )
    assert recipe.environment is not None
    free = recipe.model_copy(update={"environment": recipe.environment.model_copy(update={"tokens_per_turn": None})})
    assert algorithm(free)["environment"] == "tools: at most 3 turns, 17 tokens with observations"
    assert "environment" not in algorithm(fake_recipe())
