"""State of a running run for its console, collected from events. Prints nothing."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ppoctl.core import metric_registry
from ppoctl.core.clock import WORK
from ppoctl.core.step_metrics import of_step

REWARDS_SHOWN = 20
STEPS_FOR_ETA = 5

_TALL = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII = " _.-=+*#%@"


@dataclass(frozen=True)
class RunningStage:
    """The running stage."""

    step: int
    stage: str


@dataclass(frozen=True)
class Progress:
    """Progress of a stage that generates, in samples."""

    done: int
    total: int
    tokens: int
    """Tokens that were generated in this attempt; tokens of reused samples are not counted."""


class RunView:
    """State of a run from the events of its observers. Not thread-safe.

    Its clock is the work clock (`ppoctl.core.clock`), so that no duration includes the start of an engine.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        last_stage: Callable[[int], str],
        clock: Callable[[], float] = WORK.now,
        *,
        evaluates: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Create the view of a run of `steps` steps.

        `last_stage` returns the last stage of a step before the evaluation; `evaluates` returns whether an evaluation
        follows the step.
        """
        self.name = name
        self.steps = steps
        self.last_stage = last_stage
        self.evaluates = evaluates
        self.activity: RunningStage | None = None
        self.progress: Progress | None = None
        self._rewards: dict[int, float] = {}
        """Mean score of each recent step."""
        self.finished_step = 0
        self._clock = clock
        self._seconds: dict[int, float] = {}
        self._lines: dict[int, list[Mapping[str, Any]]] = {}
        """Journal lines of the newest two steps."""
        self._generating_since: float | None = None
        self._eval_seconds: dict[int, float] = {}
        """Seconds of the evaluation after each step."""
        self._step_durations: dict[int, float] = {}
        """Seconds from the end of the previous step to the end of this step, with saves but without an evaluation."""
        self._last_end: float | None = None
        """Time at which the last step of this process ended; None before the end of the first step."""
        self._attempt: int | None = None
        self._first_steps: set[int] = set()
        """First step of each process, which is slower because of kernel compilation, empty caches and imports."""

    def stage_started(self, step: int, stage: str) -> None:
        """Handle the start of a stage."""
        self.activity = RunningStage(step, stage)
        self.progress = None
        self._generating_since = None

    def progressed(self, progress: Progress) -> None:
        """Handle the progress of generation."""
        self.progress = progress
        if self._generating_since is None:
            self._generating_since = self._clock()

    def committed(self, line: Mapping[str, Any]) -> None:
        """Handle the journal line of a stage; lines of events are ignored."""
        if "stage" not in line:
            return
        step = line["step"]
        if line["attempt"] != self._attempt:
            self._attempt, self._last_end = line["attempt"], None
        self.activity = None
        self.progress = None
        self._lines = {recent: lines for recent, lines in self._lines.items() if recent >= step - 1}
        self._lines.setdefault(step, []).append(line)
        if line["stage"] == "eval":
            self._eval_seconds[step] = line["seconds"]
            self._last_end = None if self._last_end is None else self._last_end + line["seconds"]
        else:
            self._seconds[step] = self._seconds.get(step, 0.0) + line["seconds"]
        if (score := line.get("figures", {}).get(metric_registry.REWARD_SCORE_MEAN.name)) is not None:
            self._rewards[step] = score
            self._rewards.pop(step - REWARDS_SHOWN, None)
        if line["stage"] == self.last_stage(step):
            if self._last_end is None:
                self._first_steps.add(step)
            else:
                self._step_durations[step] = self._clock() - self._last_end
            self._last_end = self._clock()
        finished = step if line["stage"] == self.last_stage(step) else step - 1
        self.finished_step = max(self.finished_step, finished)

    def step_figures(self, step: int) -> Mapping[str, float]:
        """Return the metrics of this step; only the newest two steps are stored. If the generation that began in this
        step has not ended, the throughput is that of the generation before."""
        lines = self._lines.get(step, ())
        figures, name = of_step(lines), metric_registry.THROUGHPUT_GENERATED.name
        has_ended = any(f"time/{line['stage'].partition('.')[0]}_s" in metric_registry.ROLLOUTS_S for line in lines)
        before = {} if has_ended or not lines else of_step(self._lines.get(step - 1, ()))
        return {**figures, name: before[name]} if name in before else figures

    @property
    def rewards(self) -> list[float]:
        """The mean score of each recent step, oldest first."""
        return list(self._rewards.values())

    def step_seconds(self, step: int) -> float:
        """Return the seconds of the step's committed stages, without an evaluation."""
        return self._seconds.get(step, 0.0)

    @property
    def at_step(self) -> int:
        """The running step, or the last finished step."""
        return self.finished_step if self.activity is None else self.activity.step

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of generation, in the running rollout if it has tokens, otherwise in the last rollout.

        The value is None if the last rollout was reused.
        """
        generating_s = 0.0 if self._generating_since is None else self._clock() - self._generating_since
        if self.progress is not None and self.progress.tokens > 0 and generating_s > 0:
            return self.progress.tokens / generating_s
        return self.step_figures(max(self._lines, default=0)).get(metric_registry.THROUGHPUT_GENERATED.name)

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the end of the run; None before the end of the second step.

        The estimate is the number of remaining steps times the mean duration of the last few steps, including the
        time between them. The remaining evaluations are added in the same way. The first step of a process is used
        only if there is no other step, because it takes longer.
        """
        done = self.finished_step
        last_few = [step for step in range(done - STEPS_FOR_ETA + 1, done + 1) if step in self._seconds]
        rated = [step for step in last_few if step not in self._first_steps] or last_few
        if not rated or (last_few == [done] and done in self._first_steps and done < self.steps):
            return None
        recent = [max(self._seconds[step], self._step_durations.get(step, 0.0)) for step in rated]
        evaluations = list(self._eval_seconds.values())
        remaining = sum(
            self.evaluates(step) and step not in self._eval_seconds for step in range(done, self.steps + 1)
        )
        steps_s = max(self.steps - done, 0) * sum(recent) / len(recent)
        return steps_s + (remaining * sum(evaluations) / len(evaluations) if evaluations else 0.0)


def key_metrics(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return labels and values of the metrics that the line of a step shows; absent metrics are omitted."""
    return [
        (word, number(metrics[metric]))
        for word, metric in metric_registry.ON_THE_CONSOLE.items()
        if metric in metrics
    ]


def number(value: float | None) -> str:
    """Return the number with three significant digits; `-` for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def sparkline(values: Iterable[float], *, unicode: bool) -> str:
    """Return one character per value, scaled from the lowest to the highest; a value that is not finite is `?`."""
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
