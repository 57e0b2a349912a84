"""The view of a run in progress that a person wants, collected from what happened. Pure: it draws nothing."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ppoctl import metric_registry
from ppoctl.clock import WORK

REWARDS_SHOWN = 20
STEPS_FOR_ETA = 5

_TALL = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII = " _.-=+*#%@"


@dataclass(frozen=True)
class RunningStage:
    """The stage that runs now."""

    step: int
    stage: str


@dataclass(frozen=True)
class Progress:
    """Progress of a rollout."""

    done: int
    total: int
    tokens: int
    """Tokens drawn in this attempt; recalled ones are not counted."""


class RunView:
    """State of one run as its observers were told it. Not thread-safe. The clock is that of work (`clock`): time in
    which an engine starts is in no figure."""

    def __init__(
        self,
        name: str,
        steps: int,
        last_stage: Callable[[int], str],
        clock: Callable[[], float] = WORK.now,
        *,
        evaluates: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Prepare to watch `steps` steps; `last_stage` gives the last stage of a step, which only an evaluation may
        follow, and `evaluates` says after which steps one does."""
        self.name = name
        self.steps = steps
        self.last_stage = last_stage
        self.evaluates = evaluates
        self.activity: RunningStage | None = None
        self.progress: Progress | None = None
        self.metrics: dict[str, float] = {}
        """Newest value of each figure; those of the step before stay until their successors come."""
        self.rewards: deque[float] = deque(maxlen=REWARDS_SHOWN)
        self.finished_step = 0
        self._clock = clock
        self._seconds: dict[int, float] = {}
        self._by_step: dict[int, dict[str, float]] = {}
        self._tokens_per_s: float | None = None
        self._drawing_since: float | None = None
        self._eval_seconds: dict[int, float] = {}
        """Seconds of the evaluation after each step."""
        self._took: dict[int, float] = {}
        """Seconds from the end of the step before to the end of this one, without an evaluation: saves are in it."""
        self._last_end: float | None = None
        """When the last step of this process was over; None before the first one is."""
        self._attempt: int | None = None
        self._firsts: set[int] = set()
        """Steps that were the first of their process, to which kernels, caches and imports were new."""

    def stage_started(self, step: int, stage: str) -> None:
        """Hear that a stage runs from now on."""
        self.activity = RunningStage(step, stage)
        self.progress = None
        self._drawing_since = None

    def progressed(self, progress: Progress) -> None:
        """Hear that a rollout has more samples."""
        self.progress = progress
        if self._drawing_since is None:
            self._drawing_since = self._clock()

    def committed(self, line: Mapping[str, Any]) -> None:
        """Take in a journal line of a stage; events are passed over."""
        if "stage" not in line:
            return
        step, figures = line["step"], line.get("figures", {})
        if line["attempt"] != self._attempt:
            self._attempt, self._last_end = line["attempt"], None
        self.activity = None
        self.progress = None
        self.metrics.update(figures)
        self._by_step = {near: self._by_step[near] for near in self._by_step if near >= step - 1}
        self._by_step.setdefault(step, {}).update(figures)
        if line["stage"] == "eval":
            self._eval_seconds[step] = line["seconds"]
            self._last_end = None if self._last_end is None else self._last_end + line["seconds"]
        else:
            self._seconds[step] = self._seconds.get(step, 0.0) + line["seconds"]
        if metric_registry.REWARD_SCORE_MEAN.name in figures:
            self.rewards.append(figures[metric_registry.REWARD_SCORE_MEAN.name])
        if line["stage"].partition(".")[0] == "rollout":
            self._tokens_per_s = line.get("clocked", {}).get(metric_registry.THROUGHPUT_GENERATED.name)
        if line["stage"] == self.last_stage(step):
            if self._last_end is None:
                self._firsts.add(step)
            else:
                self._took[step] = self._clock() - self._last_end
            self._last_end = self._clock()
        over = step if line["stage"] == self.last_stage(step) else step - 1
        self.finished_step = max(self.finished_step, over)

    def step_figures(self, step: int) -> Mapping[str, float]:
        """Figures of this step alone; known for the newest two."""
        return self._by_step.get(step, {})

    def step_seconds(self, step: int) -> float:
        """Seconds of the step's stages committed so far, without an evaluation."""
        return self._seconds.get(step, 0.0)

    @property
    def at_step(self) -> int:
        """The step that is worked on, or the last one that is over."""
        return self.finished_step if self.activity is None else self.activity.step

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second of drawing: in the rollout that runs, once it has produced something; else in
        the last one. None where that was recalled."""
        drawing_s = 0.0 if self._drawing_since is None else self._clock() - self._drawing_since
        if self.progress is not None and self.progress.tokens > 0 and drawing_s > 0:
            return self.progress.tokens / drawing_s
        return self._tokens_per_s

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end: steps to come times the mean of the last few, with what lay between them, and
        evaluations to come times the mean of those so far. The first step of a process counts only where there is no
        other: it takes longer. None before the second step is over."""
        done = self.finished_step
        last_few = [step for step in range(done - STEPS_FOR_ETA + 1, done + 1) if step in self._seconds]
        rated = [step for step in last_few if step not in self._firsts] or last_few
        if not rated or (last_few == [done] and done in self._firsts and done < self.steps):
            return None
        recent = [max(self._seconds[step], self._took.get(step, 0.0)) for step in rated]
        evaluations = list(self._eval_seconds.values())
        to_come = sum(self.evaluates(step) and step not in self._eval_seconds for step in range(done, self.steps + 1))
        steps_s = max(self.steps - done, 0) * sum(recent) / len(recent)
        return steps_s + (to_come * sum(evaluations) / len(evaluations) if evaluations else 0.0)


def key_metrics(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """Words and numbers of the figures that every step shows; figures that a run does not have are left out."""
    return [
        (word, number(figures[metric]))
        for word, metric in metric_registry.ON_THE_CONSOLE.items()
        if metric in figures
    ]


def number(value: float | None) -> str:
    """The number with three significant digits; `-` for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def sparkline(values: Iterable[float], *, unicode: bool) -> str:
    """One character per value, lowest to highest; a value that is not finite is a `?`."""
    levels = (_TALL if unicode else _ASCII)[1:]
    numbers = list(values)
    finite = [value for value in numbers if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low

    def level(value: float) -> str:
        if not math.isfinite(value):
            return "?"
        return levels[round((value - low) / span * (len(levels) - 1)) if span > 0 else 0]

    return "".join(map(level, numbers))
