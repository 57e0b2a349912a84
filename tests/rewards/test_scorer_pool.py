"""Fault injection on real processes: if a scorer fails, only its current sample is lost."""

import hashlib
import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ppoctl.core.batch.prompts import Message
from ppoctl.core.batch.scores import Score, Scorer, ScoreRequest
from ppoctl.core.errors import ExitCode, NonFiniteError, RewardError
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_output import KEPT_BYTES, Dropped
from ppoctl.rewards.scorer_pool import ScorerPool
from ppoctl.rewards.scorer_process import ScorerProcess
from rewards.asking import request, scores

OpenPool = Callable[..., ScorerPool]

LIMIT_S = 11.0
"""Limit of pools with a scorer that hangs: other samples are scored within it on a loaded machine too."""
GOOD = [request("a" * n) for n in range(5)]
GOOD_SCORES = [Score(float(n), "ok") for n in range(5)]


def with_misdeed(truth: str) -> list[ScoreRequest]:
    """Return five good requests, with a fault in the third."""
    return [*GOOD[:2], request("", truth), *GOOD[2:]]


def the_misdeed_of(scored: list[Score]) -> Score:
    """Return the third score, after checking that the others are good."""
    assert scored[:2] + scored[3:] == GOOD_SCORES
    return scored[2]


def test_each_request_gets_its_score(drill_pool: OpenPool) -> None:
    pool = drill_pool(workers=2)
    assert isinstance(pool, Scorer)
    requests = [request("a" * n) for n in range(83)]
    assert [score.value for score in scores(pool, requests)] == list(range(83))


def test_scorer_process_receives_all_request_fields(drill_pool: OpenPool) -> None:
    chat = (Message("system", "be brief"), Message("user", "why?\u2028\ud800"))
    sample = ScoreRequest("p7", "why?\n", chat, "42\n", None, {"level": 3, "tags": ["a", None]}, "truncated", (5, 1))
    turns = replace(sample, conversation=(Message("tool", "4"),), turn_spans=((0, 1),), turn_rewards=(0.5,))
    for sent, score in zip(
        (sample, turns), scores(drill_pool("drill_scorers:all_that_it_is_given"), [sample, turns]), strict=True
    ):
        assert score == Score(None, "error", f"ValueError: {hashlib.sha256(repr(sent).encode()).hexdigest()}")


def test_scorer_may_return_one_value_per_token(drill_pool: OpenPool) -> None:
    requests = [
        replace(request("", f"tokens {values}"), token_ids=(7, 8, 1))
        for values in ("0 0.5 1", "1 2", "0 1 2 3", "0 0 nan")
    ]
    pool = drill_pool()
    good, short, long = scores(pool, requests[:3])
    assert (good.value, good.token_values) == (1.5, (0.0, 0.5, 1.0))
    assert (short.outcome, short.message) == (
        "error",
        "the scorer returned 2 values for the 3 tokens of the response",
    )
    assert long.message == "the scorer returned 4 values for the 3 tokens of the response"
    with pytest.raises(NonFiniteError, match="returned `nan` as"):
        scores(pool, requests[3:])


def test_scoring_time_of_sample_is_measured(drill_pool: OpenPool) -> None:
    quick, slow = scores(drill_pool(), [GOOD[1], request("", "sleep 1")])
    assert 0 < quick.seconds < slow.seconds
    assert slow.seconds >= 1


@pytest.mark.usefixtures("drill_scorers")
def test_batch_scoring_time_is_divided_among_requests() -> None:
    process = ScorerProcess(ScorerSpec("drill_scorers:score"), 10.0, Dropped(""))
    try:
        process.score(GOOD[:1])
        began = time.monotonic()
        scored = process.score([GOOD[1], request("", "sleep 0.2")])
        assert 0.2 <= sum(score.seconds for score in scored) <= time.monotonic() - began
    finally:
        process.close()
        process.reap()


