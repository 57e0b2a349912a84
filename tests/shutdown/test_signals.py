"""Signals and stop requests, and how the gate reacts to them."""

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from textwrap import dedent

import pytest

from fakes.clock import Clock
from ppoctl.core.errors import EnvironmentProblemError, InterruptedByUserError, PpoctlError, PreemptedError
from ppoctl.run.shutdown.signals import SignalGate, signal_gate
from ppoctl.run.shutdown.time_left import ENDING_S, KILL_WAIT_S, TimeLeft, unknown

GOES_ON = "ppoctl resume runs/mine"


@contextmanager
def gate_in_job(
    time_left: TimeLeft | None = None,
    stop_request: Callable[[], str | None] = unknown,
    clock: Callable[[], float] = time.time,
) -> Iterator[SignalGate]:
    """Open the gate of a job in which stages run."""
    with signal_gate(GOES_ON) as gate:
        gate.poll_s, gate.clock = 0.01, clock
        with gate.working(time_left or TimeLeft(), stop_request):
            yield gate


class Thing:
    """An object that can be garbage-collected."""


def test_first_signal_sets_flag_and_second_raises() -> None:
    with gate_in_job() as gate:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(PreemptedError, match="SIGTERM"):
            gate.between()
        with pytest.raises(PreemptedError) as second:
            os.kill(os.getpid(), signal.SIGTERM)
        assert second.value.hint == GOES_ON


def test_stop_error_names_stage_and_step() -> None:
    with gate_in_job() as gate:
        gate.before(2, "reward")
        gate.between()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(PreemptedError, match="stopped by SIGTERM at `reward` of step 2; everything finished is"):
            gate.between()
        with pytest.raises(PreemptedError, match="at `values` of step 2;"):
            gate.before(2, "values")


def stopped_and_renamed(signals: int) -> None:
    """Call a library that receives this many signals, and re-raises any error under another name."""
    try:
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyError("device")
    except Exception as error:
        raise EnvironmentProblemError(f"could not start: {error}") from error


def test_second_signal_is_reported_even_if_library_wraps_error() -> None:
    with pytest.raises(PreemptedError, match="SIGTERM"), gate_in_job():
        stopped_and_renamed(signals=2)


def test_error_after_single_signal_is_reraised() -> None:
    with pytest.raises(EnvironmentProblemError, match="device"), gate_in_job():
        stopped_and_renamed(signals=1)


def test_second_signal_inside_gc_callback_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def callback(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with gate_in_job():
        os.kill(os.getpid(), signal.SIGINT)
        things = [Thing()]
        reference = weakref.ref(things[0], callback)
        with pytest.raises(InterruptedByUserError):
            release_and_wait(things)
        assert reference() is None
    assert "Traceback" not in capfd.readouterr().err


def release_and_wait(things: list[Thing]) -> None:
    things.clear()  # the callback runs here, and its exception is swallowed
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.01)  # the signal is sent again, and interrupts this


ENDS = {
    signal.SIGTERM: (PreemptedError, "stopped by SIGTERM at"),
    signal.SIGHUP: (PreemptedError, "stopped by SIGHUP at"),
    signal.SIGUSR1: (PreemptedError, "stopped by SIGUSR1, because its time limit is near, at"),
    signal.SIGINT: (InterruptedByUserError, "stopped by SIGINT at"),
}


@pytest.mark.parametrize("number", ENDS)
def test_every_signal_lets_stage_finish_and_has_own_message(number: signal.Signals) -> None:
    kind, words = ENDS[number]
    with gate_in_job() as gate:
        gate.before(1, "values")
        os.kill(os.getpid(), number)
        with pytest.raises(kind, match=f"{words} `logprobs` of step 1; everything finished is committed"):
            gate.before(1, "logprobs")
        assert gate.may_save()


@pytest.mark.parametrize("number", ENDS)
def test_first_signal_before_work_ends_job_with_message(number: signal.Signals) -> None:
    with pytest.raises(ENDS[number][0], match="before the first stage; everything") as raised, signal_gate(GOES_ON):
        os.kill(os.getpid(), number)
    assert raised.value.hint == GOES_ON


def test_swallowed_signal_before_work_still_ends_job() -> None:
    with signal_gate(GOES_ON) as gate:
        with pytest.raises(PreemptedError):  # as a library that tries an import does
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(PreemptedError, match="SIGUSR1"), gate.working(TimeLeft(), unknown):
            raise AssertionError("work began")


def test_first_of_two_signals_decides_error() -> None:
    with gate_in_job() as gate:
        gate.before(1, "values")
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(PreemptedError, match="SIGUSR1"):
            os.kill(os.getpid(), signal.SIGINT)
        assert not gate.may_save()  # a trainer was interrupted


def test_ignored_sighup_stays_ignored() -> None:
    """This is the case under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with gate_in_job() as gate:
            os.kill(os.getpid(), signal.SIGHUP)
            gate.before(1, "values")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_after_work_does_not_change_result() -> None:
    with signal_gate(GOES_ON) as gate:
        with gate.working(TimeLeft(), unknown):
            gate.before(1, "values")
        os.kill(os.getpid(), signal.SIGTERM)


def test_signal_ends_process_with_exit_code_of_gate() -> None:
    """The default action must never be in effect: SIGUSR1 would kill the process without a message."""
    program = """
