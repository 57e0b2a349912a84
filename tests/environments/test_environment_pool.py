"""Fault injection on real processes: if an environment fails, only its own episode is lost."""

import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from pathlib import Path

import psutil
import pytest

from environments.conftest import OpenPool
from environments.episodes import after, contents, opened, outcome_of, past, python_table, tools_table, turn
from ppoctl.core.batch.episodes import EnvironmentFailure, Environments, Observation, Outcome, Past
from ppoctl.core.errors import RecipeError
from ppoctl.environments.environment_pool import EnvironmentPool

LIMIT_S = 11.0
"""Limit of an answer. Only a hang waits for it; other answers come within it on a loaded machine too."""
NOT_AN_OBSERVATION = "the environment's process sent a reply that is not an observation"


def kill(pool: EnvironmentPool) -> None:
    """Kill the only process of a pool, and wait for its end."""
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def test_each_episode_is_answered_by_its_own_environment(open_pool: OpenPool) -> None:
    pool = open_pool(python_table("Misbehaves", workers=2))
    assert isinstance(pool, Environments)
    starts = [opened(pool, past(key)) for key in "abcde"]
    steps = [pool.step(start, turn(start.key)) for start in starts]
    assert [contents(outcome_of(step)) for step in steps] == [[f"start|{key}"] for key in "abcde"]
    assert len(pool.pids) == 2


def test_new_episode_gets_process_with_fewest_episodes(open_pool: OpenPool, tmp_path: Path) -> None:
    pool = open_pool(python_table("Misbehaves", workers=3))
    note = tmp_path / "opened"
    for key in "abcdef":
        opened(pool, past(key, opened=str(note)))
    pool.close("b")
    pool.close("no such episode")
    opened(pool, past("g", opened=str(note)))
    pid_of = dict(line.split() for line in note.read_text().splitlines())
    assert sorted(Counter(pid_of.values()).values()) == [2, 2, 3]
    assert pid_of["train/g"] == pid_of["train/b"]


SEEN = pytest.mark.ci("the hostile episodes, without the text of the failure")


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("kill", EnvironmentFailure("died", "the environment's process was killed by signal 9 (Killed)")),
        pytest.param(
            "os._exit",
            EnvironmentFailure("died", "the environment ended its process with exit code 3"),
            marks=SEEN,
        ),
        pytest.param(
            "pipes nonsense",
            EnvironmentFailure("died", "the environment closed or misused the pipe to its parent"),
            marks=SEEN,
        ),
        ('pipes {"number": 5, "observation": {"messages": 5}}', EnvironmentFailure("invalid", NOT_AN_OBSERVATION)),
        ("large-pipes", EnvironmentFailure("too_large", "the answer is larger than 2 MiB")),
    ],
)
def test_lost_process_fails_one_episode_and_others_are_restored(
    open_pool: OpenPool, text: str, failure: EnvironmentFailure
) -> None:
    pool = open_pool(python_table("Misbehaves", workers=1, seconds=LIMIT_S))
    lost, good = opened(pool, past("a")), opened(pool, past("b"))
    good = after(pool, good, "x", "y")
    assert outcome_of(pool.step(lost, turn(text))) == failure
    pool.close("a")
    assert contents(outcome_of(pool.step(good, turn("z")))) == ["start|x|y|z"]


def test_process_killed_between_turns_fails_no_episode(open_pool: OpenPool) -> None:
    pool = open_pool(python_table("Counts", workers=1))
    before = after(pool, opened(pool, past()), "abc")
    kill(pool)
    assert contents(outcome_of(pool.step(before, turn("abcd")))) == ["turn 2, total 12, tokens (0, 1, 2, 3), calls 0"]


def test_another_pool_continues_recorded_episode(open_pool: OpenPool) -> None:
    """A run that resumes inside an episode has new processes."""
    before = after(open_pool(python_table("guessing")), opened(open_pool(python_table("guessing")), past()), "1")
    pool = open_pool(python_table("guessing"))
    assert contents(outcome_of(pool.step(before, turn("2")))) == ["too low"]
    assert outcome_of(pool.step(before, turn("start"))) == Observation(reward=1.0, done=True)


