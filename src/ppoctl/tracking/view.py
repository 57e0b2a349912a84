"""What a person wants to see of a run in progress, collected from what happened. Pure: it draws nothing."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

KEY_FIGURES: dict[str, str] = {
    "reward": "reward/score_mean",
    "kl": "policy/approx_kl",
    "ev": "value/explained_variance",
    "clip": "policy/clip_frac",
    "trunc": "rollout/truncated_frac",
}
"""Short word -> metric: what is shown of every step."""

LAST_STAGE = "actor_update"
"""Committed: the step is over (an evaluation may follow)."""

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
    """How far a rollout is."""

    done: int
    total: int
    tokens: int


class RunView:
    """The state of one run as its observers were told it. Not thread-safe."""

    def __init__(self, name: str, steps: int, clock: Callable[[], float]) -> None:
        self.name = name
        self.steps = steps
        self.activity: Activity | None = None
        self.progress: Progress | None = None
        self.figures: dict[str, float] = {}
        """The newest value of each; those of the step before shine through until their successors come."""
        self.rewards: deque[float] = deque(maxlen=REWARDS_SHOWN)
        self.finished_step = 0
        self._clock = clock
        self._seconds: dict[int, float] = {}
        self._by_step: dict[int, dict[str, float]] = {}
        self._tokens_per_s: float | None = None

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take in the journal of earlier attempts."""
        for line in lines:
            self.committed(line)

    def stage_started(self, step: int, stage: str) -> None:
        """A stage runs from now on."""
        self.activity = Activity(step, stage, self._clock())
        self.progress = None

    def progressed(self, progress: Progress) -> None:
        """A rollout has more samples."""
        self.progress = progress

    def committed(self, line: Mapping[str, Any]) -> None:
        """A journal line; events are of no interest here."""
        if "stage" not in line:
            return
        step, figures = line["step"], line.get("figures", {})
        self.activity = None
        self.progress = None
        self.figures.update(figures)
        self._by_step = {near: self._by_step[near] for near in self._by_step if near >= step - 1}
        self._by_step.setdefault(step, {}).update(figures)
        self._seconds[step] = self._seconds.get(step, 0.0) + line["seconds"]
        if KEY_FIGURES["reward"] in figures:
            self.rewards.append(figures[KEY_FIGURES["reward"]])
        if line["stage"] == "rollout" and line["seconds"] > 0 and "rollout/tokens" in figures:
            self._tokens_per_s = figures["rollout/tokens"] / line["seconds"]
        over = step if line["stage"] == LAST_STAGE else step - 1
        self.finished_step = max(self.finished_step, over)

    def step_figures(self, step: int) -> Mapping[str, float]:
        """Of this step alone; known for the newest two."""
        return self._by_step.get(step, {})

    def step_seconds(self, step: int) -> float:
        """Of the step's stages, those committed so far."""
        return self._seconds.get(step, 0.0)

    @property
    def stage_seconds(self) -> float:
        """How long the running stage has run."""
        return 0.0 if self.activity is None else self._clock() - self.activity.since

    @property
    def tokens_per_s(self) -> float | None:
        """Of the rollout that runs, once it has produced something; else of the last one."""
        if self.progress is not None and self.progress.tokens > 0 and self.stage_seconds > 0:
            return self.progress.tokens / self.stage_seconds
        return self._tokens_per_s

    @property
    def eta_s(self) -> float | None:
        """Remaining steps times the mean of the last few; None before the first is over."""
        first = self.finished_step - STEPS_FOR_ETA + 1
        steps = range(max(first, 1), self.finished_step + 1)
        recent = [self._seconds[step] for step in steps if step in self._seconds]
        if not recent:
            return None
        return max(self.steps - self.finished_step, 0) * sum(recent) / len(recent)


def key_figures(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """(word, number) of the figures that every step shows; those a run does not have are left out."""
    return [(word, number(figures[metric])) for word, metric in KEY_FIGURES.items() if metric in figures]


def number(value: float | None) -> str:
    """Three significant digits; `-` for none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if 1000 <= abs(value) < math.inf else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """`4.1s`, `42s`, `7m 42s`, `3h 07m`, `2d 03h`; `-` for none."""
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
