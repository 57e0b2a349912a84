"""Remaining time of a job, and whether a stage or a save fits into that time, estimated from earlier durations."""

import signal
from collections.abc import Callable
from dataclasses import dataclass

KILL_WAIT_S = 30.0
"""Seconds between Slurm's SIGTERM and its SIGKILL (`KillWait`); this is Slurm's default.

If a cluster's value is larger, some time is not used; if it is smaller, the running stage may be lost.
"""

ENDING_S = 5.0
"""Assumed seconds for a commit and the end of the process."""


def unknown(*_: object) -> None:
    """Return None: the value is not known."""


@dataclass(frozen=True)
class TimeLeft:
    """Known durations of a run, and the end of its job. Durations do not include the start of engines."""

    stage_s: Callable[[str], float | None] = unknown
    """Seconds that a stage of this name takes; None: this run has not committed one."""
    draws: Callable[[str], object] = unknown
    """Whether a stage of this name generates. Such a stage keeps finished samples, so it may stop at any time."""
    save_s: Callable[[], float | None] = unknown
    """Seconds that saving the states of all roles takes; None: this run has not saved any."""
    longest_s: Callable[[], float] = float
    """Seconds of the longest stage of the last step."""
    is_job: bool = False
    """Whether the process is in a Slurm job: Slurm kills it some time after the signal."""
    ends_at: float | None = None
    """Time at which Slurm ends the job, in unix seconds; None: not known, or no limit."""

    def until(self, received: int, now: float) -> float | None:
        """Return the time by which the process must have ended after the signal `received`; None: no deadline."""
        if self.is_job and received in (signal.SIGTERM, signal.SIGHUP):
            return now + KILL_WAIT_S
        return self.ends_at

    def lacks_s(self, stage: str, now: float) -> float | None:
        """Return the expected seconds of the stage and a save after it, if the remaining time is shorter.

        None: there is enough time, or the durations are not known.
        """
        expected = None if self.ends_at is None or self.draws(stage) else self.stage_s(stage)
        if self.ends_at is None or expected is None:
            return None
        needed = expected + (self.save_s() or 0.0) + ENDING_S
        return needed if now + needed > self.ends_at else None

    def has_time_to_save(self, until: float | None, now: float) -> bool:
        """Return whether the states of all roles can be saved before the time `until`.

        Before the first save, its duration is assumed to be twice that of the longest stage of the last step.
        """
        if until is None:
            return True
        expected = self.save_s()
        return now + (2 * self.longest_s() if expected is None else expected) + ENDING_S <= until