def test_scorer_may_report_reason_for_missing_score(drill_pool: OpenPool) -> None:
    (score,) = scores(drill_pool(), [request("", "unreachable no answer after 3 tries")])
    assert score == Score(None, "unreachable", "no answer after 3 tries")


def test_cancelled_request_is_not_scored(drill_pool: OpenPool, tmp_path: Path) -> None:
    pool = drill_pool()
    first, second = (pool.submit(request("", f"meet {count} {tmp_path}")) for count in (1, 9))
    assert second.cancel()
    assert (first.result().outcome, pool.submit(GOOD[3]).result()) == ("ok", GOOD_SCORES[3])


def test_scorer_processes_are_started_once_and_reused(drill_pool: OpenPool) -> None:
    pool = drill_pool()
    assert pool.pids == []
    scores(pool, GOOD)
    first = pool.pids
    scores(pool, GOOD)
    assert pool.pids == first != []


def test_hanging_scorer_times_out_for_its_own_sample_only(drill_pool: OpenPool, tmp_path: Path) -> None:
    """Four processes hang, each in another way, and the samples behind theirs are scored after the limit. A process
    that one of them started is killed too."""
    note = tmp_path / "pid"
    hangs = [request("", how) for how in ("hang-in-python", "hang-in-c", "hang-stubbornly", f"start-and-hang {note}")]
    scored = scores(drill_pool(workers=4, timeout_s=LIMIT_S), [*hangs, *GOOD])
    assert scored == [Score(None, "timeout", "no score within 11 s")] * 4 + GOOD_SCORES
    assert [score.seconds for score in scored[:4]] == [LIMIT_S] * 4
    assert not _runs(int(note.read_text()))


def test_scorer_deadline_is_per_sample(drill_pool: OpenPool) -> None:
    pool = drill_pool(timeout_s=LIMIT_S)
    scored = scores(pool, [request("", "sleep 0.5")] * 23)  # 11.5 s in all
    assert [score.outcome for score in scored] == ["ok"] * 23


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("raise", "ValueError: cannot parse <object object at 0x..>"),
        pytest.param("sys.exit", "SystemExit: 3", marks=pytest.mark.ci("raise, os._exit")),
        ("os._exit", "the scorer ended its process with exit code 3"),
        ("kill", "the scorer's process was killed by signal 9 (Killed)"),
        ("text", "the scorer returned a `str` as value, not a number"),
    ],
)
def test_failing_scorer_affects_its_own_sample_only(drill_pool: OpenPool, truth: str, message: str) -> None:
    assert the_misdeed_of(scores(drill_pool(), with_misdeed(truth))) == Score(None, "error", message)


def test_consecutive_failures_each_affect_one_sample(drill_pool: OpenPool) -> None:
    truths = ["os._exit", "hang-in-c", "kill", "good", "raise", "os._exit", "good"]
    scored = scores(drill_pool(workers=2, timeout_s=LIMIT_S), [request("a", truth) for truth in truths])
    assert [score.outcome for score in scored] == ["error", "timeout", "error", "ok", "error", "error", "ok"]


def test_bare_number_from_scorer_is_reported_as_error(drill_pool: OpenPool) -> None:
    (score,) = scores(drill_pool("drill_scorers:returns_a_bare_number"), GOOD[:1])
    assert score == Score(None, "error", "the scorer returned `float`, not a RewardValue")


def test_scorer_output_and_input_do_not_disturb_protocol(drill_pool: OpenPool) -> None:
    assert the_misdeed_of(scores(drill_pool(), with_misdeed("chatter"))) == Score(7.0, "ok")


def test_scorer_output_is_kept_up_to_limit_per_call(drill_pool: OpenPool, capfd: pytest.CaptureFixture[str]) -> None:
    pool = drill_pool()
    scored = scores(pool, [request("", "print 10"), request("", "print 100000"), request("", "print 20")])
    assert [score.value for score in scored] == [1.0] * 3
    pool.close()
    notice = "ppoctl: the scorer `drill_scorers:score` printed more than 64 KiB in one call; the rest is dropped"
    assert capfd.readouterr().err.split("\n") == [
        "x" * 10, "y" * 10, "x" * KEPT_BYTES, notice, "x" * 20, "y" * 20,
        "ppoctl: 131 KiB of the output of the scorer `drill_scorers:score` were dropped", "",
    ]  # fmt: skip


