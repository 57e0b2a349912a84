"""A user's environment: the protocol of classes and async functions, the values that they may return, and how their
faults are reported."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from environments.conftest import AsInChild
from environments.episodes import ENVIRONMENTS, past, turn
from ppoctl.core.batch.episodes import ToolCall
from ppoctl.environments.environment_worker import EnvironmentHandler
from ppoctl.environments.user import opened

Converse = Callable[..., "Conversation"]


@pytest.fixture
def converse(as_in_child: AsInChild) -> Converse:
    """Start a conversation with a test environment."""

    def start(name: str, **options: Any) -> Conversation:
        return Conversation(as_in_child(opened(path=f"{ENVIRONMENTS}:{name}", options=options)))

    return start


class Conversation:
    """The messages to one environment, in this process."""

    def __init__(self, environments: Any) -> None:
        self._handler = EnvironmentHandler(environments)

    def open(self, truth: str | None = "7", key: str = "a") -> Any:
        return self._sent({"do": "open", "key": key, "row": asdict(past(key, truth).row), "seed": 5})

    def step(self, text: str, *calls: ToolCall, key: str = "a") -> Any:
        return self._sent({"do": "step", "key": key, "turn": asdict(turn(text, *calls))})

    def close(self, key: str = "a") -> Any:
        return self._handler({"do": "close", "key": key})

    def schemas(self) -> Any:
        return self._handler({"do": "describe"})["schemas"]

    def _sent(self, message: dict[str, Any]) -> Any:
        (answer,) = self._handler(message).values()
        return answer


def observation(*messages: tuple[str, str], reward: float = 0.0, done: bool = False, **metrics: float) -> Any:
    listed = tuple({"role": role, "content": content} for role, content in messages)
    return {"messages": listed, "reward": reward, "done": done, "metrics": metrics}


def test_class_receives_row_seed_and_turns(converse: Converse, capfd: pytest.CaptureFixture[str]) -> None:
    counts = converse("Counts", most=2)
    first = "row train/a, truth 7, level 3, seed 5, how?"
    assert counts.open() == observation(("user", first))
    second = "turn 1, total 8, tokens (0, 1, 2), calls 1"
    assert counts.step("abc", ToolCall("f", {})) == observation(("user", second), reward=0.25, answers=1.0)
    third = "turn 2, total 9, tokens (0,), calls 0"
    assert counts.step("a") == observation(("user", third), reward=0.5, done=True, answers=2.0)
    assert counts.close() == counts.close() == {}
    assert capfd.readouterr().out == "closed after 2\n"


def test_episodes_of_a_process_have_separate_objects(converse: Converse) -> None:
    counts = converse("Counts")
    counts.open()
    counts.step("abc")
    counts.open(key="b")
    assert "turn 1, total 6" in counts.step("x", key="b")["messages"][0]["content"]
    assert "turn 2, total 9" in counts.step("x")["messages"][0]["content"]


def test_async_methods_share_one_event_loop(converse: Converse) -> None:
    waits = converse("WaitsAsync")
    assert waits.open() == observation()
    assert waits.step("x") == observation(reward=2.0, done=True)


def test_async_function_asks_for_each_turn(converse: Converse) -> None:
    guessing = converse("guessing", low="higher")
    assert guessing.open() == observation(("user", "guess, seed 5"))
    assert guessing.open(key="b") == observation(("user", "guess, seed 5"))
    assert guessing.step("6") == observation(("user", "higher"), reward=-0.25, guesses=1.0)
    assert guessing.step("7") == observation(reward=1.0, done=True)
    tool = ToolCall("f", {"a": [1, None]})
    assert guessing.step("6", tool, key="b") == observation(("tool", "higher"), reward=-0.25, guesses=1.0)
    for _ in range(4):
        guessing.step("6", key="b")
    assert guessing.step("6", key="b") == observation(reward=0.0, done=True)


def test_faults_of_async_functions_are_reported(converse: Converse) -> None:
    twice = converse("asks_twice_at_once")
    assert twice.open() == observation(("user", "first"))
    assert twice.step("x") == observation(("user", "second"))
    reason, why = twice.step("y")
    assert (reason, why.partition(" (")[0]) == (
        "error", "RuntimeError: `ask` was called while another call of `ask` waits for its turn",
    )  # fmt: skip
    assert converse("returns_at_once").open() == [
        "invalid",
        "`open` ended the episode or returned a reward or metrics: the first observation has messages only",
    ]
    text = converse("returns_text")
    text.open()
    assert text.step("x") == ["invalid", 'the function returned a str (`"1.0"`), not the last reward or None']


def test_exit_of_an_async_function_fails_its_own_episode_only(converse: Converse) -> None:
    exits = converse("exits")
    exits.open(key="b")
    assert exits.open("exit")[:1] == ["error"]
    assert exits.step("x", key="b") == observation(done=True)


GOOD = {
    "messages": observation(("user", "m"), ("tool", "t")),
    "done": observation(reward=0.5, done=True),
}


@pytest.mark.parametrize("text", GOOD)
def test_step_may_return_messages_or_mapping(converse: Converse, text: str) -> None:
    misbehaves = converse("Misbehaves")
    misbehaves.open()
    assert misbehaves.step(text) == GOOD[text]


EXPECTED = "not an Observation, a mapping with its keys, a text, or a list of messages"
INVALID = {
    "nothing": "returned None: does every path through it end with `return`?",
    "number": f"returned a float (`1.0`), {EXPECTED}",
    "bytes": f"returned a bytes, {EXPECTED}",
    "bytes-content": "returned a bytes as the content of a message, not a text",
    "surrogate": "returned a text that is not valid Unicode: '\\udc80' is half a character",
    "nan": "returned `nan` as `reward`, not a finite number",
    "too-large-reward": "returned `1e+39` as `reward`, not a finite number",
    "text-reward": 'returned a str (`"1"`) as `reward`, not a number',
    "number-done": "returned a int (`1`) as `done`, not True or False",
    "unknown-key": "returned a mapping with `observation`; the keys of an observation are messages, reward, done, "
    "metrics",
    "empty": "returned neither messages nor `done = True`: the actor would have nothing to answer",
    "assistant": 'returned a message with the role str (`"assistant"`), not one of user, tool, system',
    "no-content": 'returned a dict (`{"role": "user"}`) as a message, not a mapping with `role` and `content`',
    "tool-id": "returned a dict as a message, not a mapping with `role` and `content`",
    "bad-metric": 'returned a metric named str (`"a b"`): letters, digits and underscores are allowed',
    "nan-metric": "returned `inf` as metric `a`, not a finite number",
    "metrics-list": 'returned a list (`[1]`) as `metrics`, not a mapping such as `{"guesses": 2}`',
    "taken-metric": "returned a metric named `calls`; the names turns, observed_tokens, calls are those of ppoctl",
}


@pytest.mark.parametrize("text", INVALID)
def test_invalid_answer_names_value_and_expectation(converse: Converse, text: str) -> None:
    misbehaves = converse("Misbehaves")
    misbehaves.open()
    assert misbehaves.step(text) == ["invalid", f"`step` {INVALID[text]}"]
    assert misbehaves.step("x")[0] == "error"  # the environment has been closed


def test_first_observation_has_messages_only(converse: Converse) -> None:
    misbehaves = converse("Misbehaves")
    assert misbehaves.open("done")[0] == "invalid"
    assert misbehaves.open("nothing") == misbehaves.open("empty") == observation()
    assert misbehaves.open("messages") == GOOD["messages"]


def test_observation_of_more_than_one_mebibyte_is_too_large(converse: Converse) -> None:
    misbehaves = converse("Misbehaves")
    misbehaves.open()
    assert misbehaves.step("10MB") == ["too_large", "the observation has 9.54 MiB, more than 1 MiB"]
    misbehaves.open()
    assert len(misbehaves.step("x" * 1_000_000)["messages"][0]["content"]) > 1_000_000


def test_error_names_line_of_user_file(converse: Converse) -> None:
    misbehaves = converse("Misbehaves")
    misbehaves.open()
    reason, why = misbehaves.step("raise no such place")
    assert reason == "error"
    assert why.startswith("LookupError: no such place (users_environments.py:")
    assert why.endswith("in `_raise`: `raise LookupError(detail)`)")
    misbehaves.open()
    assert misbehaves.step("sys.exit")[1].startswith("SystemExit: 3 (users_environments.py:")


def test_fault_of_close_is_ignored(converse: Converse) -> None:
    misbehaves = converse("Misbehaves")
    misbehaves.open()
    misbehaves.step("closing raise")
    assert misbehaves.close() == {}


def test_tools_of_a_class_are_described(converse: Converse) -> None:
    look, go = converse("WithTools").schemas()
    assert look["function"]["name"] == "look"
    assert look["function"]["parameters"]["required"] == ["direction"]
    assert go == {"type": "function", "function": {"name": "go"}}
    assert converse("Counts").schemas() == []


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("nothing", {}, r"has no `nothing`; it defines "),
        ("not_async", {}, "`not_async` is neither a class nor an `async` function"),
        ("WithoutStep", {}, "the class `WithoutStep` has no method `step`"),
        ("Counts", {"least": 1}, "is called with no argument and the options `least`: got an unexpected keyword"),
        ("guessing", {"high": ""}, "is called with the row, the seed and `ask` and the options `high`: got an"),
    ],
)
@pytest.mark.usefixtures("as_in_child")
def test_unusable_environment_raises(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises((AttributeError, TypeError), match=says):
        opened(path=f"{ENVIRONMENTS}:{name}", options=options)