import os, signal, sys
from ppoctl.core.errors import PpoctlError
from ppoctl.run.shutdown.signals import signal_gate
try:
    with signal_gate("again"):
        os.kill(os.getpid(), signal.SIGUSR1)
except PpoctlError as error:
    sys.exit(int(error.exit_code))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 75


def in_a_job(**more: object) -> TimeLeft:
    """Return the time left in a job: a stage takes 100 s, a save 20 s, so a minute is not enough for a stage."""
    known = TimeLeft(stage_s=lambda _: 100.0, save_s=lambda: 20.0, longest_s=lambda: 100.0, is_job=True)
    return replace(known, **more)  # type: ignore[arg-type]


NEEDED_S = 100.0 + 20.0 + ENDING_S


@pytest.mark.parametrize("left_s", [NEEDED_S - 1, NEEDED_S])
def test_stage_starts_only_if_stage_and_save_fit_time_limit(left_s: float) -> None:
    clock = Clock()
    with gate_in_job(in_a_job(ends_at=clock.now + left_s), clock=clock) as gate:
        if left_s >= NEEDED_S:
            gate.before(3, "values")
            return
        with pytest.raises(PreemptedError) as raised:
            gate.before(3, "values")
        assert raised.value.exit_code == 75
        assert raised.value.message == (
            "`values` of step 3 was not started: with a save it takes about 125 s, but only 124 s are left before "
            "the time limit; everything finished is committed"
        )
        assert gate.may_save()


def test_generating_stage_starts_and_stops_at_any_time() -> None:
    """Its finished samples are kept: half an evaluation is not lost, and states can be saved after it."""
    clock = Clock()
    draws = in_a_job(ends_at=clock.now + 60, draws=lambda stage: stage == "rollout")
    with gate_in_job(draws, clock=clock) as gate:
        gate.before(3, "rollout")
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(PreemptedError, match="at `rollout` of step 3"):
            gate.between()
        assert gate.may_save()


def test_duplicate_signal_in_job_counts_once() -> None:
    """Slurm signals every process, and the batch script forwards the signal."""
    clock = Clock()
    with gate_in_job(in_a_job(stage_s=lambda _: 10.0), clock=clock) as gate:
        gate.before(1, "values")
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now += 2.0
        with pytest.raises(PreemptedError, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)


def test_stage_of_unknown_duration_is_started() -> None:
    clock = Clock()
    with gate_in_job(in_a_job(stage_s=unknown, ends_at=clock.now + 1), clock=clock) as gate:
        gate.before(1, "rollout")


@pytest.mark.parametrize(
    ("number", "worked_s", "fits"),
    [
        # 100 s of work; the limit is in 120 s, and SIGKILL follows SIGTERM after 30 s.
        (signal.SIGUSR1, 0.0, True),
        (signal.SIGTERM, 0.0, False),
        (signal.SIGTERM, 100.0 - KILL_WAIT_S, False),
        (signal.SIGTERM, 100.0 - KILL_WAIT_S + ENDING_S, True),
        (signal.SIGHUP, 0.0, False),
        (signal.SIGINT, 0.0, True),
    ],
)
def test_running_stage_finishes_if_time_allows(number: signal.Signals, worked_s: float, fits: bool) -> None:
    clock = Clock()
    with gate_in_job(in_a_job(), clock=clock) as gate:
        gate.before(1, "values")
        gate._time = replace(gate._time, ends_at=clock.now + 120)
        clock.now += worked_s
        if fits:
            os.kill(os.getpid(), number)
            with pytest.raises(PpoctlError):
                gate.before(1, "logprobs")
            return
        with pytest.raises(PpoctlError, match="at `values` of step 1"):
            os.kill(os.getpid(), number)
        assert not gate.may_save()


def test_stage_outside_job_finishes_without_time_limit() -> None:
    with gate_in_job(in_a_job(is_job=False)) as gate:
        gate.before(1, "values")
        os.kill(os.getpid(), signal.SIGTERM)


def test_overlong_stage_is_abandoned_at_time_limit() -> None:
    clock = Clock()
    with gate_in_job(in_a_job(stage_s=lambda _: 10.0), clock=clock) as gate:
        gate.before(1, "values")
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now += KILL_WAIT_S - ENDING_S + 0.5
        with pytest.raises(PreemptedError, match="stopped by SIGTERM at `values` of step 1"):
            time.sleep(60)


@pytest.mark.parametrize(
    ("left_s", "save_s", "may"),
    [(26.0, 20.0, True), (24.0, 20.0, False), (206.0, None, True), (204.0, None, False), (None, None, True)],
)
def test_states_are_saved_at_stop_if_time_allows(left_s: float | None, save_s: float | None, may: bool) -> None:
    """Without an earlier save: if twice the longest stage would fit."""
    clock = Clock()
    with gate_in_job(in_a_job(save_s=lambda: save_s, stage_s=unknown), clock=clock) as gate:
        gate._time = replace(gate._time, ends_at=None if left_s is None else clock.now + left_s)
        gate.before(1, "values")
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [gate.may_save(), gate.may_save()] == [may, may]
        assert not gate.abandons


