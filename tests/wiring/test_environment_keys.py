"""An episode has the environment and the limits of the recipe, and its reward is read as the recipe sets."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_recipe
from fakes.job import BuiltStages, Witness, open_run
from ppoctl.core.batch.episodes import EnvironmentRow, Episode, EpisodeLimits, Observation, Past, ToolCall, Turn
from ppoctl.core.batch.prompts import Message
from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.errors import RecipeError
from ppoctl.core.user_functions import digest_of
from ppoctl.environments.environment_pool import EnvironmentPool
from ppoctl.recipe.call_format import call_format_of
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.steps import RunContext
from wiring.cases import holds

USERS = Path(__file__).parents[1] / "environments"
COUNTS = f"{USERS / 'users_environments.py'}:Counts"
WAITS = f"{USERS / 'users_environments.py'}:WaitsAsync"
TOOLS = {"kind": "tools", "tools": ["calculator"]}
LIMITS = {"turns": 4, "tokens": 40}
CALL = Turn("", (), (ToolCall("calculator", {"expression": "2 ** 300"}),))


def with_environment(environment: dict[str, Any], **changes: Any) -> Recipe:
    return fake_recipe(environment={**LIMITS, "workers": 1, **environment}, **changes)


def stages_of(folder: Path, recipe: Recipe) -> tuple[RunContext, Any]:
    """Return the context of a run on fakes, and its stages of step 1."""
    job = open_run(folder / "run", recipe, Witness()).job
    return job, BuiltStages(job, 1)


def episodes(folder: Path, recipe: Recipe) -> list[Episode]:
    """Return the episodes of step 1."""
    job, stages = stages_of(folder, recipe)
    rollouts = stages.rollout.run(job.states.initial["actor"], job.prompts(1))
    return [Episode.from_json(row) for row in rollouts.episodes]


def answer(environment: dict[str, Any], turn: Turn) -> tuple[str, float, bool]:
    """Return the text of the answer to a first turn, its reward, and whether the episode ends."""
    table = with_environment(environment).environment
    assert table is not None
    pool = EnvironmentPool(table)
    try:
        past = Past("key", EnvironmentRow("id", "?", (Message("user", "?"),), "7", {"level": 1}), 5)
        first = pool.open(past).result(timeout=60)
        assert isinstance(first, Observation)
        outcome = pool.step(replace(past, first=first), turn).result(timeout=60)
    finally:
        pool.shutdown()
    assert isinstance(outcome, Observation)
    return "".join(message.content for message in outcome.messages), outcome.reward, outcome.done


SUM = {"kind": "python", "path": "env:Sum"}
"""Table of the environments on fakes."""
LONG = {"prompts_per_step": 12, "samples_per_prompt": 2, "max_prompt_tokens": 4, "max_new_tokens": 30}


@holds("environment.turns", "environment.tokens", "environment.tokens_per_turn")
def test_episodes_end_at_the_limits_of_the_recipe(tmp_path: Path) -> None:
    def most(name: str, **limits: int) -> tuple[int, int, int]:
        """Return the largest numbers of turns, of tokens of an episode, and of tokens of a turn."""
        recipe = with_environment({**SUM, **limits}, rollout=LONG)
        of_turns = [episode.turns for episode in episodes(tmp_path / name, recipe)]
        return (
            max(map(len, of_turns)),
            max(sum(turn.generated + turn.observed for turn in turns) for turns in of_turns),
            max(turn.generated for turns in of_turns for turn in turns),
        )

    turns, tokens, in_turn = most("free")
    assert (turns > 2, tokens > 9, in_turn > 2) == (True, True, True)
    assert most("turns", turns=2)[0] == 2
    assert most("tokens", tokens=9)[1] == 9
    assert most("per turn", tokens_per_turn=2)[2] == 2


def test_evaluations_have_the_environment_of_their_own_table(tmp_path: Path) -> None:
    for name, table in {
        "own": {**SUM, "turns": 2, "tokens": 12, "tokens_per_turn": 3}, "same": None, "none": {"kind": "none"},
    }.items():  # fmt: skip
        evaluation = {"every_steps": 1, "environment": table}
        recipe = with_environment(SUM, rollout=LONG, eval=evaluation)
        assert (recipe.environment_of("train"), recipe.environment_of("eval.held")) == (
            recipe.environment, recipe.eval_environment
        )  # fmt: skip
        _, stages = stages_of(tmp_path / name, recipe)
        assert stages.rollout.episodes.limits == EpisodeLimits(4, 40)
        limits = None if stages.eval.episodes is None else stages.eval.episodes.limits
        assert limits == {"own": EpisodeLimits(2, 12, 3), "same": EpisodeLimits(4, 40), "none": None}[name]


@holds("environment.on_failure.score")
@pytest.mark.parametrize("score", [None, -3.0])
def test_failed_episodes_have_the_score_of_the_recipe(tmp_path: Path, score: float | None) -> None:
    reward = {"kind": "exact_match", "max_error_frac": 0.99}
    table = {**SUM, "on_failure": {"score": score}}
    job, stages = stages_of(tmp_path, with_environment(table, rollout=LONG, reward=reward))
    rollouts = stages.rollout.run(job.states.initial["actor"], job.prompts(1))
    rewards = stages.reward.run(job.prompts(1), rollouts)
    failed = [Episode.from_json(row).is_failed for row in rollouts.episodes]
    assert 0 < sum(failed) < len(failed)
    assert {rewards.scores[row].item() for row, is_failed in enumerate(failed) if is_failed} == {score or 0.0}
    assert rewards.valid.tolist() == [score is not None or not is_failed for is_failed in failed]


@holds("environment.kind", "environment.path", "environment.options.*")
def test_python_environment_is_created_with_the_options_of_the_recipe() -> None:
    python = {"kind": "python", "path": COUNTS}
    text, reward, is_done = answer({**python, "options": {"most": 2}}, Turn("abc"))
    assert text == "turn 1, total 8, tokens (), calls 0"
    assert (reward, is_done) == (0.25, False)
    assert answer({**python, "options": {"most": 1}}, Turn("abc"))[1:] == (0.25, True)
    assert answer({"kind": "python", "path": WAITS}, Turn("abc")) == ("", 2, True)
    assert answer(TOOLS, Turn("abc")) == ("", 0, True)


@holds("environment.tools", "environment.answer_chars", "environment.sandbox")
def test_tools_answer_with_the_settings_of_the_recipe() -> None:
    whole, _, _ = answer(TOOLS, CALL)
    short, _, _ = answer({**TOOLS, "answer_chars": 40}, CALL)
    other, _, _ = answer({**TOOLS, "tools": [f"{USERS / 'users_tools.py'}:slow_sum"]}, CALL)
    assert whole == str(2**300)
    assert short != whole
    assert "calculator" in other
    assert other not in (whole, short)
    specs = [
        with_environment({**TOOLS, "tools": ["python"], "sandbox": sandbox}).environment
        for sandbox in ("namespaces", "user")
    ]
    assert [table.answers_by.options["sandbox"] for table in specs if table is not None] == ["namespaces", "user"]


@holds("environment.field")
@pytest.mark.parametrize(("field", "expected"), [({}, "a"), ({"field": "env"}, "b")])
def test_row_has_the_environment_of_its_field(field: dict[str, str], expected: str) -> None:
    cases = {name: {"kind": "python", "path": f"env:{name}"} for name in "ab"}
    table = with_environment({"kind": "choose", "cases": cases, **field}).environment
    assert table is not None
    chosen: Any = table.of_row({"environment": "a", "env": "b"})
    assert chosen.path == f"env:{expected}"


@holds("environment.digest", "environment.digests.*")
def test_environment_with_another_digest_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine: pass\n")
    name = f"{file}:Mine"
    for noted in (digest_of(name), "0" * 64):
        for table in (
            {"kind": "python", "path": name, "digest": noted},
            {"kind": "tools", "tools": [name], "digests": {name: noted}},
        ):
            environment = with_environment(table).environment
            assert environment is not None
            if noted == digest_of(name):
                environment.require_there()
                continue
            with pytest.raises(RecipeError, match="has changed"):
                environment.require_there()


@holds("environment.call_format")
@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_engine_parses_calls_in_the_format_of_the_recipe(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|python_tag|>"}]}')
    assert call_format_of(with_environment({**TOOLS, "call_format": name}), tmp_path) == name


@holds("reward.per_turn")
@pytest.mark.parametrize(("per_turn", "values"), [(False, None), (True, (0.0, 0.5, 0.0, 0.25))])
def test_rewards_of_turns_are_placed_as_the_recipe_sets(*, per_turn: bool, values: Any) -> None:
    request = ScoreRequest(
        "a", "", (), "", None, {}, "terminated", (1, 2, 3, 4), turn_spans=((0, 2), (3, 4)), turn_rewards=(0.5, 0.25)
    )
    recipe = fake_recipe(reward={"kind": "environment", "per_turn": per_turn})
    with closing(recipe.reward.open()) as scorer:
        score = scorer.submit(request).result()
    assert (score.value, score.token_values) == (0.75, values)
