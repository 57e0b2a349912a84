"""Drills on real processes: whatever a scorer does, it costs its own sample only."""

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ppoctl.errors import RewardError
from ppoctl.rewards.pool import CHUNK_SAMPLES, Outcome, ScorerPool
from ppoctl.rewards.worker import Question

OpenPool = Callable[..., ScorerPool]

GOOD = [Question("a" * n, "good") for n in range(5)]
GOOD_OUTCOMES = [Outcome("ok", value=float(n)) for n in range(5)]


def with_misdeed(truth: str) -> list[Question]:
    """Five good samples with a misdeed as the third."""
    return [*GOOD[:2], Question("", truth), *GOOD[2:]]


def the_misdeed_of(outcomes: list[Outcome]) -> Outcome:
    """The third outcome, once the others are seen to be good."""
    assert outcomes[:2] + outcomes[3:] == GOOD_OUTCOMES
    return outcomes[2]


def test_outcomes_come_in_the_order_of_the_questions(drill_pool: OpenPool) -> None:
    pool = drill_pool(workers=2)
    questions = [Question("a" * n, "good") for n in range(5 * CHUNK_SAMPLES + 3)]
    assert [outcome.value for outcome in pool.score(questions)] == list(range(len(questions)))
    assert pool.score([]) == []


def test_children_are_started_once_and_kept(drill_pool: OpenPool) -> None:
    pool = drill_pool()
    assert pool.pids == []
    pool.score(GOOD)
    first = pool.pids
    pool.score(GOOD)
    assert pool.pids == first != []


@pytest.mark.parametrize("hang", ["hang-in-python", "hang-in-c", "hang-stubbornly"])
def test_a_hanging_scorer_costs_its_own_sample_only(drill_pool: OpenPool, hang: str) -> None:
    pool = drill_pool(timeout_s=0.5)
    outcome = the_misdeed_of(pool.score(with_misdeed(hang)))
    assert outcome == Outcome("timeout", message="no score within 0.5 s")


def test_the_deadline_is_per_sample_and_not_per_chunk(drill_pool: OpenPool) -> None:
    pool = drill_pool(timeout_s=2.5)
    outcomes = pool.score([Question("", "sleep 0.3")] * 10)
    assert [outcome.kind for outcome in outcomes] == ["ok"] * 10


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("raise", "ValueError: cannot parse <object object at 0x..>"),
        ("sys.exit", "SystemExit: 3"),
        ("os._exit", "the scorer ended its process with exit code 3"),
        ("kill", "the scorer's process was killed by signal 9 (Killed)"),
        ("text", "the scorer returned a `str` as value, not a number"),
    ],
)
def test_a_failing_scorer_costs_its_own_sample_only(drill_pool: OpenPool, truth: str, message: str) -> None:
    assert the_misdeed_of(drill_pool().score(with_misdeed(truth))) == Outcome("error", message=message)


def test_misdeeds_in_a_row_each_cost_one_sample(drill_pool: OpenPool) -> None:
    truths = ["os._exit", "hang-in-c", "kill", "good", "raise", "os._exit", "good"]
    outcomes = drill_pool(workers=2, timeout_s=1.0).score([Question("a", truth) for truth in truths])
    assert [outcome.kind for outcome in outcomes] == ["error", "timeout", "error", "ok", "error", "error", "ok"]


def test_a_scorer_that_returns_a_bare_number_is_told_so(drill_pool: OpenPool) -> None:
    (outcome,) = drill_pool("drill_scorers:returns_a_bare_number").score(GOOD[:1])
    assert outcome == Outcome("error", message="the scorer returned `float`, not a Verdict")


def test_printing_and_reading_input_do_not_disturb_the_protocol(drill_pool: OpenPool) -> None:
    assert the_misdeed_of(drill_pool().score(with_misdeed("chatter"))) == Outcome("ok", value=7.0)


def test_a_copy_that_a_scorer_forks_off_does_not_answer_for_it(drill_pool: OpenPool) -> None:
    assert the_misdeed_of(drill_pool().score(with_misdeed("fork"))) == Outcome("ok", value=5.0)


def test_what_a_hanging_scorer_started_is_killed_with_it(drill_pool: OpenPool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    (outcome,) = drill_pool(timeout_s=1.0).score([Question("", f"start-and-hang {note}")])
    assert outcome.kind == "timeout"
    assert not _runs(int(note.read_text()))


def test_a_child_that_dies_between_two_calls_costs_nothing(drill_pool: OpenPool) -> None:
    pool = drill_pool()
    pool.score(GOOD)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert pool.score(GOOD) == GOOD_OUTCOMES


def test_workers_score_side_by_side(drill_pool: OpenPool, tmp_path: Path) -> None:
    """Each sample waits until all four are being scored: one after the other, none would end."""
    pool = drill_pool(workers=4, timeout_s=60.0)
    outcomes = pool.score([Question("", f"meet 4 {tmp_path}")] * 4)
    assert [outcome.kind for outcome in outcomes] == ["ok"] * 4


def test_responses_larger_than_a_pipe_arrive_whole(drill_pool: OpenPool) -> None:
    questions = [Question("a" * 100_000, "good")] * 20
    assert {outcome.value for outcome in drill_pool(workers=2).score(questions)} == {100_000.0}


def test_a_child_that_reads_nothing_any_more_does_not_block_the_parent(drill_pool: OpenPool) -> None:
    pool = drill_pool(timeout_s=1.5)
    pool.score(GOOD)
    os.kill(pool.pids[0], signal.SIGSTOP)
    outcomes = pool.score([Question("a" * 200_000, "good")] * 2)
    assert [outcome.kind for outcome in outcomes] == ["timeout", "ok"]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("no_such_module:score", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("drill_scorers:no_such_name", "AttributeError: module 'drill_scorers' has no attribute 'no_such_name'"),
    ],
)
def test_a_scorer_that_cannot_be_imported_is_one_clear_error(drill_pool: OpenPool, entry: str, why: str) -> None:
    pool = drill_pool(entry)
    with pytest.raises(RewardError) as caught:
        pool.score(GOOD)
    assert caught.value.message == f"the scorer `{entry}` does not start: {why}"
    assert caught.value.hint is not None
    assert pool.pids == []


def test_a_child_that_ends_while_it_starts_is_tried_again_and_then_an_error(
    drill_pool: OpenPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies_at_import.py").write_text("import os\nopen('starts', 'a').write('x')\nos._exit(4)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardError, match="does not start: the scorer ended its process with exit code 4"):
        drill_pool("dies_at_import:score").score(GOOD)
    assert (tmp_path / "starts").read_text() == "xxx"


def test_an_interruption_stops_the_child_in_the_middle_and_the_pool_goes_on(drill_pool: OpenPool) -> None:
    pool = drill_pool()
    pool.score(GOOD)
    (pid,) = pool.pids

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(KeyboardInterrupt):
            pool.score([Question("", "hang-in-c")])
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert not _runs(pid)
    assert pool.score(GOOD) == GOOD_OUTCOMES


def test_close_kills_and_reaps_and_may_be_called_twice(drill_pool: OpenPool) -> None:
    pool = drill_pool(workers=2)
    pool.score([Question("", "sleep 0.05")] * 4)
    pids = pool.pids
    assert len(pids) == 2
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def _runs(pid: int) -> bool:
    """Whether the process is still there; one that was told to die may need a moment on a busy machine."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([descriptor], [], [], 10.0)[0]
    finally:
        os.close(descriptor)
