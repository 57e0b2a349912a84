"""Saved states, and the redo log between them: the `Models` port.

Callers request a trainer at a given state. If the trainer is at another state, `States` loads the nearest ancestor
of the requested state: the resident state, a saved state, or the model source. `States` then replays the updates
that were recorded after this ancestor, from their committed inputs.

    source --update--> s1 --update--> s2 [saved] --update--> s3 --update--> s4   <- requested
                                      load s2,    replay,          replay
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from ppoctl.core.activity import preparing
from ppoctl.core.batch.records import Carry, State, Update
from ppoctl.core.errors import CorruptArtifactError, StorageError, quoted
from ppoctl.core.ports import Actor, Critic, Trainer
from ppoctl.store import artifact
from ppoctl.store import manifest as manifests
from ppoctl.store.artifact import Draft
from ppoctl.store.attempt import Attempt
from ppoctl.store.manifest import Manifest
from ppoctl.store.outline import Outlines
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.saves import Saves
from ppoctl.store.stage_runner import Observer, load_record, moments

Replay = Callable[[int, str, State], Update]
"""(step, role, parent) -> the replayed update. The trainer is at `parent` before the call, and at the state after
the update when the call returns."""

INEXACT_TOLERANCE = 1e-3
"""Largest relative difference between a recorded and a replayed metric that the order of a GPU's reductions can
cause. If the difference is larger, the replay computed another update."""


def no_listener(text: str) -> None:
    """Do nothing: the default of `States.notify`."""


@dataclass
class Resident:
    """The state that a role's trainer holds."""

    state: State | None = None
    """State of the trainer; None: not known."""
    replay: int = 0
    """Number of inexact replays among the updates from the model source to this state."""

    @property
    def lineage(self) -> str | None:
        return None if self.state is None else self.state.lineage


@dataclass(frozen=True)
class Recorded:
    """Lengths of the journal and the ledger when a state was saved. A file that is shorter later was truncated."""

    journal_seq: int
    ledger_bytes: int
    at_stop: bool = False
    """Whether the step was saved only because the run was stopped after it."""