def test_environment_that_answers_differently_after_restart_has_changed(open_pool: OpenPool, tmp_path: Path) -> None:
    count = tmp_path / "count"
    count.touch()
    pool = open_pool(python_table("Misbehaves", workers=1))
    changes, lost, good = (opened(pool, past(key)) for key in "abc")
    changes = after(pool, changes, "x", f"counted {count}", "y")
    good = after(pool, good, "metrics")
    outcome_of(pool.step(lost, turn("kill")))
    failure = outcome_of(pool.step(changes, turn("z")))
    assert isinstance(failure, EnvironmentFailure)
    assert failure.reason == "changed"
    before, _, recorded = failure.message.partition("`, recorded `")
    assert before.startswith("after a restart, the environment answered turn 2 differently: `")
    assert ("called 2 times" in before, "called 1 times" in recorded) == (True, True)
    assert len(failure.message) < 300
    assert contents(outcome_of(pool.step(good, turn("z")))) == ["start|metrics|z"]


def test_first_observation_is_compared_after_restart(open_pool: OpenPool) -> None:
    pool = open_pool(python_table("Misbehaves"))
    start = opened(pool, past())
    other = Past("b", past("b", "else").row, start.seed, start.first)
    failure = outcome_of(pool.step(other, turn("x")))
    assert isinstance(failure, EnvironmentFailure)
    assert failure.message.startswith("after a restart, the environment answered `open` differently: ")


def test_stateless_tools_are_not_repeated_after_restart(open_pool: OpenPool) -> None:
    pool = open_pool(tools_table("calculator", workers=1))
    before = opened(pool, past())
    repeated = Past("a", before.row, before.seed, before.first, ((turn("x"), Observation(reward=7.0)),))
    kill(pool)
    assert outcome_of(pool.step(repeated, turn("y"))) == Observation(done=True)


def test_episodes_of_hanging_process_wait_and_others_do_not(open_pool: OpenPool) -> None:
    pool = open_pool(python_table("Misbehaves", workers=2, seconds=LIMIT_S))
    slow, other, behind = (opened(pool, past(key)) for key in "abc")
    hanging, waiting = pool.step(slow, turn("hang")), pool.step(behind, turn("x"))
    assert contents(outcome_of(pool.step(other, turn("x")))) == ["start|x"]
    assert not hanging.done()
    assert outcome_of(hanging) == EnvironmentFailure("timeout", "no answer within 11 s")
    assert contents(outcome_of(waiting)) == ["start|x"]


def test_hanging_close_does_not_fail_other_episodes(open_pool: OpenPool) -> None:
    pool = open_pool(python_table("Misbehaves", workers=1, seconds=LIMIT_S))
    closing, good = opened(pool, past("a")), opened(pool, past("b"))
    after(pool, closing, "closing hang")
    pool.close("a")
    assert contents(outcome_of(pool.step(good, turn("x")))) == ["start|x"]


