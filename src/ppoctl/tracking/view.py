"""The view of a run in progress that a person wants, collected from what happened. Pure: it draws nothing."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ppoctl import metrics

KEY_FIGURES: dict[str, str] = {
    "reward": metrics.REWARD_SCORE_MEAN.name,
    "kl": metrics.POLICY_APPROX_KL.name,
    "ev": metrics.VALUE_EXPLAINED_VARIANCE.name,
    "clip": metrics.POLICY_CLIP_FRAC.name,
    "trunc": metrics.ROLLOUT_TRUNCATED_FRAC.name,
}
"""Short word -> metric of the figures that are shown of every step."""

REWARDS_SHOWN = 20
STEPS_FOR_ETA = 5

_TALL = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII = " _.-=+*#%@"


@dataclass(frozen=True)
class Activity:
    """The stage that runs now."""

    step: int
    stage: str
    since: float


@dataclass(frozen=True)
class Progress:
    """Progress of a rollout."""

    done: int
    total: int
    tokens: int
    """Tokens drawn in this attempt; recalled ones are not counted."""


@dataclass(frozen=True)
class Outlook:
    """What is still to come in a run besides its steps: evaluations and saves, every so many steps (0: never) and at
    the end."""

    steps: int
    last_stage: Callable[[int], str]
    """Function from a step to its last stage; only an evaluation may follow."""
    eval_every_steps: int = 0
    evaluates: bool = False
    """Whether the run has evaluation sets."""
    save_every_steps: int = 1

    def evaluations_after(self, step: int) -> int:
        """Evaluations still to come when the step's has been done."""
        return _times(self.eval_every_steps, step, self.steps) if self.evaluates else 0

    def saves_after(self, step: int) -> int:
        """Saves still to come when the step's has been done."""
        return _times(self.save_every_steps, step, self.steps)

    def saves(self, step: int) -> bool:
        """Whether states are saved after this step."""
        return self.saves_after(step - 1) > self.saves_after(step)


def _times(every: int, after: int, last: int) -> int:
    if after >= last:
        return 0
    regular = last // every - after // every if every else 0
    return regular + (1 if not every or last % every else 0)


class RunView:
    """State of one run as its observers were told it. Not thread-safe. The clock is that of work (`clock`): time in
    which an engine starts is in no figure."""

    def __init__(self, name: str, outlook: Outlook, clock: Callable[[], float]) -> None:
        self.name = name
        self.outlook = outlook
        self.steps = outlook.steps
        self.activity: Activity | None = None
        self.progress: Progress | None = None
        self.figures: dict[str, float] = {}
        """Newest value of each figure; those of the step before stay until their successors come."""
        self.rewards: deque[float] = deque(maxlen=REWARDS_SHOWN)
        self.finished_step = 0
        self._clock = clock
        self._seconds: dict[int, float] = {}
        self._by_step: dict[int, dict[str, float]] = {}
        self._tokens_per_s: float | None = None
        self._drawing_since: float | None = None
        self._evaluated_step = 0
        self._eval_s = 0.0
        self._save_s = 0.0
        """Seconds between the last stage of a step whose states are saved and the first of the next."""
        self._committed: tuple[int, float] | None = None
        """Step and time of the newest commit."""

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take in the journal of earlier attempts."""
        for line in lines:
            self.committed(line)

    def stage_started(self, step: int, stage: str) -> None:
        """Hear that a stage runs from now on."""
        now = self._clock()
        if self._committed is not None and 0 < self._committed[0] < step and self.outlook.saves(self._committed[0]):
            self._save_s = now - self._committed[1]
        self.activity = Activity(step, stage, now)
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
        if self.activity is not None:
            self._committed = (step, self._clock())
        self.activity = None
        self.progress = None
        self.figures.update(figures)
        self._by_step = {near: self._by_step[near] for near in self._by_step if near >= step - 1}
        self._by_step.setdefault(step, {}).update(figures)
        if line["stage"] == "eval":
            self._eval_s, self._evaluated_step = line["seconds"], step
        else:
            self._seconds[step] = self._seconds.get(step, 0.0) + line["seconds"]
        if KEY_FIGURES["reward"] in figures:
            self.rewards.append(figures[KEY_FIGURES["reward"]])
        if line["stage"].partition(".")[0] == "rollout":
            self._tokens_per_s = line.get("clocked", {}).get(metrics.THROUGHPUT_GENERATED.name)
        over = step if line["stage"] == self.outlook.last_stage(step) else step - 1
        self.finished_step = max(self.finished_step, over)

    def step_figures(self, step: int) -> Mapping[str, float]:
        """Figures of this step alone; known for the newest two."""
        return self._by_step.get(step, {})

    def step_seconds(self, step: int) -> float:
        """Seconds of the step's stages committed so far, without an evaluation."""
        return self._seconds.get(step, 0.0)

    @property
    def stage_seconds(self) -> float:
        """Seconds for which the running stage has run."""
        return 0.0 if self.activity is None else self._clock() - self.activity.since

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
        """Seconds to the end: remaining steps times the mean of the last few, and what comes between them
        (evaluations, as long as the last one, and saves). None before the first step is over."""
        first = self.finished_step - STEPS_FOR_ETA + 1
        steps = range(max(first, 1), self.finished_step + 1)
        recent = [self._seconds[step] for step in steps if step in self._seconds]
        if not recent:
            return None
        done = self.finished_step
        steps_s = max(self.steps - done, 0) * sum(recent) / len(recent)
        # The evaluation and the save of the step that is over may be still to come.
        evaluations = self.outlook.evaluations_after(done if self._evaluated_step >= done else done - 1)
        has_saved = self.activity is not None and self.activity.step > done
        saves = self.outlook.saves_after(done if has_saved else done - 1)
        return steps_s + evaluations * self._eval_s + saves * self._save_s


def key_figures(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """Words and numbers of the figures that every step shows; figures that a run does not have are left out."""
    return [(word, number(figures[metric])) for word, metric in KEY_FIGURES.items() if metric in figures]


def number(value: float | None) -> str:
    """The number with three significant digits; `-` for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """The seconds as `4.1s`, `42s`, `7m 42s`, `3h 07m`, `2d 03h`; `-` for none."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for unit, word, smaller, small_word in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{word} {whole % unit // smaller:02d}{small_word}"
    return f"{whole}s"


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
