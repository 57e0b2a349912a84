"""What a person reads while a run trains, as transcripts."""

import io
import math
from collections.abc import Iterable
from typing import Any

import pytest
from rich.console import Console as RichConsole

from ppoctl.clock import WorkClock, duration
from ppoctl.tracking.console import (
    Console,
    LiveConsole,
    PlainConsole,
    open_console,
    panel,
    plain,
)
from ppoctl.tracking.view import Progress, RunView, number, sparkline


def actor_last(step: int) -> str:
    return "actor_update"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def line(step: int, stage: str, seconds: float, figures: dict[str, float], **clocked: float) -> dict[str, Any]:
    body = {"seq": 1, "at": 0.0, "attempt": 1, "step": step, "stage": stage, "seconds": seconds, "figures": figures}
    return {**body, "clocked": {f"throughput/{name}": value for name, value in clocked.items()}}


def step_lines(step: int) -> list[dict[str, Any]]:
    return [
        line(step, "rollout", 4.0, {"rollout/truncated_frac": 0.021}, generated_tokens_per_s=1840.0),
        line(step, "reward", 0.5, {"reward/score_mean": 0.1 + step / 10}),
        line(step, "critic_update", 3.0, {"value/explained_variance": 0.5234}),
        line(step, "actor_update", 5.5, {"policy/approx_kl": 0.00312, "policy/clip_frac": 0.0812}),
    ]


def history(view: RunView, lines: Iterable[dict[str, Any]]) -> None:
    for each in lines:
        view.committed(each)


def play(console: Console, lines: Iterable[dict[str, Any]]) -> None:
    for each in lines:
        console.on_stage_started(each["step"], each["stage"])
        console.on_committed(each)


def plain_console(steps: int = 40, *, verbose: bool = False) -> tuple[PlainConsole, io.StringIO, Clock]:
    clock, stream = Clock(), io.StringIO()
    return (
        PlainConsole(RunView("demo", steps, actor_last, clock), stream, verbose=verbose, clock=clock),
        stream,
        clock,
    )


def test_a_log_has_one_line_for_each_step_and_each_evaluation() -> None:
    console, stream, _ = plain_console()
    console.on_committed(line(0, "eval", 2.0, {"eval/gsm8k/pass_at_1": 0.25, "eval/gsm8k/greedy_pass_at_1": 0.3}))
    play(console, [*step_lines(1), *step_lines(2)])
    console.on_committed({"seq": 9, "event": "attempt_ended", "at": 0.0})
    console.on_message("mlflow: gone")
    console.close()
    # 4 + 0.5 + 3 + 5.5 = 13 s a step; 39 and 38 steps to go, and no evaluation: 507 s and 494 s.
    assert stream.getvalue() == (
        "step 0/40  eval  gsm8k/pass_at_1 0.25  gsm8k/greedy_pass_at_1 0.3\n"
        "step 1/40  reward 0.2  kl 0.00312  ev 0.523  clip 0.0812  trunc 0.021  1840 tok/s  13s  eta 8m 27s\n"
        "step 2/40  reward 0.3  kl 0.00312  ev 0.523  clip 0.0812  trunc 0.021  1840 tok/s  13s  eta 8m 14s\n"
        "mlflow: gone\n"
    )


def test_verbose_adds_the_stages() -> None:
    console, stream, _ = plain_console(verbose=True)
    play(console, step_lines(1)[-2:])
    assert stream.getvalue() == (
        "step 1/40  critic_update ...\n"
        "step 1/40  critic_update 3.0s\n"
        "step 1/40  actor_update ...\n"
        "step 1/40  actor_update 5.5s\n"
        "step 1/40  kl 0.00312  ev 0.523  clip 0.0812  - tok/s  8.5s  eta 5m 32s\n"
    )


def test_a_step_without_an_actor_update_is_told_when_the_next_begins_and_borrows_no_figures() -> None:
    console, stream, _ = plain_console()
    play(console, [*step_lines(1), *step_lines(2)[:-1], *step_lines(3)])
    lines = stream.getvalue().splitlines()
    assert lines[1] == "step 2/40  reward 0.3  ev 0.523  trunc 0.021  1840 tok/s  7.5s  eta 8m 27s"
    assert [text.split()[1] for text in lines] == ["1/40", "2/40", "3/40"]


