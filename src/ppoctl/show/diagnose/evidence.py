"""The sample that shows a symptom."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ppoctl.core.errors import PpoctlError, quoted
from ppoctl.show.diagnose.curves import Shown, Symptom
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.sample_query import Source
from ppoctl.store.stored_samples import SampleRow

_ORDER: Mapping[Shown, Callable[[SampleRow], float]] = {
    "worst": lambda row: -(row.score or 0.0),
    "best": lambda row: row.score or 0.0,
    "longest": lambda row: row.tokens,
}


@dataclass(frozen=True)
class Evidence:
    """A sample of a step, and the command that shows it."""

    step: int
    row: int
    prompt: str
    command: str


def evidence(run: RecordedRun, found: Symptom) -> Evidence | None:
    """Return the sample that shows a symptom; None if samples do not show it, or if no records are left.

    Records of old steps are removed, so that the sample is from the first step since the symptom began that has
    records.
    """
    if found.sample is None:
        return None
    source = Source(run)
    step = next((step for step in source.steps() if step >= found.step), None)
    if step is None:
        return None
    try:
        found_row = max(source.rows(step), key=_ORDER[found.sample])
    except PpoctlError:  # the records are being written or removed
        return None
    row = found_row.row
    command = f"ppoctl show {quoted(run.paths.root)} --step {step} --sample {row}"
    return Evidence(step, row, found_row.prompt_id, command)
