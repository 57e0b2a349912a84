"""Where the time of a run's attempts went: work that the run kept, work that was lost, and starting. Light.

All of it comes from the journal, so that a login node can tell it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ppoctl.store.journal import JournalLine


@dataclass(frozen=True)
class AttemptTime:
    """What became of the time of one attempt. The rest of `wall_s` went into saving, evaluating what was kept, and
    what lies between stages."""

    attempt: int
    gpus: int
    """GPUs that the attempt held; 0: it computed on CPUs, or is of a version that did not write them down."""
    wall_s: float
    """Seconds from its start to its end; of one that is at work or was killed, to the last line it wrote."""
    kept_s: float
    """Seconds of its stages whose results the run has."""
    starting_s: float
    """Seconds in which engines, trainers or Ray started or loaded a state; 0 where it has not written its end."""
    lost_s: float
    """Seconds of work that is not in the run: a stage that was not committed, one that was dropped and done again
    later, and updates that it replayed. What a killed attempt was at is not in it: nobody wrote it down."""

    @property
    def kept_gpu_hours(self) -> float:
        return self.gpus * self.kept_s / 3600

    @property
    def lost_gpu_hours(self) -> float:
        return self.gpus * self.lost_s / 3600


def attempt_times(lines: Iterable[JournalLine]) -> list[AttemptTime]:
    """The attempts that the lines of a journal tell of, oldest first."""
    lines = list(lines)
    starts = {line["attempt"]: line for line in lines if line.get("event") == "attempt_started"}
    return [_spent(number, start, lines) for number, start in starts.items()]


def _spent(number: int, start: JournalLine, lines: list[JournalLine]) -> AttemptTime:
    own = [line for line in lines if line.get("attempt") == number]
    end = next((line for line in own if line.get("event") == "attempt_ended"), {})
    counting = {(line["step"], line["stage"]): line["seq"] for line in lines if "stage" in line}  # the last one does
    work = [line for line in own if "stage" in line]
    kept = [line["seconds"] for line in work if counting[line["step"], line["stage"]] == line["seq"]]
    dropped_s = sum(line["seconds"] for line in work) - sum(kept)
    return AttemptTime(
        attempt=number,
        gpus=start.get("gpus", 0),
        wall_s=max(line["at"] for line in own) - start["at"],
        kept_s=sum(kept),
        starting_s=end.get("starting_s", 0.0),
        lost_s=dropped_s + end.get("abandoned_s", 0.0) + end.get("replayed_s", 0.0),
    )
