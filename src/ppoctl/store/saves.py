"""Saves in flight: states that are written while training goes on, and are believed when their manifest is there.

begin --> files are written aside --> settle (between pieces of work) --> published
                                      finish (before the next save, and when the run stops)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ppoctl.activity import ACTIVITIES
from ppoctl.ports import Gate, Saving, Trainer
from ppoctl.store.artifact import Draft
from ppoctl.store.manifest import Manifest


@dataclass
class InFlight:
    """One state on its way to disk."""

    draft: Draft
    manifest: Manifest
    """Manifest of the state, without its files."""
    saving: Saving
    started: float
    """Time at which the save started, by `time.monotonic`, in seconds."""
    waited_s: float
    """Seconds for which training has stood still for the save."""


@dataclass
class Saves:
    """Saves in flight, at most one for each role."""

    notify: Callable[[str], None]
    in_background: bool
    _in_flight: dict[str, InFlight] = field(default_factory=dict)

    def begin(self, draft: Draft, manifest: Manifest, engine: Trainer) -> None:
        """Start to save the engine's state as `draft`. It returns when all of it is written or, in the background,
        when training may go on.

        Raises StorageError, SupersededError.
        """
        name = manifest.stage
        assert name not in self._in_flight, f"another save of {name} is in flight"
        started = time.monotonic()
        with draft.work():
            draft.open()
            saving = engine.save(draft.aside, in_background=self.in_background)
        flight = InFlight(draft, manifest, saving, started, waited_s=time.monotonic() - started)
        self._in_flight[name] = flight
        if not self.in_background:
            self._publish(flight)

    def settle(self) -> None:
        """Publish the saves that are written by now. Raises StorageError where writing failed."""
        for flight in list(self._in_flight.values()):
            if flight.saving.is_written():
                self._publish(flight)

    def finish(self) -> None:
        """Wait for all saves and publish them. Raises StorageError."""
        for flight in list(self._in_flight.values()):
            self._publish(flight)

    def _publish(self, flight: InFlight) -> None:
        manifest, began = flight.manifest, time.monotonic()
        del self._in_flight[manifest.stage]
        with ACTIVITIES.track(f"saving the {manifest.stage.removeprefix('state/')}"), flight.draft.work():
            files = flight.saving.finish()
            flight.draft.publish(replace(manifest, seconds=time.monotonic() - flight.started), files)
        now = time.monotonic()
        role, waited_s = manifest.stage.removeprefix("state/"), flight.waited_s + now - began
        self.notify(
            f"saved {role} at step {manifest.step} in {now - flight.started:.2f} s; training waited {waited_s:.2f} s"
        )


@dataclass(frozen=True)
class PublishingGate:
    """The gate of a job that saves behind its work: what is written by now is published, and then `asked` decides."""

    saves: Saves
    asked: Gate

    def before(self, step: int, stage: str) -> None:
        self.saves.settle()
        self.asked.before(step, stage)

    def between(self) -> None:
        self.saves.settle()
        self.asked.between()

    def may_save(self) -> bool:
        return self.asked.may_save()
