"""What may go: never the last healthy state, never an artifact that some kept state still needs to move on from."""

import shutil

from ppoctl.store import artifact
from ppoctl.store import manifest as manifests
from ppoctl.store.layout import READABLE_STAGES, ROLES, STAGES, RunLayout


def saved_pairs(layout: RunLayout) -> list[int]:
    """Steps at which both roles have a committed state, oldest first."""
    steps = [set(layout.saved_steps(role)) for role in ROLES]
    return sorted(set.intersection(*steps))


def is_healthy(layout: RunLayout, step: int) -> bool:
    """Whether no health rule stopped the run at the step of this saved pair."""
    found = [manifests.read(layout.state(role, step)) for role in ROLES]
    return all(item is not None and bool(item.extra.get("healthy", True)) for item in found)


class Retention:
    """Deletes states older than the last `keep_last` healthy pairs, and step folders that no kept pair needs.

    Steps up to the oldest kept pair are not needed to restore anything; a sample of them keeps what `show` reads. A
    folder is looked at once by each process, so that a step costs the same however long the run is.
    """

    def __init__(self, layout: RunLayout, keep_last: int, keep_rollouts_every_steps: int) -> None:
        self._layout = layout
        self._keep_last = keep_last
        self._keep_rollouts_every_steps = keep_rollouts_every_steps
        self._retired = 0
        """Steps up to this one have been looked at."""

    def apply(self) -> list[int]:
        """Delete what may go by now. Returns the steps whose folders were looked at."""
        layout = self._layout
        healthy = [step for step in saved_pairs(layout) if is_healthy(layout, step)]
        if len(healthy) < self._keep_last:
            return []
        oldest_kept = healthy[-self._keep_last]
        for role in ROLES:
            for step in layout.saved_steps(role):
                if step < oldest_kept:
                    artifact.remove(layout.state(role, step))
        gone = [step for step in range(self._retired + 1, oldest_kept + 1) if layout.step(step).is_dir()]
        for step in gone:
            self._retire(step)
        self._retired = max(self._retired, oldest_kept)
        return gone

    def _retire(self, step: int) -> None:
        every = self._keep_rollouts_every_steps
        keep = READABLE_STAGES if every > 0 and step % every == 0 else ("eval",)
        for stage in STAGES:
            if stage not in keep:
                artifact.remove(self._layout.stage(step, stage))
        shutil.rmtree(self._layout.parts(step), ignore_errors=True)
        folder = self._layout.step(step)
        if not any(folder.iterdir()):
            folder.rmdir()
