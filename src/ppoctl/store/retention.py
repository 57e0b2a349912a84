"""Deletion of old artifacts.

The last healthy states are kept, and the artifacts that a run requires to continue from a kept state.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppoctl.core.errors import CorruptArtifactError
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import Attempt
from ppoctl.store.outline import Outlines
from ppoctl.store.rounds import stages_present
from ppoctl.store.run_paths import RunPaths


def is_healthy(paths: RunPaths, roles: Sequence[str], step: int) -> bool:
    """Return whether no health rule stopped the run at this saved step."""
    return all(extra.get("healthy", True) for extra in extras_of(paths, roles, step))


def extras_of(paths: RunPaths, roles: Sequence[str], step: int) -> list[dict[str, Any]]:
    """Return the `extra` field of the manifests of a saved step's states, one for each role."""
    return [manifests.require(paths.state(role, step)).extra for role in roles]


def healthy_steps(paths: RunPaths, roles: Sequence[str]) -> list[int]:
    """Return the saved steps at which no health rule stopped the run, oldest first."""
    return [step for step in paths.saved_steps(*roles) if is_healthy(paths, roles, step)]


LEAST_KEPT = 2
"""Number of newest checkpoints whose steps stay complete if all states are kept."""


@dataclass
class Retention:
    """Deletion of old states, and of step folders that are not needed to restore a kept state.

    States older than the last `keep_last` healthy saved steps are deleted. A step that was saved only because the run
    was stopped does not count as one of these steps. Neither does a step of which only some roles were saved. The
    states of both are deleted when later states are saved. Step folders up to the oldest kept state are deleted, but
    the rollouts of every `keep_rollouts_every_steps`-th step are kept for inspection. A record that a later step
    reads is kept as long as a run can continue before that step from kept states, or the rollouts of that step are
    kept. Each process handles a folder once, so that the time of a step does not grow with the length of the run.
    Only the last folders up to the oldest kept state are handled again, if later steps read their records.
    """

    attempt: Attempt
    outlines: Outlines
    keep_last: int | None
    """Number of healthy saved steps whose states are kept; None: no state is deleted."""
    keep_rollouts_every_steps: int
    _retired: int = 0
    """Last step whose folder was handled."""

    def apply(self) -> list[int]:
        """Delete the artifacts that are no longer needed. Returns the steps whose folders were handled."""
        paths = self.attempt.paths
        count = self.keep_last or LEAST_KEPT
        kept, stopped_at = self._newest_healthy(count)
        if kept or stopped_at:
            self.drop_kept_at_stop(max(*kept, *stopped_at, 0))
        oldest_kept = kept[-1] if len(kept) == count else 0
        if self.keep_last is not None:
            stopped_at += self._partly_saved()
            self._drop_states([step for step in stopped_at if step < max(kept, default=0)], before=oldest_kept)
        retired = [step for step in range(self._retired + 1, oldest_kept + 1) if paths.step(step).is_dir()]
        saved = paths.saved_steps(*self.outlines.roles) if retired and self.outlines.reaches_back else []
        for step in retired:
            self._retire(step, saved)
        # The states of the oldest kept step are deleted later, and then the records that later steps read.
        self._retired = max(self._retired, oldest_kept - self.outlines.reaches_back)
        return retired

    def _newest_healthy(self, count: int) -> tuple[list[int], list[int]]:
        """Return the newest `count` healthy saved steps, and the steps since the oldest of these that a stop saved.

        Both lists are newest first. A step that was saved only because of a stop is not in the first list.
        """
        kept: list[int] = []
        stopped_at: list[int] = []
        for step in reversed(self.attempt.paths.saved_steps(*self.outlines.roles)):
            if len(kept) == count:
                break
            extras = extras_of(self.attempt.paths, self.outlines.roles, step)
            if all(extra.get("healthy", True) for extra in extras):
                (stopped_at if any(extra.get("at_stop", False) for extra in extras) else kept).append(step)
        return kept, stopped_at

    def _partly_saved(self) -> set[int]:
        """Return the steps whose states are saved for some roles only, because a second stop ended the save."""
        paths, roles = self.attempt.paths, self.outlines.roles
        return {step for role in roles for step in paths.saved_steps(role)} - {*paths.saved_steps(*roles)}

    def _drop_states(self, steps: Sequence[int], *, before: int) -> None:
        """Delete the states of `steps`, and of all steps before `before`."""
        paths = self.attempt.paths
        for role in self.outlines.roles:
            for step in paths.saved_steps(role):
                if step < before or step in steps:
                    self.attempt.remove(paths.state(role, step))

    def drop_kept_at_stop(self, saved: int) -> None:
        """Delete the `at-stop` states of steps up to `saved`, since states of that step are or will be saved."""
        for role in self.outlines.roles:
            self._drop(self.attempt.paths.at_stop / role, saved)

    def drop_all_kept_at_stop(self) -> None:
        """Delete all `at-stop` states, after the last step was saved."""
        self.attempt.remove(self.attempt.paths.at_stop)

    def _drop(self, folder: Path, saved: int) -> None:
        try:
            manifest = manifests.read(folder)
        except CorruptArtifactError:
            self.attempt.remove(folder)
        else:
            if manifest is not None and manifest.step <= saved:
                self.attempt.remove(folder)

    def _is_inspected(self, step: int) -> bool:
        """Whether the rollouts of the step are kept for inspection."""
        every = self.keep_rollouts_every_steps
        return every > 0 and step % every == 0

    def _is_read(self, step: int, stage: str, saved: Collection[int]) -> bool:
        """Whether a step that can still run, or whose rollouts are kept, reads the record."""
        return any(
            self._is_inspected(later) or any(step <= start < later for start in saved)
            for later in self.outlines.readers(step, stage)
        )

    def _retire(self, step: int, saved: Collection[int]) -> None:
        """Delete the records of a step that are not kept. A run can continue from the steps `saved`."""
        is_kept = self._is_inspected(step)
        for stage in stages_present(self.attempt.paths, step, self.outlines.at(step)):
            is_deleted = not is_kept or stage.entry.trains is not None
            if is_deleted and not self._is_read(step, stage.entry.name, saved):
                self.attempt.remove(self.attempt.paths.stage(step, stage.name))
        for folder in self.attempt.paths.all_parts(step):
            self.attempt.remove(folder)
        folder = self.attempt.paths.step(step)
        if not any(folder.iterdir()):
            self.attempt.remove(folder)
