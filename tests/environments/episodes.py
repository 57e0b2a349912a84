"""Pasts of episodes for tests, pools of the test environments, and helpers that run them."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ppoctl.core.batch.episodes import EnvironmentRow, Observation, Outcome, Past, ToolCall, Turn
from ppoctl.core.batch.prompts import Json, Message
from ppoctl.environments.environment_kinds import KINDS
from ppoctl.environments.environment_pool import EnvironmentPool
from ppoctl.environments.environment_table import EpisodeTable

PYTHON, TOOLS, CHOOSE = KINDS
ENVIRONMENTS = Path(__file__).parent / "users_environments.py"
USERS_TOOLS = Path(__file__).parent / "users_tools.py"


def python_table(name: str, **keys: Any) -> EpisodeTable:
    """Return a table that names one of the test environments."""
    return PYTHON(kind="python", path=f"{ENVIRONMENTS}:{name}", turns=3, tokens=99, **keys)


def tools_table(*tools: str, **keys: Any) -> EpisodeTable:
    """Return a table with tools; `:name` is a tool of the test file."""
    named = [f"{USERS_TOOLS}{tool}" if tool.startswith(":") else tool for tool in tools]
    return TOOLS(kind="tools", tools=named, turns=3, tokens=99, **keys)


def past(key: str = "a", truth: str | None = "start", *, seed: int = 5, **fields: Json) -> Past:
    """Return the past of an episode that has not been opened."""
    row = EnvironmentRow(f"train/{key}", "<q>", (Message("user", "how?"),), truth, {"level": 3, **fields})
    return Past(key, row, seed)


def turn(text: str, *calls: ToolCall) -> Turn:
    """Return a turn with one token for each of the first thousand characters."""
    return Turn(text, tuple(range(min(len(text), 1000))), calls)


def outcome_of(future: Future[Outcome]) -> Outcome:
    """Return the outcome of a call within a minute."""
    return future.result(timeout=60)


def opened(pool: EnvironmentPool, start: Past) -> Past:
    """Open an episode, and return its past with the first observation."""
    first = outcome_of(pool.open(start))
    assert isinstance(first, Observation), first
    return Past(start.key, start.row, start.seed, first)


def after(pool: EnvironmentPool, before: Past, *texts: str) -> Past:
    """Take turns with these texts, and return the past after them."""
    for text in texts:
        observation = outcome_of(pool.step(before, turn(text)))
        assert isinstance(observation, Observation), observation
        before = before.then(turn(text), observation)
    return before


def contents(outcome: Outcome) -> Sequence[str]:
    """Return the contents of the messages of an observation."""
    assert isinstance(outcome, Observation), outcome
    return [message.content for message in outcome.messages]