@dataclass
class States:
    """States of all roles of one run."""

    paths: RunPaths
    outlines: Outlines
    attempt: Attempt
    engines: Mapping[str, Trainer]
    initial: Mapping[str, State]
    layouts: Mapping[str, Mapping[str, Any]]
    """For each role, the layout of its saved states, and the layouts under which they can be loaded."""
    saves: Saves
    versions: dict[str, str]
    replay: Replay | None = None
    """Function that replays an update. `wire` sets it after the stages are built, since it runs an update stage."""
    observers: tuple[Observer, ...] = ()
    notify: Callable[[str], None] = no_listener
    """Receives a message for each save, restore and replay."""
    verified: frozenset[str] = frozenset()
    """Folders of states whose files were verified when the run was opened, as paths relative to the run directory."""
    replayed_s: float = 0.0
    """Seconds spent on replays."""
    _verified_at_stop: dict[str, str] = field(default_factory=dict)
    """Role -> lineage of a state in `at_stop` whose files were compared with its manifest."""
    _resident: dict[str, Resident] = field(default_factory=lambda: defaultdict(Resident))

    def actor_at(self, state: State) -> Actor:
        """Return the actor's trainer, with exactly this state's weights and optimizer."""
        return cast(Actor, self._bring(state))

    def critic_at(self, state: State) -> Critic:
        """Return the critic's trainer, with exactly this state's weights and optimizer."""
        return cast(Critic, self._bring(state))

    def stamped(self, state: State) -> State:
        """Bring the trainer to the state, and return the state with the number of inexact replays that led to it."""
        self._bring(state)
        return replace(state, replay=self._resident[state.role].replay)

    @contextmanager
    def advancing(self, state: State, *, to: State) -> Iterator[Trainer]:
        """Yield the trainer at `state`, to be trained to `to`. After an error, the trainer is at no known state."""
        engine = self._bring(state)
        self._resident[state.role].state = None
        yield engine
        self._resident[state.role].state = to

    def take_up(self, state: State) -> None:
        """Bring the trainer to a state that was saved in `at-stop`, so that the state's folder can be deleted."""
        if self._kept_at_stop(state) is not None:
            self._bring(state)

    def replays(self, role: str) -> int:
        """Return how many of the replays that led to the resident state were not bit-equal."""
        return self._resident[role].replay

    def save(self, state: State, carry: Carry, metrics: dict[str, float], lines: Recorded, *, healthy: bool) -> None:
        """Commit the state, at once or in the background (see `Saves`). Do nothing if the state is committed.

        The caller must first finish an earlier save of the role. `metrics` are the step's metrics, for the manifest.
        Raises StorageError if the folder has another state.
        """
        folder = self.paths.state(state.role, state.step)
        existing = manifests.read(folder)
        if existing is not None:
            if existing.identity != state.lineage:
                raise StorageError(
                    f"`{folder}` has a state that is not the result of step {state.step}",
                    hint=f"remove it and resume: rm -r {quoted(folder)}",
                )
            return
        draft = self._draft(folder, state)
        extra = {
            "updates": state.updates,
            "carry": carry.as_dict(),
            "healthy": healthy,
            "layout": dict(self.layouts[state.role]),
            **asdict(lines),
        }
        saved = self._saved_before(state)
        if saved is not None:
            extra["replay"] = saved[1].extra["replay"]
            manifest = replace(self._manifest(f"state/{state.role}", state, extra), figures=metrics)
            manifest = replace(manifest, seconds=saved[1].seconds)  # the duration of a real save, for estimates
            with draft.work():
                draft.open()
                artifact.link_files(saved[0], draft.aside)
                draft.publish(manifest, saved[1].files)
            return
        engine = self._bring(state)
        extra["replay"] = self.replays(state.role)
        manifest = replace(self._manifest(f"state/{state.role}", state, extra), figures=metrics)
        self.saves.begin(draft, manifest, engine)

    def _saved_before(self, state: State) -> tuple[Path, Manifest] | None:
        """Return the earlier step's folder that has the same state: a critic-only step does not change the actor."""
        for step in self.paths.saved_steps(state.role):
            folder = self.paths.state(state.role, step)
            manifest = manifests.read(folder)
            if manifest is not None and manifest.identity == state.lineage:
                same_layout = manifest.extra["layout"] == dict(self.layouts[state.role])
                return (folder, manifest) if same_layout else None
        return None

    def is_at(self, state: State) -> bool:
        """Return whether the role's trainer is at the state, or the state is saved."""
        return self._resident[state.role].lineage == state.lineage or self._saved_before(state) is not None

    def _is_saved(self, state: State) -> bool:
        return self._folder_of(state) is not None or self._saved_before(state) is not None

    def _at_source(self, state: State) -> bool:
        return state.lineage == self.initial[state.role].lineage

    def keep_residents(self) -> list[str]:
        """Save to `states/at-stop` the resident states that are not saved but whose update is committed.

        The next attempt loads them instead of replaying updates. Returns their roles. Raises StorageError.
        """
        kept: list[str] = []
        for role in self.outlines.roles:
            state = self._resident[role].state
            if state is None or self._at_source(state) or self._is_saved(state):
                continue
            if self._update_that_made(state) is None:
                continue  # the update that led to the state was not committed
            extra = {"updates": state.updates, "layout": dict(self.layouts[role]), "replay": self.replays(role)}
            draft, began = self._draft(self.paths.at_stop / role, state), time.monotonic()
            with draft.work():
                draft.open()
                files = self.engines[role].save(draft.aside, in_background=False).finish()
                manifest = replace(self._manifest(f"at-stop/{role}", state, extra), seconds=time.monotonic() - began)
                draft.publish(manifest, files, in_place_of=True)
            self.notify(f"kept {role} at step {state.step}")
            kept.append(role)
        return kept

    def reshard(self, step: int) -> list[str]:
        """Save the states of this step again if they were saved as reshardable `dp` and the recipe sets `full`.

        After a kill between the removal of the old state and the publication of the new state, the state is replayed
        from the redo log. Returns the roles whose states were saved.
        """
        resharded: list[str] = []
        for role in self.outlines.roles:
            folder, layout = self.paths.state(role, step), dict(self.layouts[role])
            manifest = manifests.read(folder)
            if manifest is None:
                continue
            if (manifest.extra["layout"]["reshardable"], layout["reshardable"]) != ("dp", "full"):
                continue
            state = saved_state(self.paths, role, step)[0]
            engine = self._bring(state)
            again = replace(manifest, attempt=self.attempt.number, extra={**manifest.extra, "layout": layout})
            draft = self._draft(folder, state)
            with draft.work():
                draft.open()
                draft.publish(again, engine.save(draft.aside, in_background=False).finish(), in_place_of=True)
            self.notify(f"saved {role} at step {step} again, so that it can be loaded under any layout")
            resharded.append(role)
        return resharded

    def _draft(self, folder: Path, state: State) -> Draft:
        return Draft(folder, self.attempt, moments(self.observers, state.step, f"state/{state.role}"))

    def _manifest(self, stage: str, state: State, extra: Mapping[str, Any]) -> Manifest:
        return manifests.of_state(stage, state, extra, self.attempt.number, self.versions)

    def _bring(self, state: State) -> Trainer:
        resident = self._resident[state.role]
        engine = self.engines[state.role]
        if resident.lineage == state.lineage:
            return engine
        with preparing(f"loading the {state.role}") as act:
            start, updates = self._path_to(state)
            if resident.lineage != start.lineage:
                # Until the load ends, the trainer is at no known state.
                resident.state = None
                self._start_from(start, engine)
                resident.state = start
            began = time.monotonic()
            if updates:
                act.what, act.total = f"replaying updates of the {state.role}", len(updates)
            for recorded in updates:
                self._replay_one(recorded)
                act.done += 1
            self.replayed_s += time.monotonic() - began if updates else 0.0
        return engine

    def _path_to(self, state: State) -> tuple[State, list[Update]]:
        """Return the nearest ancestor that is available, and the updates from it to `state`, oldest first."""
        ancestor, updates = state, list[Update]()
        while not self._at_hand(ancestor):
            update = self._update_that_made(ancestor)
            if update is None:
                raise StorageError(
                    f"no saved state and no recorded update leads to {ancestor.stamp}",
                    hint=f"list the run's artifacts: ppoctl resume {quoted(self.paths.root)} --plan",
                )
            updates.append(update)
            # Every step includes all roles, so a parent is one step back (the lineage identifies the initial state).
            ancestor = State(role=ancestor.role, step=update.step - 1, updates=0, lineage=update.parent)
        return ancestor, updates[::-1]

    def _at_hand(self, state: State) -> bool:
        if self._at_source(state) or state.lineage == self._resident[state.role].lineage:
            return True
        return self._folder_of(state) is not None

    def _folder_of(self, state: State) -> Path | None:
        """Return the folder from which the state can be loaded; None: there is none."""
        folder = self.paths.state(state.role, state.step)
        manifest = manifests.read(folder)
        return folder if manifest is not None and manifest.identity == state.lineage else self._kept_at_stop(state)

    def _kept_at_stop(self, state: State) -> Path | None:
        """Return the folder of the state if `keep_residents` saved it; None: it did not.

        A damaged folder is deleted, since its state can also be replayed.
        """
        folder = self.paths.at_stop / state.role
        try:
            manifest = manifests.read(folder)
            if manifest is None or manifest.identity != state.lineage:
                return None
            if manifest.extra["layout"] != dict(self.layouts[state.role]):
                return None
            if self._verified_at_stop.get(state.role) != state.lineage:
                manifests.verify(folder, manifest)
                self._verified_at_stop[state.role] = state.lineage
        except CorruptArtifactError as error:
            self.notify(f"{error.message}; the state is computed again")
            self.attempt.remove(folder)
            return None
        return folder

    def _start_from(self, state: State, engine: Trainer) -> None:
        if self._at_source(state):
            engine.start()
            self._resident[state.role].replay = 0
            return
        folder = self._folder_of(state)
        assert folder is not None
        manifest = manifests.require(folder)
        if folder.parent != self.paths.at_stop and self.paths.inside(folder) not in self.verified:
            manifests.verify(folder, manifest)
        engine.load(folder)
        self._resident[state.role].replay = int(manifest.extra.get("replay", 0))
        self.notify(f"restored {state.role} at step {state.step}")

    def _replay_one(self, recorded: Update) -> None:
        assert self.replay is not None
        # The state that the update started from: schedules depend on `updates`, the order of rows on `step`.
        updates = recorded.updates - len(recorded.per_minibatch["lr"])
        parent = State(role=recorded.role, step=recorded.step - 1, updates=updates, lineage=recorded.parent)
        again = self.replay(recorded.step, recorded.role, parent)
        if again.lineage != recorded.lineage:
            raise StorageError(
                f"the {recorded.role} update of step {recorded.step} was recorded with other inputs or recipe keys",
                hint=f"list the run's artifacts: ppoctl resume {quoted(self.paths.root)} --plan",
            )
        gap = largest_gap(recorded.per_minibatch, again.per_minibatch)
        if gap > INEXACT_TOLERANCE:
            raise StorageError(
                f"the replay of {recorded.role} at step {recorded.step} differs from the recorded metrics "
                f"(relative difference {gap:.2g})",
                hint="resume with the versions, threads and layout of the manifest: "
                f"ppoctl show {quoted(self.paths.root)} --step {recorded.step} --manifest",
            )
        if gap > 0:
            self._resident[recorded.role].replay += 1
        self.notify(f"replayed {recorded.role} update of step {recorded.step} (largest difference {gap:.2g})")

    def _update_that_made(self, state: State) -> Update | None:
        """Return the recorded update that leads to a state; None: there is none.

        The search starts at the newest step and ends at the update, because older records may no longer exist.
        """
        for step in reversed([step for step in self.paths.committed_steps() if step <= state.step]):
            entry = self.outlines.at(step).training(state.role)
            manifest = None if entry is None else manifests.read(self.paths.stage(step, entry.name))
            if entry is not None and manifest is not None:
                update = load_record(self.paths, step, entry.name, manifest)
                assert isinstance(update, Update)
                if update.lineage == state.lineage:
                    return update
        return None


