"""Console output of a training run, as transcripts."""

import io
import math
import re
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
from rich.console import Console as RichConsole

from fakes.clock import Clock
from ppoctl.core.activity import Activities, preparing, track_items
from ppoctl.core.clock import WorkClock, duration
from ppoctl.show.tracking.console import RunConsole
from ppoctl.show.tracking.screen import Detail, LiveScreen, PlainScreen, Screen, open_screen, plain
from ppoctl.show.tracking.view import Progress, RunView, number, sparkline


def actor_last(step: int) -> str:
    return "actor_update"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def line(step: int, stage: str, seconds: float, metrics: dict[str, float], **clocked: float) -> dict[str, Any]:
    body = {"seq": 1, "at": 0.0, "attempt": 1, "step": step, "stage": stage, "seconds": seconds, "figures": metrics}
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


def play(console: RunConsole, lines: Iterable[dict[str, Any]]) -> None:
    for each in lines:
        console.on_stage_started(each["step"], each["stage"])
        console.on_committed(each)


def plain_console(detail: Detail = "steps", view: RunView | None = None) -> tuple[RunConsole, io.StringIO, Clock]:
    clock, stream = Clock(), io.StringIO()
    screen = PlainScreen(stream, detail, beats=False, clock=clock)
    return RunConsole(view or RunView("demo", 40, actor_last, clock), screen, clock=clock), stream, clock


def test_log_has_one_line_per_step_and_evaluation() -> None:
    console, stream, _ = plain_console()
    console.on_committed(line(0, "eval", 2.0, {"eval/gsm8k/pass_at_1": 0.25, "eval/gsm8k/greedy_pass_at_1": 0.3}))
    play(console, [*step_lines(1), *step_lines(2)])
    console.on_committed({"seq": 9, "event": "attempt_ended", "at": 0.0})
    console.on_message("mlflow: gone")
    console.on_detail("saved actor")
    # 4 + 0.5 + 3 + 5.5 = 13 s a step; 38 steps to go, and no evaluation: 494 s.
    assert stream.getvalue() == (
        "step 0/40  eval  gsm8k/pass_at_1 0.25  gsm8k/greedy_pass_at_1 0.3  2.0s\n"
        "step 1/40  reward 0.2  kl 0.00312  ev 0.523  clip 0.0812  trunc 0.021  1840 tok/s  13s  eta -\n"
        "step 2/40  reward 0.3  kl 0.00312  ev 0.523  clip 0.0812  trunc 0.021  1840 tok/s  13s  eta 8m 14s\n"
        "mlflow: gone\n"
    )


def test_verbose_log_has_a_line_per_stage() -> None:
    console, stream, _ = plain_console(detail="stages")
    play(console, step_lines(1)[-2:])
    console.on_detail("saved actor at step 1")
    assert stream.getvalue() == (
        "step 1/40  critic_update ...\n"
        "step 1/40  critic_update 3.0s\n"
        "step 1/40  actor_update ...\n"
        "step 1/40  actor_update 5.5s\n"
        "step 1/40  kl 0.00312  ev 0.523  clip 0.0812  - tok/s  8.5s  eta -\n"
        "saved actor at step 1\n"
    )


def test_step_without_actor_update_is_printed_without_old_metrics() -> None:
    console, stream, _ = plain_console()
    play(console, [*step_lines(1), *step_lines(2)[:-1], *step_lines(3)])
    lines = stream.getvalue().splitlines()
    assert lines[1] == "step 2/40  reward 0.3  ev 0.523  trunc 0.021  1840 tok/s  7.5s  eta -"
    assert [text.split()[1] for text in lines] == ["1/40", "2/40", "3/40"]


def test_quiet_console_prints_only_messages() -> None:
    console, stream, _ = plain_console(detail="quiet")
    console.on_committed(line(0, "eval", 2.0, {"eval/gsm8k/pass_at_1": 0.25}))
    play(console, step_lines(1))
    console.on_message("mlflow: gone")
    assert stream.getvalue() == "mlflow: gone\n"


