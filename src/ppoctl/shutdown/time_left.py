"""What a job may still do before it is ended: how long its work has taken so far, held against the time there is."""

import signal
from collections.abc import Callable
from dataclasses import dataclass

KILL_WAIT_S = 30.0
"""Seconds between Slurm's SIGTERM and its SIGKILL (`KillWait`): what it is where a cluster sets nothing else. A
longer one is time not used, a shorter one costs the stage that is running."""

ENDING_S = 5.0
"""Seconds that a commit and the end of the process are taken to need."""


def unknown(*_: object) -> None:
    """Nobody knows."""


@dataclass(frozen=True)
class TimeLeft:
    """What is known of a job's time. Seconds are those of work, without the start of engines."""

    stage_s: Callable[[str], float | None] = unknown
    """Seconds that a stage of this name takes; None: this run has committed none."""
    draws: Callable[[str], object] = unknown
    """Whether a stage of this name keeps what it has finished, and so may begin and stop at any time."""
    save_s: Callable[[], float | None] = unknown
    """Seconds that saving the states of all roles takes; None: this run has saved none."""
    longest_s: Callable[[], float] = float
    """Seconds of the longest stage of the last step."""
    is_job: bool = False
    """Whether Slurm ends the process some time after it was told."""
    ends_at: float | None = None
    """Time at which the job is ended, in unix seconds; None: nobody says."""

    def until(self, received: int, now: float) -> float | None:
        """Time by which the process must have ended after this signal; None: nobody ends it."""
        if self.is_job and received in (signal.SIGTERM, signal.SIGHUP):
            return now + KILL_WAIT_S
        return self.ends_at

    def lacks_s(self, stage: str, now: float) -> float | None:
        """Seconds that the stage and a save after it are expected to need, where these are more than there are; None:
        there is time enough, or nobody knows."""
        expected = None if self.ends_at is None or self.draws(stage) else self.stage_s(stage)
        if self.ends_at is None or expected is None:
            return None
        needed = expected + (self.save_s() or 0.0) + ENDING_S
        return needed if now + needed > self.ends_at else None

    def has_time_to_save(self, until: float | None, now: float) -> bool:
        """Whether the states of all roles can be saved by then. Before there was a save, where twice the longest
        stage of the last step would fit."""
        if until is None:
            return True
        expected = self.save_s()
        return now + (2 * self.longest_s() if expected is None else expected) + ENDING_S <= until