def largest_gap(recorded: Mapping[str, list[float | None]], again: Mapping[str, list[float | None]]) -> float:
    """Return the largest relative difference between two updates' losses, gradient norms and learning rates.

    The result is 0 only if all metrics are bit-equal; it is infinite if the updates have other metrics or another
    number of optimizer steps, or if a value is not finite.
    """
    if recorded == again:
        return 0.0
    # Fractions of tokens jump when a token crosses a bound; these three metrics change smoothly with the weights.
    smooth = ("loss", "grad_norm", "lr")
    if recorded.keys() != again.keys() or any(len(recorded[key]) != len(again[key]) for key in smooth):
        return math.inf
    gaps = [
        math.inf if a is None or b is None else abs(a - b) / max(abs(a), abs(b), 1e-6)
        for key in smooth
        for a, b in zip(recorded[key], again[key], strict=True)
    ]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0) or math.ulp(0.0)


def save_s(paths: RunPaths, roles: Sequence[str]) -> float | None:
    """Return the seconds that the last save of all these roles took; None: a role was never saved."""
    total_s = 0.0
    for role in roles:
        steps = paths.saved_steps(role)
        manifest = manifests.read(paths.state(role, steps[-1])) if steps else None
        if manifest is None or manifest.seconds == 0:  # 0: its version of ppoctl recorded no seconds
            return None
        total_s += manifest.seconds
    return total_s


def saved_state(paths: RunPaths, role: str, step: int) -> tuple[State, Carry]:
    """Return a saved state, and its carry. Raises CorruptArtifactError if the state is missing."""
    manifest = manifests.require(paths.state(role, step))
    state = State(role=role, step=step, updates=int(manifest.extra["updates"]), lineage=manifest.identity)
    return state, Carry(**manifest.extra["carry"])