def test_output_and_forked_copies_do_not_disturb_protocol(
    open_pool: OpenPool, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = open_pool(python_table("Misbehaves", workers=1))
    assert after(pool, opened(pool, past()), "fork", "print", "x").exchanges[-1][1].messages[0].content.endswith("|x")
    pool.shutdown()
    printed = capfd.readouterr().err
    assert "Misbehaves` printed more than 64 KiB in one call; the rest is dropped" in printed
    assert len(printed) < 2**17


@pytest.mark.parametrize(
    "pool_table",
    [
        python_table("nothing"),
        tools_table(":no_schema", workers=1),
        pytest.param(tools_table(":a", ":a", workers=1), marks=pytest.mark.ci(":no_schema")),
    ],
)
def test_environment_that_cannot_start_raises_in_each_future(open_pool: OpenPool, pool_table: object) -> None:
    pool = open_pool(pool_table)  # type: ignore[arg-type]
    for future in [pool.open(past(key)) for key in "abc"]:
        with pytest.raises(RecipeError, match=r"the environment `.*:.*` does not start: ") as caught:
            future.result(timeout=60)
        assert str(caught.value.hint).startswith("python -m ppoctl.core.user_functions /")
    assert pool.pids == []


def test_shutdown_cancels_what_has_no_outcome(open_pool: OpenPool) -> None:
    pool = open_pool(python_table("Misbehaves", workers=1, seconds=600.0))
    start = opened(pool, past())
    pids = pool.pids
    running, waiting = pool.step(start, turn("hang")), pool.open(past("b"))
    while not running.running():
        time.sleep(0.001)
    pool.shutdown()
    pool.shutdown()
    for future in (running, waiting, pool.step(start, turn("x"))):
        with pytest.raises(CancelledError):
            future.result(timeout=0)
    pool.close("a")
    assert not any(psutil.pid_exists(pid) for pid in pids)


HOSTILE: dict[str, str | None] = {
    "hang": "timeout",
    "hang-in-c": "timeout",
    "kill": "died",
    "os._exit": "died",
    "sys.exit": "error",
    "raise x": "error",
    "10MB": "too_large",
    "large-pipes": "too_large",
    "pipes \x00\n\n": "died",
    "bytes": "invalid",
    "surrogate": "invalid",
    "nan": "invalid",
    "nothing": "invalid",
    "assistant": "invalid",
    "print": None,
    "fork": None,
    "x": None,
}
"""Text of a turn -> reason of the failure; None: the episode continues."""


@pytest.mark.parametrize(
    ("others", "hangs"),
    [(1, 1), pytest.param(2, 1, marks=pytest.mark.ci("1-1")), pytest.param(40, 20, marks=pytest.mark.slow)],
)
def test_no_hostile_episode_is_lost_or_affects_another(open_pool: OpenPool, others: int, hangs: int) -> None:
    generator = random.Random(33)
    pool = open_pool(python_table("Misbehaves", workers=4, seconds=LIMIT_S))
    # A hang takes that long, so each other text occurs more often.
    texts = [text for text in HOSTILE for _ in range(hangs if "hang" in text else others)]
    generator.shuffle(texts)
    plan = {str(number): ["x"] * generator.randrange(3) + [text, "x"] for number, text in enumerate(texts)}
    assert run(pool, plan) == {key: expected(turns) for key, turns in plan.items()}


def expected(turns: list[str]) -> str:
    """Return the reason of the first failure, or the last message."""
    seen = ["start"]
    for text in turns:
        if (reason := HOSTILE[text]) is not None:
            return reason
        seen.append(text)
    return "|".join(seen)


def run(pool: EnvironmentPool, plan: dict[str, list[str]]) -> dict[str, str]:
    """Take all turns of all episodes, all in flight, and return the ends."""
    ends: dict[str, str] = {}
    pasts = {key: past(key) for key in plan}
    calls: dict[str, Future[Outcome]] = {key: pool.open(start) for key, start in pasts.items()}
    taken = dict.fromkeys(plan, 0)
    while calls:
        wait(calls.values(), return_when=FIRST_COMPLETED)
        for key, call in list(calls.items()):
            if not call.done():
                continue
            outcome, number = call.result(), taken[key]
            if isinstance(outcome, EnvironmentFailure) or number == len(plan[key]):
                ends[key] = outcome.reason if isinstance(outcome, EnvironmentFailure) else contents(outcome)[0]
                pool.close(key)
                del calls[key]
                continue
            before = pasts[key]
            if number == 0:
                pasts[key] = Past(key, before.row, before.seed, outcome)
            else:
                pasts[key] = before.then(turn(plan[key][number - 1]), outcome)
            calls[key] = pool.step(pasts[key], turn(plan[key][number]))
            taken[key] += 1
    return ends
