"""Saved states, and the redo log between them: the `Models` port.

An engine is asked to *be at* a state. If it is not there, the nearest ancestor is found (the resident state, a saved
one, or the model source), loaded, and the recorded updates are run again from committed inputs, marked as replays.

    source --update--> s1 --update--> s2 [saved] --update--> s3 --update--> s4   <- asked for
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

from ppoctl.activity import preparing
from ppoctl.batch.records import Carry, State, Update
from ppoctl.errors import CorruptArtifactError, StorageError, quoted
from ppoctl.ports import Actor, Critic, Trainer
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
"""(step, role, parent) -> the update as it came out this time; the engine is at `parent` before and at the next
state after."""

INEXACT_TOLERANCE = 1e-3
"""Relative difference of a replayed figure that a GPU's reductions may cause; more is another update."""


def no_listener(text: str) -> None:
    """Nobody listens."""


@dataclass
class Resident:
    """Where a role's engine is."""

    state: State | None = None
    """None: at no known one."""
    replay: int = 0

    @property
    def lineage(self) -> str | None:
        return None if self.state is None else self.state.lineage


@dataclass(frozen=True)
class Recorded:
    """How far the journal reached when a state was saved, and the ledger at the end of its step: shorter ones were
    cut since."""

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
    """How the states of each role are laid out, and under which layouts they can be loaded; for the record."""
    saves: Saves
    versions: dict[str, str]
    replay: Replay | None = None
    """Set by wire once the stages exist."""
    observers: tuple[Observer, ...] = ()
    notify: Callable[[str], None] = no_listener
    """Told of saves, restores and replays."""
    verified: frozenset[str] = frozenset()
    """Folders of states, within the run's, whose files were compared with their manifests when the run was opened."""
    replayed_s: float = 0.0
    """Seconds that went into replays."""
    _proven: dict[str, str] = field(default_factory=dict)
    """Role -> lineage of a state in `at_stop` whose files were compared with their manifest."""
    _resident: dict[str, Resident] = field(default_factory=lambda: defaultdict(Resident))

    def actor_at(self, state: State) -> Actor:
        """The actor engine, holding exactly this state's weights and optimizer."""
        return cast(Actor, self._bring(state))

    def critic_at(self, state: State) -> Critic:
        """The critic engine, holding exactly this state's weights and optimizer."""
        return cast(Critic, self._bring(state))

    def stamped(self, state: State) -> State:
        """The state with the number of inexact replays behind it, once its engine is there."""
        self._bring(state)
        return replace(state, replay=self._resident[state.role].replay)

    @contextmanager
    def advancing(self, state: State, *, to: State) -> Iterator[Trainer]:
        """The engine at `state`, about to be trained to `to`. If that fails, it is at no known state."""
        engine = self._bring(state)
        self._resident[state.role].state = None
        yield engine
        self._resident[state.role].state = to

    def take_up(self, state: State) -> None:
        """Bring the engine to the state where a stop left it, so that what it left may go."""
        if self._kept_at_stop(state) is not None:
            self._bring(state)

    def replays(self, role: str) -> int:
        """How many replays behind the resident state were not bit-equal."""
        return self._resident[role].replay

    def save(self, state: State, carry: Carry, figures: dict[str, float], lines: Recorded, *, healthy: bool) -> None:
        """Commit the state unless it is: at once, or in the background (see `Saves`; what is in flight of the role
        must be finished). `figures` are the step's, for the record."""
        folder = self.paths.state(state.role, state.step)
        existing = manifests.read(folder)
        if existing is not None:
            if existing.identity != state.lineage:
                raise StorageError(
                    f"`{folder}` holds another state than step {state.step} leads to",
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
            manifest = replace(self._manifest(f"state/{state.role}", state, extra), figures=figures)
            manifest = replace(manifest, seconds=saved[1].seconds)  # that a real save takes
            with draft.work():
                draft.open()
                artifact.link_files(saved[0], draft.aside)
                draft.publish(manifest, saved[1].files)
            return
        engine = self._bring(state)
        extra["replay"] = self.replays(state.role)
        manifest = replace(self._manifest(f"state/{state.role}", state, extra), figures=figures)
        self.saves.begin(draft, manifest, engine)

    def _saved_before(self, state: State) -> tuple[Path, Manifest] | None:
        """An earlier step's folder with the very same state: a critic-only step leaves the actor as it was."""
        for step in self.paths.saved_steps(state.role):
            folder = self.paths.state(state.role, step)
            manifest = manifests.read(folder)
            if manifest is not None and manifest.identity == state.lineage:
                same_layout = manifest.extra["layout"] == dict(self.layouts[state.role])
                return (folder, manifest) if same_layout else None
        return None

    def is_at(self, state: State) -> bool:
        """Whether the engine of the role is at the state, or the state is saved."""
        return self._resident[state.role].lineage == state.lineage or self._saved_before(state) is not None

    def _is_saved(self, state: State) -> bool:
        return self._folder_of(state) is not None or self._saved_before(state) is not None

    def _at_source(self, state: State) -> bool:
        return state.lineage == self.initial[state.role].lineage

    def keep_residents(self) -> list[str]:
        """Save the committed states that engines are at and that are saved nowhere, beside those of the steps: the
        next attempt loads them where it would replay. Returns the roles. Raises StorageError."""
        kept: list[str] = []
        for role in self.outlines.roles:
            state = self._resident[role].state
            if state is None or self._at_source(state) or self._is_saved(state):
                continue
            if self._update_that_made(state) is None:
                continue  # it was trained, and that was not committed
            extra = {"updates": state.updates, "layout": dict(self.layouts[role]), "replay": self.replays(role)}
            draft, began = self._draft(self.paths.at_stop / role, state), time.monotonic()
            with draft.work():
                draft.open()
                files = self.engines[role].save(draft.aside, in_background=False).finish()
                manifest = replace(self._manifest(f"at-stop/{role}", state, extra), seconds=time.monotonic() - began)
                draft.publish(manifest, files, in_place_of=True)
            self.notify(f"kept {role} as it is at step {state.step}")
            kept.append(role)
        return kept

    def reshard(self, step: int) -> list[str]:
        """Save the states of this step again, for any layout, where they are for some and the recipe asks for any.
        A kill between the old and the new one costs a replay: the redo log leads there again. Returns the roles."""
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
            self.notify(f"saved {role} at step {step} again, to be loaded under any layout")
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
        """The nearest ancestor that can be had at once, and the updates from there to `state`, oldest first."""
        here, updates = state, list[Update]()
        while not self._at_hand(here):
            update = self._update_that_made(here)
            if update is None:
                raise StorageError(
                    f"no saved state and no recorded update leads to {here.stamp}",
                    hint=f"see what is there: ppoctl resume {quoted(self.paths.root)} --plan",
                )
            updates.append(update)
            # All roles go through every step, so a parent is one step back (the initial state is known by lineage).
            here = State(role=here.role, step=update.step - 1, updates=0, lineage=update.parent)
        return here, updates[::-1]

    def _at_hand(self, state: State) -> bool:
        if self._at_source(state) or state.lineage == self._resident[state.role].lineage:
            return True
        return self._folder_of(state) is not None

    def _folder_of(self, state: State) -> Path | None:
        """Folder that the state can be loaded from."""
        folder = self.paths.state(state.role, state.step)
        manifest = manifests.read(folder)
        return folder if manifest is not None and manifest.identity == state.lineage else self._kept_at_stop(state)

    def _kept_at_stop(self, state: State) -> Path | None:
        """Folder of the state as `keep_residents` left it. One that is damaged goes: replays lead there, too."""
        folder = self.paths.at_stop / state.role
        try:
            manifest = manifests.read(folder)
            if manifest is None or manifest.identity != state.lineage:
                return None
            if manifest.extra["layout"] != dict(self.layouts[state.role]):
                return None
            if self._proven.get(state.role) != state.lineage:
                manifests.verify(folder, manifest)
                self._proven[state.role] = state.lineage
        except CorruptArtifactError as error:
            self.notify(f"{error.message}; it is made again")
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
        # As the update found it: schedules count from `updates`, the order of rows from `step`.
        updates = recorded.updates - len(recorded.per_minibatch["lr"])
        parent = State(role=recorded.role, step=recorded.step - 1, updates=updates, lineage=recorded.parent)
        again = self.replay(recorded.step, recorded.role, parent)
        if again.lineage != recorded.lineage:
            raise StorageError(
                f"the {recorded.role} update of step {recorded.step} was recorded with other inputs or recipe keys",
                hint=f"see what is there: ppoctl resume {quoted(self.paths.root)} --plan",
            )
        gap = largest_gap(recorded.per_minibatch, again.per_minibatch)
        if gap > INEXACT_TOLERANCE:
            raise StorageError(
                f"replaying {recorded.role} of step {recorded.step} gave other figures than recorded "
                f"(relative gap {gap:.2g})",
                hint="resume with the versions, threads and layout of the manifest: "
                f"ppoctl show {quoted(self.paths.root)} --step {recorded.step} --manifest",
            )
        if gap > 0:
            self._resident[recorded.role].replay += 1
        self.notify(f"replayed {recorded.role} update of step {recorded.step} (largest gap {gap:.2g})")

    def _update_that_made(self, state: State) -> Update | None:
        """The recorded update that leads to a state. Older steps than it takes are not read: nothing needs them."""
        for step in reversed([step for step in self.paths.committed_steps() if step <= state.step]):
            told = self.outlines.at(step).training(state.role)
            manifest = None if told is None else manifests.read(self.paths.stage(step, told.name))
            if told is not None and manifest is not None:
                update = load_record(self.paths, step, told.name, manifest)
                assert isinstance(update, Update)
                if update.lineage == state.lineage:
                    return update
        return None


def largest_gap(recorded: Mapping[str, list[float]], again: Mapping[str, list[float]]) -> float:
    """Largest relative difference between two updates' losses, gradient norms and rates; 0 only where all figures are
    equal to the bit, infinite when their shapes differ or one is not finite."""
    if recorded == again:
        return 0.0
    if recorded.keys() != again.keys() or any(len(recorded[k]) != len(again[k]) for k in recorded):
        return math.inf
    # Shares of tokens jump when one token crosses a bound; these three move smoothly with the weights.
    gaps = [
        abs(a - b) / max(abs(a), abs(b), 1e-6)
        for key in ("loss", "grad_norm", "lr")
        for a, b in zip(recorded[key], again[key], strict=True)
    ]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0) or math.ulp(0.0)


def save_s(paths: RunPaths, roles: Sequence[str]) -> float | None:
    """Seconds that saving the states of all these roles took the last time; None: one of them was never saved."""
    total_s = 0.0
    for role in roles:
        steps = paths.saved_steps(role)
        manifest = manifests.read(paths.state(role, steps[-1])) if steps else None
        if manifest is None or manifest.seconds == 0:  # of a version that did not write it down
            return None
        total_s += manifest.seconds
    return total_s


def saved_state(paths: RunPaths, role: str, step: int) -> tuple[State, Carry]:
    """The handle of a saved state and the carry that goes with it. Raises CorruptArtifactError when it is gone."""
    manifest = manifests.require(paths.state(role, step))
    state = State(role=role, step=step, updates=int(manifest.extra["updates"]), lineage=manifest.identity)
    return state, Carry(**manifest.extra["carry"])