def test_silent_log_prints_progress_at_growing_intervals() -> None:
    """After 5, 10, 20, 40 and then every 60 s of silence; other output also restarts the interval."""
    clock, stream = Clock(), io.StringIO()
    screen = PlainScreen(stream, beats=False, clock=clock)
    console = RunConsole(RunView("demo", 40, actor_last, clock), screen, clock=clock)
    console.on_stage_started(1, "rollout")
    console.on_progress(0, 256, 0)
    beats = []
    for second in range(1, 260):
        clock.now = 1000.0 + second
        console.on_progress(min(second, 256), 256, 100 * second)
        before = len(stream.getvalue())
        screen.beat()
        if len(stream.getvalue()) > before:
            beats.append(second)
        if second == 30:
            console.on_message("note")
    assert beats == [5, 15, 50, 90, 150, 210]
    assert stream.getvalue().splitlines()[0] == "step 1/40  rollout  5/256  5.0s  100 tok/s"


def test_idle_screen_prints_no_progress() -> None:
    clock, stream = Clock(), io.StringIO()
    screen = PlainScreen(stream, beats=False, clock=clock)
    clock.now += 100.0
    screen.beat()
    assert stream.getvalue() == ""


def test_resumed_console_uses_history_without_reprinting() -> None:
    view = RunView("demo", 3, actor_last, Clock())
    history(view, [*step_lines(1), *step_lines(2)[:2]])
    console, stream, _ = plain_console(view=view)
    play(console, step_lines(2)[2:])
    assert stream.getvalue() == (
        "step 2/3  reward 0.3  kl 0.00312  ev 0.523  clip 0.0812  trunc 0.021  1840 tok/s  13s  eta 13s\n"
    )


def test_reused_rollout_and_loaded_samples_have_no_throughput() -> None:
    clock = Clock()
    view = RunView("demo", 3, actor_last, clock)
    view.committed(line(1, "rollout", 0.1, {}))
    assert view.tokens_per_s is None
    view.stage_started(2, "rollout")
    view.progressed(Progress(200, 256, 0))
    clock.now += 4.0
    view.progressed(Progress(210, 256, 300))
    assert view.tokens_per_s == 75.0


def test_eta_includes_remaining_steps_and_evaluations() -> None:
    """1,000 steps of 10 s; evaluations of 300 s at the start and after every 100th step, so 10 are still to come."""
    view = RunView("demo", 1000, actor_last, Clock(), evaluates=lambda step: step % 100 == 0)
    view.committed(line(0, "eval", 300.0, {}))
    assert view.eta_s is None
    for step in (1, 2):
        view.committed(line(step, "actor_update", 10.0, {}))
    assert view.eta_s == 9_980 + 3_000
    for step in range(3, 101):
        view.committed(line(step, "actor_update", 10.0, {}))
    assert view.eta_s == 9_000 + 3_000
    view.committed(line(100, "eval", 320.0, {}))
    assert view.eta_s == 9_000 + 9 * 310
    assert view.step_seconds(100) == 10.0
    view.committed(line(1000, "actor_update", 10.0, {}))
    assert view.eta_s == 310.0
    view.committed(line(1000, "eval", 310.0, {}))
    assert view.eta_s == 0.0


def test_eta_excludes_the_first_step_of_a_process() -> None:
    """The first step takes 22 s, the others 10 s: kernels, caches and imports are new to it."""
    view = RunView("demo", 40, actor_last, Clock())
    view.committed(line(1, "actor_update", 22.0, {}))
    assert view.eta_s is None
    for step in (2, 3):
        view.committed(line(step, "actor_update", 10.0, {}))
        assert view.eta_s == (40 - step) * 10.0


def test_eta_excludes_the_startup_of_a_resume() -> None:
    """Steps of 10 s; the resuming command needs 100 s until its first step, which then takes 15 s."""
    clock = Clock()
    view = RunView("demo", 40, actor_last, clock)
    for step in range(1, 6):
        clock.now += 10.0
        view.committed(line(step, "actor_update", 10.0, {}))
    clock.now += 115.0
    view.committed({**line(6, "actor_update", 15.0, {}), "attempt": 2})
    assert view.eta_s == 34 * 10.0
    clock.now += 10.0
    view.committed({**line(7, "actor_update", 10.0, {}), "attempt": 2})
    assert view.eta_s == 33 * 10.0


def test_eta_is_estimated_if_each_process_runs_one_step() -> None:
    view = RunView("demo", 40, actor_last, Clock())
    for step in (1, 2):
        view.committed({**line(step, "actor_update", 22.0, {}), "attempt": step})
    assert view.eta_s == 38 * 22.0


def test_eta_excludes_evaluations_without_timing() -> None:
    view = RunView("demo", 3, actor_last, Clock(), evaluates=lambda step: step == 3)
    for step in (1, 2):
        view.committed(line(step, "actor_update", 10.0, {}))
    assert view.eta_s == 10.0