def test_a_long_rollout_says_once_a_minute_how_far_it_is() -> None:
    console, stream, clock = plain_console()
    console.on_stage_started(1, "rollout")
    console.on_progress(0, 256, 0)
    for second in range(1, 131):
        clock.now = 1000.0 + second
        console.on_progress(second, 256, 100 * second)
    assert stream.getvalue() == "step 1/40  rollout 60/256  100 tok/s\nstep 1/40  rollout 120/256  100 tok/s\n"


def test_a_resumed_run_knows_its_history_and_does_not_tell_it_again() -> None:
    clock, stream = Clock(), io.StringIO()
    view = RunView("demo", 3, actor_last, clock)
    history(view, [*step_lines(1), *step_lines(2)[:2]])
    console = PlainConsole(view, stream, verbose=False, clock=clock)
    play(console, step_lines(2)[2:])
    assert stream.getvalue() == (
        "step 2/3  reward 0.3  kl 0.00312  ev 0.523  clip 0.0812  trunc 0.021  1840 tok/s  13s  eta 13s\n"
    )


def test_a_recalled_rollout_has_no_speed_and_recalled_samples_do_not_count() -> None:
    clock = Clock()
    view = RunView("demo", 3, actor_last, clock)
    view.committed(line(1, "rollout", 0.1, {}))
    assert view.tokens_per_s is None
    view.stage_started(2, "rollout")
    view.progressed(Progress(200, 256, 0))
    clock.now += 4.0
    view.progressed(Progress(210, 256, 300))
    assert view.tokens_per_s == 75.0


def test_what_is_left_are_the_steps_and_the_evaluations_to_come() -> None:
    """1,000 steps of 10 s; evaluations of 300 s at the start and after every 100th step, so 10 are to come."""
    view = RunView("demo", 1000, actor_last, Clock(), evaluates=lambda step: step % 100 == 0)
    view.committed(line(0, "eval", 300.0, {}))
    assert view.eta_s is None
    view.committed(line(1, "actor_update", 10.0, {}))
    assert view.eta_s == 9_990 + 3_000
    for step in range(2, 101):
        view.committed(line(step, "actor_update", 10.0, {}))
    assert view.eta_s == 9_000 + 3_000
    view.committed(line(100, "eval", 320.0, {}))
    assert view.eta_s == 9_000 + 9 * 310
    assert view.step_seconds(100) == 10.0
    view.committed(line(1000, "actor_update", 10.0, {}))
    assert view.eta_s == 310.0
    view.committed(line(1000, "eval", 310.0, {}))
    assert view.eta_s == 0.0


def test_an_evaluation_that_nobody_has_timed_yet_is_not_in_what_is_left() -> None:
    view = RunView("demo", 3, actor_last, Clock(), evaluates=lambda step: step == 3)
    view.committed(line(1, "actor_update", 10.0, {}))
    assert view.eta_s == 20.0


def test_the_clock_of_work_stands_still_while_something_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    work = WorkClock()
    began = work.now()
    clock.now += 1.0
    with work.stopped():
        clock.now += 20.0
        with work.stopped():
            clock.now += 5.0
        assert work.now() - began == 1.0
    clock.now += 2.0
    assert work.now() - began == 3.0


def test_logs_are_ascii_without_control_characters() -> None:
    console, stream, _ = plain_console()
    console.on_message("\x1b[31mred\x07\tcaf\u00e9\nnext")
    assert stream.getvalue() == " [31mred  caf\\xe9 next\n"
    assert plain("\u2581") == "\\u2581"


