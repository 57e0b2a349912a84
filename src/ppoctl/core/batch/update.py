"""State of a role, and the record of an update that leads to a state."""

from dataclasses import dataclass
from typing import ClassVar

from ppoctl.core import metric_registry
from ppoctl.core.batch.record import Record


@dataclass(frozen=True)
class State:
    """Small handle on the weights and the optimizer of one role. The weights stay in the trainer or on disk.

    A state is identified by its lineage (the inputs it was computed from), not by its content: a replayed update is
    not bit-equal on a GPU, but it is the same update. `replay` counts such replays.
    """

    role: str
    step: int
    """Number of PPO steps that updated this role or kept it unchanged."""
    updates: int
    """Number of optimizer steps so far, which learning-rate schedules count."""
    lineage: str
    replay: int = 0

    @property
    def stamp(self) -> str:
        suffix = f"+r{self.replay}" if self.replay else ""
        return f"{self.role}@{self.step}:{self.lineage[:16]}{suffix}"

    @property
    def identity(self) -> str:
        return f"{self.role}:{self.lineage}"


def step_of(stamp: str) -> int:
    """Return the step of the state with this stamp."""
    return int(stamp.partition("@")[2].partition(":")[0])


@dataclass(frozen=True)
class Update(Record[State]):
    """Small record that an update commits instead of weights: the lineage of the new state, and metrics."""

    kind: ClassVar[str] = "update"
    measured: ClassVar[tuple[str, ...]] = ("gap",)

    role: str
    step: int
    parent: str
    """Lineage of the state before the update."""
    lineage: str
    """Lineage of the state after the update."""
    updates: int
    """Total number of optimizer steps of the state after the update."""
    per_minibatch: dict[str, list[float | None]]
    """loss, grad_norm, lr, ...: one entry per optimizer step, in order; None: the step has no token that the metric
    describes."""
    summary: dict[str, float]
    """Metrics of the whole update: metric name -> value."""
    gap: dict[str, float] | None = None
    """Sampler/trainer log-prob difference, if the log-probs stage did not compute it."""

    @property
    def result(self) -> State:
        """State after the update."""
        return State(role=self.role, step=self.step, updates=self.updates, lineage=self.lineage)

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), **gap_metrics(self.gap or {})}


def gap_metrics(gap: dict[str, float]) -> dict[str, float]:
    """Return the sampler/trainer log-prob difference as metrics."""
    return {metric_registry.named("mismatch", name): value for name, value in sorted(gap.items())}