def test_endless_scorer_output_times_out_and_is_counted(
    drill_pool: OpenPool, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = drill_pool(workers=2, timeout_s=LIMIT_S)
    scored = scores(pool, [request("", "print-without-end")] * 2 + [GOOD[1]])
    assert [score.outcome for score in scored] == ["timeout", "timeout", "ok"]
    pool.close()
    printed = capfd.readouterr().err
    assert len(printed) < 2 * KEPT_BYTES + 1000
    assert printed.count("the rest is dropped") == 1
    assert re.search(
        r"ppoctl: [\d.,]+ [MG]iB of the output of the scorer `drill_scorers:score` were dropped\n$", printed
    )


def test_blocked_stderr_does_not_block_scores_or_pool(drill_pool: OpenPool) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(1 << 16))
    os.set_blocking(writing, True)
    before = os.dup(2)
    os.dup2(writing, 2)
    began = time.monotonic()
    try:
        pool = drill_pool(timeout_s=600.0)
        (score,) = scores(pool, [request("", "print 100000")])
        pool.close()
    finally:
        os.dup2(before, 2)
        for number in (before, reading, writing):
            os.close(number)
    assert score.value == 1.0
    assert time.monotonic() - began < 20


def test_leftover_daemon_of_scorer_does_not_block_close(drill_pool: OpenPool, tmp_path: Path) -> None:
    daemon = tmp_path / "daemon"
    pool = drill_pool(timeout_s=600.0)
    hanging = pool.submit(request("", f"leave-a-daemon-and-hang {daemon}"))
    while not Path(f"{daemon}-hangs").exists():
        time.sleep(0.01)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 20
    assert hanging.result().outcome == "error"
    daemon.unlink()


def test_forked_copy_of_scorer_does_not_reply(drill_pool: OpenPool) -> None:
    assert the_misdeed_of(scores(drill_pool(), with_misdeed("fork"))) == Score(5.0, "ok")


def test_child_killed_between_calls_is_restarted(drill_pool: OpenPool) -> None:
    pool = drill_pool()
    scores(pool, GOOD)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert scores(pool, GOOD) == GOOD_SCORES


def test_workers_score_concurrently(drill_pool: OpenPool, tmp_path: Path) -> None:
    """Each sample waits until all four are being scored; scored one after the other, none would end."""
    pool = drill_pool(workers=4, timeout_s=60.0)
    scored = scores(pool, [request("", f"meet 4 {tmp_path}")] * 4)
    assert [score.outcome for score in scored] == ["ok"] * 4


def test_responses_larger_than_pipe_arrive_complete(drill_pool: OpenPool) -> None:
    scored = scores(drill_pool(workers=2), [request("a" * 100_000)] * 20)
    assert {score.value for score in scored} == {100_000.0}


def test_stopped_child_does_not_block_parent(drill_pool: OpenPool) -> None:
    pool = drill_pool(timeout_s=LIMIT_S)
    scores(pool, GOOD)
    os.kill(pool.pids[0], signal.SIGSTOP)
    scored = scores(pool, [request("a" * 200_000, "good")] * 2)
    assert [score.outcome for score in scored] == ["timeout", "ok"]


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("no_such_module:score", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("drill_scorers:no_such_name", "AttributeError: module 'drill_scorers' has no attribute 'no_such_name'"),
    ],
)
def test_import_failure_of_scorer_raises_one_clear_error(drill_pool: OpenPool, entry: str, why: str) -> None:
    pool = drill_pool(entry)
    with pytest.raises(RewardError) as caught:
        scores(pool, GOOD)
    assert caught.value.message == f"the scorer `{entry}` does not start: {why}"
    assert caught.value.hint is not None
    assert pool.pids == []