def test_work_clock_pauses_during_startup(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_log_is_ascii_without_control_characters() -> None:
    console, stream, _ = plain_console()
    console.on_message("\x1b[31mred\x07\tcaf\u00e9\nnext")
    assert stream.getvalue() == " [31mred  caf\\xe9 next\n"
    assert plain("\u2581") == "\\u2581"


def shown(console: RunConsole, width: int, *, unicode: bool = False) -> list[str]:
    return [row.plain for row in console.rows(width, unicode=unicode)]


def test_status_line_during_a_rollout() -> None:
    clock = Clock()
    view = RunView("demo", 40, actor_last, clock)
    history(view, [*step_lines(1), *step_lines(2), *step_lines(3)])
    console = RunConsole(view, PlainScreen(io.StringIO(), beats=False, clock=clock), clock=clock)
    console.on_stage_started(4, "rollout")
    clock.now += 1.0
    console.on_progress(2, 64, 0)
    clock.now += 2.5
    console.on_progress(12, 64, 5000)
    # 1 s until generation began (weights are sent), then 5000 tokens in 2.5 s; 37 steps of 13 s.
    assert shown(console, 60) == [
        "demo  step 4/40  3.5s, about 8m 01s left",
        "rollout  12/64  3.5s  2000 tok/s",
        "rewards _+@",
    ]
    assert shown(console, 10)[-1] == "rewards _@"
    assert shown(console, 60, unicode=True)[-1] == "rewards \u2581\u2585\u2588"
    assert console.in_a_line() == "step 4/40  rollout  12/64  3.5s  2000 tok/s"


def test_status_shows_the_progress_of_a_stage() -> None:
    console, _, _ = plain_console()
    assert shown(console, 60) == ["demo  step 0/40  0.0s", ""]
    console.on_stage_started(3, "actor_update")
    seen = []
    for place, letter in track_items("abc", "minibatch"):
        with preparing("starting vLLM") if place == 1 else nullcontext():
            seen.append((letter, shown(console, 60)[1]))
    assert seen == [
        ("a", "actor_update  minibatch 1/3  0.0s"),
        ("b", "actor_update  starting vLLM  0.0s"),
        ("c", "actor_update  minibatch 3/3  0.0s"),
    ]
    assert shown(console, 60)[1] == "actor_update  0.0s"


def test_eta_includes_time_between_steps() -> None:
    """Steps whose stages take 13 s, and 2 s for a save after each; an evaluation of 5 s is counted separately."""
    clock = Clock()
    view = RunView("demo", 4, actor_last, clock, evaluates=lambda step: step == 4)
    for step in (1, 2):
        clock.now += 13.0
        history(view, step_lines(step))
        if step == 1:
            clock.now += 5.0
            view.committed(line(1, "eval", 5.0, {}))
        clock.now += 2.0
    assert view.eta_s == 2 * 15.0 + 5.0


def test_activities_nest_and_may_end_in_any_order() -> None:
    doing, announced = Activities(), list[str]()
    assert doing.now() is None
    first, second = doing.track("saving"), doing.track("drawing", 8)
    first.__enter__()
    act = second.__enter__()
    act.done = 2
    assert str(doing.now()) == "drawing 2/8"
    first.__exit__(None, None, None)
    assert str(doing.now()) == "drawing 2/8"
    second.__exit__(None, None, None)
    assert doing.now() is None
    with doing.notifying(announced.append):
        doing.notify("reading")
    doing.notify("gone")
    assert announced == ["reading"]


def lines_on(stream: io.StringIO) -> list[str]:
    """Return the lines drawn on a terminal, without cursor movements."""
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text) for text in re.split("[\r\n]", stream.getvalue())]


def live_screen(width: int, **more: Any) -> tuple[LiveScreen, io.StringIO]:
    stream = io.StringIO()
    rich = RichConsole(file=stream, width=width, force_terminal=True, color_system=None, legacy_windows=False)
    return LiveScreen(rich, refresh_per_second=0.01, **more), stream


def test_lines_are_above_the_status_which_is_removed_at_the_end() -> None:
    screen, stream = live_screen(60)
    console = RunConsole(RunView("[demo]", 40, actor_last, Clock()), screen)
    play(console, step_lines(1))
    console.on_message("mlflow: [bold]gone[/bold]")
    screen.close()
    text = stream.getvalue()
    assert (
        text.index("step 1/40  reward 0.2")
        < text.index("mlflow: [bold]gone[/bold]")
        < text.rindex("[demo]  step 1/40")
    )
    assert text.rindex("\x1b[?25l") < text.rindex("\x1b[?25h")
    assert text.endswith("\x1b[2K")


