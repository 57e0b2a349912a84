"""How a job hears that it should stop."""

import os
import signal
import time
import weakref

import pytest

from ppoctl.errors import EnvironmentProblemError, InterruptedByUserError, PreemptedError
from ppoctl.launch.signals import signal_gate

GOES_ON = "ppoctl resume runs/mine"


class Thing:
    """Something that can be collected."""


def test_the_first_signal_is_a_flag_and_the_second_an_error() -> None:
    with signal_gate(GOES_ON) as gate:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(PreemptedError, match="SIGTERM"):
            gate.between()
        with pytest.raises(PreemptedError) as second:
            os.kill(os.getpid(), signal.SIGTERM)
        assert second.value.hint == GOES_ON


def test_who_is_stopped_is_told_where() -> None:
    with signal_gate(GOES_ON) as gate:
        gate.before(2, "reward")
        gate.between()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(PreemptedError, match="stopped by SIGTERM at `reward` of step 2; everything finished is"):
            gate.between()
        with pytest.raises(PreemptedError, match="at `values` of step 2;"):
            gate.before(2, "values")


def stopped_and_renamed(signals: int) -> None:
    """A library that meets so many signals, and calls whatever it met by another name."""
    try:
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyError("device")
    except Exception as error:
        raise EnvironmentProblemError(f"could not start: {error}") from error


def test_a_second_signal_that_a_library_calls_by_another_name_is_still_that_signal() -> None:
    with signal_gate(GOES_ON) as gate, pytest.raises(PreemptedError, match="SIGTERM"), gate.outlasting():
        stopped_and_renamed(signals=2)


def test_an_error_after_one_signal_is_that_error() -> None:
    with signal_gate(GOES_ON) as gate, pytest.raises(EnvironmentProblemError, match="device"), gate.outlasting():
        stopped_and_renamed(signals=1)


def test_a_second_signal_inside_a_callback_of_the_collector_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def callback(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with signal_gate(GOES_ON):
        os.kill(os.getpid(), signal.SIGINT)
        things = [Thing()]
        reference = weakref.ref(things[0], callback)
        with pytest.raises(InterruptedByUserError):
            let_go_and_wait(things)
        assert reference() is None
    assert "Traceback" not in capfd.readouterr().err


def let_go_and_wait(things: list[Thing]) -> None:
    things.clear()  # the callback runs here, and what it raises is swallowed
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        time.sleep(0.01)  # the signal comes again, and interrupts this
