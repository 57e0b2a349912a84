"""Time use of a run's attempts: work that the run kept, work that was lost, and startup. Imports no torch.

The only source is the journal, so that the time use can be computed on a login node.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ppoctl.store.journal import JournalLine


@dataclass(frozen=True)
class AttemptTime:
    """Time use of one attempt. The rest of `wall_s` was spent on saving, on evaluation, and between stages."""

    attempt: int
    gpus: int
    """GPUs that the attempt held; 0: it used CPUs, or its version of ppoctl did not record them."""
    wall_s: float
    """Seconds from the attempt's start to its end, or to its last journal line if it is running or was killed."""
    kept_s: float
    """Seconds of the attempt's stages whose results the run has."""
    starting_s: float
    """Seconds in which engines, trainers or Ray started or loaded a state; 0 if the attempt recorded no end."""
    lost_s: float
    """Seconds of work whose results the run does not have: abandoned stages, stages that were dropped and run again,
    and replayed updates. The last stage of a killed attempt is not included, because its time was not recorded."""

    @property
    def kept_gpu_hours(self) -> float:
        return self.gpus * self.kept_s / 3600

    @property
    def lost_gpu_hours(self) -> float:
        return self.gpus * self.lost_s / 3600


def attempt_times(lines: Iterable[JournalLine]) -> list[AttemptTime]:
    """Return the time use of each attempt in the lines of a journal, oldest first."""
    lines = list(lines)
    starts = {line["attempt"]: line for line in lines if line.get("event") == "attempt_started"}
    return [_attempt_time(number, start, lines) for number, start in starts.items()]


def _attempt_time(number: int, start: JournalLine, lines: list[JournalLine]) -> AttemptTime:
    own = [line for line in lines if line.get("attempt") == number]
    end = next((line for line in own if line.get("event") == "attempt_ended"), {})
    last_seq = {(line["step"], line["stage"]): line["seq"] for line in lines if "stage" in line}
    work = [line for line in own if "stage" in line]
    kept = [line["seconds"] for line in work if last_seq[line["step"], line["stage"]] == line["seq"]]
    dropped_s = sum(line["seconds"] for line in work) - sum(kept)
    return AttemptTime(
        attempt=number,
        gpus=start.get("gpus", 0),
        wall_s=max(line["at"] for line in own) - start["at"],
        kept_s=sum(kept),
        starting_s=end.get("starting_s", 0.0),
        lost_s=dropped_s + end.get("abandoned_s", 0.0) + end.get("replayed_s", 0.0),
    )
