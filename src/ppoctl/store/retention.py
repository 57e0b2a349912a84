"""Deletion of old artifacts: never the last healthy state, never an artifact that some kept state still needs to go
on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppoctl.errors import CorruptArtifactError
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import Attempt
from ppoctl.store.layout import RunLayout
from ppoctl.store.outline import Outlines


def saved_steps(layout: RunLayout, roles: Sequence[str]) -> list[int]:
    """Steps at which every one of the roles has a committed state, oldest first."""
    return sorted(set.intersection(*(set(layout.saved_steps(role)) for role in roles)))


def is_healthy(layout: RunLayout, roles: Sequence[str], step: int) -> bool:
    """Whether no health rule stopped the run at this step, of which the states are saved."""
    found = [manifests.read(layout.state(role, step)) for role in roles]
    return all(item is not None and bool(item.extra.get("healthy", True)) for item in found)


def healthy_steps(layout: RunLayout, roles: Sequence[str]) -> list[int]:
    """Saved steps at which no health rule stopped the run, oldest first."""
    return [step for step in saved_steps(layout, roles) if is_healthy(layout, roles, step)]


@dataclass
class Retention:
    """Deletes states older than those of the last `keep_last` healthy steps, and step folders that no kept state
    needs.

    Steps up to the oldest kept state are not needed to restore anything; a sample of them keeps what people look at.
    A folder is looked at once by each process, so that a step costs the same however long the run is.
    """

    attempt: Attempt
    outlines: Outlines
    keep_last: int
    keep_rollouts_every_steps: int
    _retired: int = 0
    """Last step whose folder has been looked at."""

    def apply(self) -> list[int]:
        """Delete what may go by now. Returns the steps whose folders were looked at."""
        layout = self.attempt.layout
        healthy = healthy_steps(layout, self.outlines.roles)
        if healthy:
            self.drop_kept_at_stop(healthy[-1])
        if len(healthy) < self.keep_last:
            return []
        oldest_kept = healthy[-self.keep_last]
        for role in self.outlines.roles:
            for step in layout.saved_steps(role):
                if step < oldest_kept:
                    self.attempt.remove(layout.state(role, step))
        gone = [step for step in range(self._retired + 1, oldest_kept + 1) if layout.step(step).is_dir()]
        for step in gone:
            self._retire(step)
        self._retired = max(self._retired, oldest_kept)
        return gone

    def drop_kept_at_stop(self, saved: int) -> None:
        """Delete what a stop left of steps up to one that is saved, or is about to be: engines are past it."""
        for role in self.outlines.roles:
            self._drop(self.attempt.layout.at_stop / role, saved)

    def _drop(self, folder: Path, saved: int) -> None:
        try:
            manifest = manifests.read(folder)
        except CorruptArtifactError:
            self.attempt.remove(folder)
        else:
            if manifest is not None and manifest.step <= saved:
                self.attempt.remove(folder)

    def _retire(self, step: int) -> None:
        every = self.keep_rollouts_every_steps
        is_kept = every > 0 and step % every == 0
        for stage in self.outlines.at(step).stages:
            if not is_kept or stage.trains is not None:
                self.attempt.remove(self.attempt.layout.stage(step, stage.name))
        for folder in self.attempt.layout.all_parts(step):
            self.attempt.remove(folder)
        folder = self.attempt.layout.step(step)
        if not any(folder.iterdir()):
            self.attempt.remove(folder)