class Redrawing(PlainScreen):
    """A screen that redraws its status from another thread before it accepts a line, as rich may."""

    def metrics(self, parts: list[str]) -> None:
        redrawing = threading.Thread(target=self._status.rows, args=(80,), kwargs={"unicode": False}, daemon=True)
        redrawing.start()
        redrawing.join(5.0)
        assert not redrawing.is_alive(), "each waits for the other"
        super().metrics(parts)


def test_printed_line_does_not_deadlock_with_the_status() -> None:
    stream = io.StringIO()
    console = RunConsole(RunView("demo", 40, actor_last, Clock()), Redrawing(stream, "stages", beats=False))
    play(console, [*step_lines(1), line(1, "eval", 2.0, {"eval/gsm8k/pass_at_1": 0.25})])
    assert len(stream.getvalue().splitlines()) == 2 * 5 + 2


@pytest.mark.parametrize(
    ("width", "line_of_the_step"),
    [
        (120, "step 1/40  reward 0.2  kl 0.00312  ev 0.523  clip 0.0812  trunc 0.021  1840 tok/s  13s  eta -"),
        (80, "step 1/40  reward 0.2  kl 0.00312  ev 0.523  clip 0.0812  trunc 0.021"),
        (60, "step 1/40  reward 0.2  kl 0.00312  ev 0.523  clip 0.0812"),
        (24, "step 1/40  reward 0.2"),
    ],
)
def test_narrow_terminal_gets_the_metrics_that_fit(width: int, line_of_the_step: str) -> None:
    screen, stream = live_screen(width)
    play(RunConsole(RunView("demo", 40, actor_last, Clock()), screen), step_lines(1))
    screen.close()
    assert line_of_the_step in lines_on(stream)


def test_status_is_never_wider_than_the_terminal() -> None:
    screen, stream = live_screen(30)
    console = RunConsole(RunView("a-run-with-a-long-name-indeed", 40, actor_last, Clock()), screen)
    console.on_stage_started(1, "rollout")
    screen._live.refresh()
    screen.close()
    assert max(map(len, lines_on(stream))) == 29
    assert "rollout  0.0s" in lines_on(stream)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_no_color_disables_colour(monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = Terminal()
    with open_screen(stream=stream) as screen:
        assert isinstance(screen, LiveScreen)
        RunConsole(RunView("demo", 3, actor_last), screen)
    assert "\x1b[3" not in stream.getvalue()


@pytest.mark.parametrize("term", ["", "dumb"])
def test_dumb_terminal_and_file_get_plain_lines(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    with open_screen(stream=Terminal()) as screen:
        assert isinstance(screen, PlainScreen)
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    with open_screen(stream=stream) as screen:
        assert isinstance(screen, PlainScreen)
        with preparing("starting vLLM"):
            pass
    with preparing("something that nobody hears"):
        pass
    assert stream.getvalue() == "starting vLLM\n"


def test_nested_preparation_with_same_description_is_printed_once() -> None:
    stream = io.StringIO()
    with open_screen(stream=stream), preparing("starting vLLM"):
        for what in ("starting vLLM", "loading the tokenizer"):
            with preparing(what):
                pass
    with open_screen(stream=stream), preparing("starting vLLM"):
        pass
    assert stream.getvalue().splitlines() == ["starting vLLM", "loading the tokenizer", "starting vLLM"]


def test_quiet_screen_prints_no_startup_activity() -> None:
    stream = io.StringIO()
    with open_screen("quiet", stream), preparing("starting vLLM"):
        pass
    assert stream.getvalue() == ""


def test_closed_terminal_does_not_stop_training() -> None:
    screens: list[Screen] = [
        PlainScreen(Gone(), "stages", beats=False),
        LiveScreen(RichConsole(file=Gone()), refresh_per_second=0.01),
    ]
    for screen in screens:
        console = RunConsole(RunView("demo", 3, actor_last, Clock()), screen)
        play(console, step_lines(1))
        console.on_progress(1, 2, 3)
        console.on_message("hello")
        screen.close()
    closed = io.StringIO()
    closed.close()
    PlainScreen(closed, beats=False).line("hello")


def test_formatted_numbers_durations_and_sparklines() -> None:
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