@pytest.mark.parametrize(
    ("after", "begun", "stopped_at"),
    [
        ("stage", [(1, "values")], (1, "logprobs")),
        ("step", [(1, "values"), (1, "logprobs"), (1, "eval")], (2, "rollout")),
    ],
)
def test_stop_request_ends_run_after_named_unit(
    after: str, begun: list[tuple[int, str]], stopped_at: tuple[int, str]
) -> None:
    stop_requests: list[str | None] = [None]
    with gate_in_job(stop_request=lambda: stop_requests[0]) as gate:
        for number, stage in enumerate(begun):
            gate.before(*stage)
            gate.between()
            stop_requests[0] = after if number == 0 else stop_requests[0]
            gate.between()
        with pytest.raises(InterruptedByUserError, match=f"stopped by `ppoctl stop --after {after}` at ") as raised:
            gate.before(*stopped_at)
        assert raised.value.exit_code == 130
        assert raised.value.hint == GOES_ON
        assert gate.may_save()


def then_sleep(act: Callable[[], object]) -> None:
    """Wait for a signal, which may come as early as in this act."""
    act()
    time.sleep(60)


def test_stop_now_abandons_stage_that_never_checks_gate() -> None:
    stop_requests: list[str | None] = [None]
    with gate_in_job(stop_request=lambda: stop_requests[0]) as gate:
        gate.before(1, "values")
        stop_requests[0] = "stage"
        time.sleep(0.05)  # some polls
        with pytest.raises(InterruptedByUserError, match="`ppoctl stop --after now` at `values` of step 1"):
            then_sleep(partial(stop_requests.__setitem__, 0, "now"))
        assert not gate.may_save()


def test_stop_now_is_sent_again_if_its_signal_is_lost() -> None:
    """A signal that arrives just before a system call begins does not end this call."""
    stop_requests: list[str | None] = [None]
    with gate_in_job(stop_request=lambda: stop_requests[0]) as gate:
        gate.before(1, "values")
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        stop_requests[0] = "now"
        assert signal.sigwait({signal.SIGUSR1}) == signal.SIGUSR1  # no handler sees this one
        with pytest.raises(InterruptedByUserError, match="`ppoctl stop --after now` at `values` of step 1"):
            then_sleep(partial(signal.pthread_sigmask, signal.SIG_SETMASK, before))


def answers(messages: list[str], count: int) -> list[str]:
    """Wait for `count` messages from another thread, and return them."""
    until = time.monotonic() + 10.0
    while len(messages) < count and time.monotonic() < until:
        time.sleep(0.005)
    return messages


def test_signal_message_names_awaited_stage_and_cost_of_second() -> None:
    messages = list[str]()
    known = TimeLeft(stage_s=lambda stage: 40.0)
    with signal_gate(GOES_ON, messages.append) as gate, gate.working(known, unknown):
        gate.clock = lambda: 1000.0
        gate.before(3, "actor_update")
        gate.clock = lambda: 1015.0
        os.kill(os.getpid(), signal.SIGINT)
        assert answers(messages, 1) == [
            "SIGINT: stopping after `actor_update` of step 3, about 25s more; a second signal abandons it"
        ]
        with pytest.raises(InterruptedByUserError):
            os.kill(os.getpid(), signal.SIGINT)
        assert answers(messages, 2)[1] == "SIGINT again: the running stage is abandoned"


def test_signal_does_not_wait_for_generating_stage() -> None:
    messages = list[str]()
    with signal_gate(GOES_ON, messages.append) as gate, gate.working(TimeLeft(draws=lambda stage: True), unknown):
        gate.before(1, "rollout")
        os.kill(os.getpid(), signal.SIGHUP)
        assert answers(messages, 1) == ["SIGHUP: stopping; finished samples of `rollout` are kept"]


def test_signal_before_or_after_stages_prints_its_message() -> None:
    messages = list[str]()
    with pytest.raises(PreemptedError), signal_gate(GOES_ON, messages.append):
        os.kill(os.getpid(), signal.SIGTERM)
    assert answers(messages, 1) == ["SIGTERM: stopping"]
    with signal_gate(GOES_ON, messages.append) as gate:
        with gate.working(TimeLeft(), unknown):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        assert answers(messages, 2)[1] == "SIGTERM: stopping when unfinished saves are written"


def test_signal_message_is_printed_during_blocking_call() -> None:
    """A library that runs for about a minute without returning to Python: one call of OpenSSL."""
    script = dedent("""
        import hashlib
        from ppoctl.run.shutdown.signals import signal_gate
        with signal_gate("again", lambda text: print(text, flush=True)):
            print("ready", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.2)  # into the call; a signal before it would be answered, too
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "SIGINT: stopping\n"
        child.kill()
