"""Saves in flight: states that are written while training continues, and are valid once their manifest exists.

begin --> files are written to a draft --> settle (between stages and samples) --> published
                                           finish (before the next save, and when the run stops)
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ppoctl.core.activity import ACTIVITIES
from ppoctl.core.errors import StorageError
from ppoctl.core.ports import Gate, Saving, Trainer
from ppoctl.core.step_metrics import SAVED
from ppoctl.store.artifact import Draft
from ppoctl.store.journal import Journal
from ppoctl.store.manifest import Manifest


@dataclass
class InFlight:
    """A state that is being written to disk."""

    draft: Draft
    manifest: Manifest
    """Manifest of the state, without its files."""
    saving: Saving
    started: float
    """Start time of the save, in seconds of `time.monotonic`."""
    waited_s: float
    """Seconds for which training waited for the save."""


@dataclass
class Saves:
    """Saves in flight, at most one for each role."""

    notify: Callable[[str], None]
    in_background: bool
    journal: Journal
    _in_flight: dict[str, InFlight] = field(default_factory=dict)

    def begin(self, draft: Draft, manifest: Manifest, engine: Trainer) -> None:
        """Start to save the trainer's state as `draft`.

        Returns when the state is written; if saves run in the background, as soon as training may continue. Raises
        StorageError, SupersededError.
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
        """Publish the saves that are completely written. Raises StorageError if writing failed."""
        for flight in list(self._in_flight.values()):
            if flight.saving.is_written():
                self._publish(flight)

    def finish(self) -> None:
        """Wait for all saves and publish them. Raises StorageError."""
        for flight in list(self._in_flight.values()):
            self._publish(flight)

    def _publish(self, flight: InFlight) -> None:
        manifest, began = flight.manifest, time.monotonic()
        # First: a save that fails is not finished again when the run stops.
        del self._in_flight[manifest.stage]
        with ACTIVITIES.track(f"saving the {manifest.stage.removeprefix('state/')}"), flight.draft.work():
            files = flight.saving.finish()
            flight.draft.publish(replace(manifest, seconds=time.monotonic() - flight.started), files)
        now, role = time.monotonic(), manifest.stage.removeprefix("state/")
        seconds, waited_s = now - flight.started, flight.waited_s + now - began
        self.notify(f"saved {role} at step {manifest.step} in {seconds:.2f} s; training waited {waited_s:.2f} s")
        with suppress(StorageError):  # the state is saved, and the next commit reports a problem of the journal
            self.journal.event(SAVED, step=manifest.step, role=role, seconds=seconds, waited_s=waited_s)


@dataclass(frozen=True)
class PublishingGate:
    """Gate of a run that saves in the background. The gate publishes finished saves, then calls the gate `asked`."""

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