def test_error_of_ended_child_is_reported() -> None:
    """The message must arrive even if the parent reads late."""

    class ReadsLate(ScorerProcess):
        def _spawn(self) -> None:
            super()._spawn()
            assert self.pid is not None
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    process = ReadsLate(ScorerSpec("no_such_module:score"), 10.0, Dropped(""))
    with pytest.raises(RewardError, match="does not start: ModuleNotFoundError: No module named 'no_such_module'"):
        process.score(GOOD[:1])


def test_reply_of_ended_child_is_not_lost() -> None:
    process = ScorerProcess(ScorerSpec("drill_scorers:score"), 10.0, Dropped(""))
    process._socket, theirs = socket.socketpair()
    theirs.sendall(b'{"number": 1}\n')
    theirs.close()
    with process._socket:
        assert process._exchange(b"request\n", 10.0) == {"number": 1}
        assert process._exchange(b"request\n", 10.0) is None


def test_child_that_ends_at_start_is_retried_before_error(
    drill_pool: OpenPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dies_at_import.py").write_text("import os\nopen('starts', 'a').write('x')\nos._exit(4)\n")
    monkeypatch.chdir(tmp_path)
    pool = drill_pool("dies_at_import:score")
    for future in [pool.submit(sample) for sample in GOOD]:
        with pytest.raises(RewardError, match="does not start: the scorer ended its process with exit code 4"):
            future.result()
    assert (tmp_path / "starts").read_text() == "xxx"


def test_close_ends_child_during_scoring(drill_pool: OpenPool, tmp_path: Path) -> None:
    pool = drill_pool(timeout_s=600.0)
    scores(pool, GOOD)
    (pid,) = pool.pids
    in_hand, waiting = (pool.submit(request("", f"hang-in-c {tmp_path}/{number}")) for number in range(2))
    while not (tmp_path / "0").exists():  # until the child is scoring, not only started
        time.sleep(0.01)
    pool.close()
    assert not _runs(pid)
    assert in_hand.result() == Score(None, "error", "the scorer's process was killed by signal 9 (Killed)")
    assert waiting.cancelled()


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("number nan", "the scorer returned `nan` as reward of a response to prompt `train/1`"),
        pytest.param(
            "number -inf",
            "the scorer returned `-inf` as reward of a response to prompt `train/1`",
            marks=pytest.mark.ci("number nan"),
        ),
        ("number 1e39", "the scorer returned `1e+39` as reward of a response to prompt `train/1`"),
        ("nan-extra", "the scorer returned `nan` as margin of a response to prompt `train/1`"),
    ],
)
def test_non_finite_score_raises_and_names_prompt(drill_pool: OpenPool, truth: str, message: str) -> None:
    pool = drill_pool(workers=2)
    with pytest.raises(NonFiniteError) as caught:
        scores(pool, [request("a"), request("", truth, prompt_id="train/1")])
    assert caught.value.message == message
    assert caught.value.hint is not None
    assert caught.value.exit_code == ExitCode.HEALTH
    assert scores(pool, GOOD[:2]) == GOOD_SCORES[:2]


def test_largest_float32_is_a_valid_score(drill_pool: OpenPool) -> None:
    (score,) = scores(drill_pool(), [request("", "number 3.4028234663852886e38")])
    assert score.outcome == "ok"


def test_close_kills_children_and_is_idempotent(drill_pool: OpenPool) -> None:
    pool = drill_pool(workers=2)
    scores(pool, [request("", "sleep 0.05")] * 4)
    pids = pool.pids
    assert len(pids) == 2
    pool.close()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def _runs(pid: int) -> bool:
    """Whether the process exists after a grace period: a killed process may need a moment on a busy machine."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([descriptor], [], [], 10.0)[0]
    finally:
        os.close(descriptor)