def test_the_panel() -> None:
    clock = Clock()
    view = RunView("demo", 40, actor_last, clock)
    history(view, [*step_lines(1), *step_lines(2), *step_lines(3)])
    view.stage_started(4, "rollout")
    console = LiveConsole(view, RichConsole(file=io.StringIO(), width=60), refresh_per_second=1.0)
    clock.now += 1.0
    console.on_progress(2, 64, 0)
    clock.now += 2.5
    console.on_progress(12, 64, 5000)
    console.close()
    shown = {True: io.StringIO(), False: io.StringIO()}
    for unicode, stream in shown.items():
        RichConsole(file=stream, width=60).print(panel(view, unicode=unicode))
    # 1 s until drawing began (weights are sent), then 5000 tokens in 2.5 s; 37 steps of 13 s.
    assert shown[False].getvalue() == (
        "+- demo ---------------------------------------------------+\n"
        "| step 4/40  rollout 3.5s  12/64 samples                   |\n"
        "| reward 0.4  kl 0.00312  ev 0.523  clip 0.0812  trunc     |\n"
        "| 0.021                                                    |\n"
        "| rewards _+@                                              |\n"
        "| 2000 tok/s  eta 8m 01s                                   |\n"
        "+----------------------------------------------------------+\n"
    )
    assert "rewards \u2581\u2585\u2588" in shown[True].getvalue()


def test_the_panel_of_a_run_that_has_nothing_yet() -> None:
    stream = io.StringIO()
    RichConsole(file=stream, width=30).print(panel(RunView("demo", 3, actor_last, Clock()), unicode=False))
    assert stream.getvalue().splitlines()[1:-1] == [
        "| step 0/3                   |",
        "|                            |",
        "| rewards                    |",
        "| - tok/s  eta -             |",
    ]


def test_messages_appear_above_the_live_panel_and_the_cursor_comes_back() -> None:
    stream = io.StringIO()
    rich = RichConsole(file=stream, width=60, force_terminal=True, color_system=None, legacy_windows=False)
    console = LiveConsole(RunView("[demo]", 40, actor_last, Clock()), rich)
    play(console, step_lines(1))
    console.on_message("mlflow: [bold]gone[/bold]")
    console.close()
    text = stream.getvalue()
    assert "mlflow: [bold]gone[/bold]" in text
    assert text.rindex("mlflow:") < text.rindex("[demo]") < text.rindex("step 1/40")
    assert text.rindex("\x1b[?25l") < text.rindex("\x1b[?25h")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colour_is_left_out_on_request(monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = Terminal()
    console = open_console(RunView("demo", 3, actor_last), stream=stream)
    assert isinstance(console, LiveConsole)
    console.close()
    assert "\x1b[3" not in stream.getvalue()


@pytest.mark.parametrize("term", ["", "dumb"])
def test_a_dumb_terminal_and_a_file_get_plain_lines(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    assert isinstance(open_console(RunView("demo", 3, actor_last), stream=Terminal()), PlainConsole)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_console(RunView("demo", 3, actor_last), stream=io.StringIO()), PlainConsole)


def test_a_terminal_that_went_away_does_not_stop_training(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    consoles: list[Console] = [
        PlainConsole(RunView("demo", 3, actor_last, clock), Gone(), verbose=True, clock=clock),
        LiveConsole(RunView("demo", 3, actor_last, clock), RichConsole(file=Gone()), refresh_per_second=0.01),
    ]
    for console in consoles:
        play(console, step_lines(1))
        console.on_progress(1, 2, 3)
        console.on_message("hello")
        console.close()
    closed = io.StringIO()
    closed.close()
    PlainConsole(RunView("demo", 3, actor_last, clock), closed, verbose=False, clock=clock).on_message("hello")


def test_numbers_durations_and_sparklines_by_hand() -> None:
    assert [number(value) for value in (None, 0.0, 0.00012345, -0.5, 999.6, 1234.5, math.nan, math.inf)] == [
        "-", "0", "0.000123", "-0.5", "1e+03", "1234", "nan", "inf",
    ]  # fmt: skip
    assert [duration(value) for value in (None, 0.04, 9.94, 59.4, 60.0, 3599.0, 3600.0, 86400.0, 183600.0)] == [
        "-", "0.0s", "9.9s", "59s", "1m 00s", "59m 59s", "1h 00m", "1d 00h", "2d 03h",
    ]  # fmt: skip
    assert sparkline([], unicode=False) == ""
    assert sparkline([0.5, 0.5], unicode=False) == "__"
    assert sparkline([0.0, math.nan, 8.0, 4.0], unicode=False) == "_?@+"
    assert sparkline([0.0, 7.0], unicode=True) == "\u2581\u2588"
