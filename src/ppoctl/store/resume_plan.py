"""The plan of a resume before it does anything: each item is restored, recalled, replayed or run. Light.

A hole (a stage gone while a later one of the run is there, or a file that is not as it was written) is named and
refused; with permission everything that depends on it is set aside into `discarded/`, never deleted (`discard`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppoctl.batch.sealed_json import repair_hint
from ppoctl.errors import CorruptArtifactError, StorageError, quoted
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import REPAIRED, read_lines
from ppoctl.store.ledger import end_of_blocks
from ppoctl.store.outline import EVAL, Outline, outlines_of
from ppoctl.store.retention import healthy_steps, is_healthy, saved_steps
from ppoctl.store.run_paths import RunPaths


@dataclass(frozen=True)
class ResumeItem:
    """One item of a resume plan."""

    name: str
    """Folder of the item, like `states/actor/000002`, `steps/000003/10-rollout`."""
    action: str
    """Action on the item: restored | recalled | replayed | run | missing | corrupt"""
    note: str = ""

    @property
    def description(self) -> str:
        """The item and what is wrong with it, for a person."""
        return f"`{self.name}` ({self.action}{': ' + self.note if self.note else ''})"


@dataclass(frozen=True)
class ResumePlan:
    """All items of a resume, and the step that it goes on from."""

    start: int
    """Step of the saved states that the run goes on from; 0: the model source."""
    items: tuple[ResumeItem, ...]
    notes: tuple[str, ...] = ()
    """Notes that a person should know before the run goes on."""

    @property
    def verified(self) -> frozenset[str]:
        """Names of the states whose files were read and found as they were written."""
        return frozenset(item.name for item in self.items if item.action == "restored")

    @property
    def broken(self) -> tuple[ResumeItem, ...]:
        return tuple(item for item in self.items if item.action in ("missing", "corrupt"))

    def require_intact(self, paths: RunPaths) -> None:
        """Raise StorageError naming every missing or corrupt item."""
        if not self.broken:
            return
        names = ", ".join(item.description for item in self.broken)
        error = CorruptArtifactError if any(item.action == "corrupt" for item in self.broken) else StorageError
        raise error(
            f"cannot resume `{paths.root}` as it was: {names}",
            hint=repair_hint(paths.root),
        )


def plan_resume(paths: RunPaths) -> ResumePlan:
    """The plan of a resume, from manifests and digests, without touching anything."""
    outlines = outlines_of(paths)
    roles = outlines.roles
    start = (saved_steps(paths, roles) or [0])[-1]
    items = _lines_items(paths, roles if start else (), start)
    items += _state_items(paths, roles, start)
    steps = [step for step in paths.committed_steps() if step > start and paths.has_committed(step)]
    if steps:
        last = max(steps)
        for step in range(start + 1, last + 1):
            items += _step_items(paths, step, outlines.at(step), is_last=step == last)
    notes = tuple(_notes(paths, roles, start))
    return ResumePlan(start=start, items=tuple(items), notes=notes)


def _notes(paths: RunPaths, roles: Sequence[str], start: int) -> Sequence[str]:
    """Notes that a person should know before the run goes on."""
    try:
        if not start or is_healthy(paths, roles, start):
            return []
        healthy = healthy_steps(paths, roles)
    except CorruptArtifactError:
        return []  # an item of the table says so
    note = f"a health rule stopped the run at step {start}; it goes on from the states of that step"
    if not healthy:
        return [note]
    back = f"ppoctl resume {quoted(paths.root)} --back-to {healthy[-1]}"
    return [note, f"to go on from the last healthy ones instead, and drop what came after: {back}"]


def _lines_items(paths: RunPaths, saved: Sequence[str], start: int) -> list[ResumeItem]:
    """Items of journal and ledger, where they are damaged, gone, or end before what the saved states were told of
    them."""
    items: list[ResumeItem] = []
    told_seq, told_bytes = _told_by_states(paths, saved, start)
    mended_seq = -1
    try:
        lines = read_lines(paths.journal)
        mended_seq = max((line["seq"] for line in lines if line.get("event") == REPAIRED), default=-1)
        if (lines[-1]["seq"] if lines else 0) < told_seq:
            items.append(ResumeItem(paths.journal.name, "corrupt", f"cut: line {told_seq} was there"))
    except CorruptArtifactError as error:
        items.append(ResumeItem(paths.journal.name, "corrupt", error.message))
    try:
        end = end_of_blocks(paths.ledger)
        if end < told_bytes and mended_seq < told_seq:
            items.append(ResumeItem(paths.ledger.name, "corrupt", f"cut: {end} bytes, {told_bytes} were there"))
    except CorruptArtifactError as error:
        items.append(ResumeItem(paths.ledger.name, "corrupt", error.message))
    return items


def _told_by_states(paths: RunPaths, saved: Sequence[str], start: int) -> tuple[int, int]:
    """Number of the journal's last line and size of the ledger in bytes when the newest states were saved."""
    seq, size_bytes = 0, 0
    for role in saved:
        try:
            manifest = manifests.read(paths.state(role, start))
        except CorruptArtifactError:
            continue  # `_state_item` names it
        if manifest is not None:
            seq, size_bytes = max(seq, manifest.extra["journal_seq"]), max(size_bytes, manifest.extra["ledger_bytes"])
    return seq, size_bytes


def _state_items(paths: RunPaths, roles: Sequence[str], start: int) -> list[ResumeItem]:
    """Items of the saved states that the run goes on from, and of others that cannot be read: they are not needed,
    but whether they may go is read from them."""
    found: list[ResumeItem] = []
    for role in roles:
        for step in paths.saved_steps(role):
            item = _item(paths, paths.state(role, step), "restored", is_needed=step == start)
            if step == start or item.action == "corrupt":
                found.append(item)
    return found


def _step_items(paths: RunPaths, step: int, told: Outline, *, is_last: bool) -> list[ResumeItem]:
    """Items of the step's stages in the order of its story. A stage that is not there is a hole where later ones are,
    or where a later step is; an evaluation, which not every step has, never is."""
    stages = (*told.names, EVAL)
    items = {
        stage: _item(paths, paths.stage(step, stage), "replayed" if told.is_update(stage) else "recalled", "run")
        for stage in stages
    }
    there = [number for number, stage in enumerate(stages) if items[stage].action != "run"]
    last_there = max(there, default=-1)
    found: list[ResumeItem] = []
    for number, stage in enumerate(stages):
        item = items[stage]
        if item.action == "run" and stage == EVAL:
            continue
        is_hole = item.action == "run" and (number < last_there or not is_last)
        found.append(ResumeItem(item.name, "missing") if is_hole else item)
    return found


def _item(
    paths: RunPaths, folder: Path, action: str, absent: str = "missing", *, is_needed: bool = True
) -> ResumeItem:
    """Item of an artifact, with the action on it if it can be had; files of one that is not needed are not read."""
    name = paths.inside(folder)
    try:
        manifest = manifests.read(folder)
        if manifest is None:
            return ResumeItem(name, absent)
        if is_needed:
            manifests.verify(folder, manifest)
    except CorruptArtifactError as error:
        return ResumeItem(name, "corrupt", error.message)
    return ResumeItem(name, action)
