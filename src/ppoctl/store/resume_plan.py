"""The plan of a resume before it changes anything: each item is restored, reused, replayed or run. Imports no torch.

If a stage is missing before a later stage, or if a file was changed after it was written, the resume is refused with
an error that names the item. With `--allow-missing`, the item and everything that depends on it move to `discarded/`
(see `discard`).
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ppoctl.core.batch.record_header import record_metadata
from ppoctl.core.batch.sealed_json import repair_hint
from ppoctl.core.errors import CorruptArtifactError, StorageError, quoted
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import REPAIRED
from ppoctl.store.ledger import end_of_blocks
from ppoctl.store.outline import EVAL
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.retention import healthy_steps, is_healthy
from ppoctl.store.rounds import is_after_the_last_round
from ppoctl.store.run_paths import RunPaths


@dataclass(frozen=True)
class ResumeItem:
    """One item of a resume plan."""

    name: str
    """Folder of the item, such as `states/actor/000002` or `steps/000003/10-rollout`."""
    action: str
    """Action on the item: restored | recalled | replayed | run | missing | corrupt"""
    note: str = ""

    @property
    def description(self) -> str:
        """The item with its problem, for a message."""
        return f"`{self.name}` ({self.action}{': ' + self.note if self.note else ''})"


@dataclass(frozen=True)
class ResumePlan:
    """All items of a resume, and the step that it continues from."""

    start: int
    """Step of the saved states that the run continues from; 0: the model source."""
    items: tuple[ResumeItem, ...]
    notes: tuple[str, ...] = ()
    """Notes for the user, printed before the run continues."""
    finished: tuple[tuple[int, str, int], ...] = ()
    """(step, stage, number) of the finished samples of stages that are not committed."""

    @property
    def verified(self) -> frozenset[str]:
        """Names of the states whose files were read and match their manifests."""
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
            f"cannot resume `{paths.root}`: {names}",
            hint=repair_hint(paths.root),
        )


def plan_resume(run: RecordedRun) -> ResumePlan:
    """Return the plan of a resume from manifests and digests. Changes nothing."""
    paths, roles, start = run.paths, run.outlines.roles, run.last_saved
    items = _lines_items(run, roles if start else (), start)
    items += _state_items(paths, roles, start)
    items += _items_before(run, start) if start else []
    steps = [step for step in paths.committed_steps() if step > start and paths.has_committed(step)]
    if steps:
        last = max(steps)
        for step in range(start + 1, last + 1):
            items += _step_items(run, step, is_last=step == last)
    notes, finished = tuple(_notes(paths, roles, start)), tuple(_finished(run, start))
    return ResumePlan(start=start, items=tuple(items), notes=notes, finished=finished)


def _finished(run: RecordedRun, start: int) -> Iterator[tuple[int, str, int]]:
    """Yield step, stage and number of the finished samples of each stage that is not committed and may be needed."""
    paths = run.paths
    for step in (step for step in paths.committed_steps() if step > start):
        for folder in paths.all_parts(step):
            stage = folder.name.removesuffix(".parts").partition("-")[2]
            with suppress(CorruptArtifactError):  # an item of the plan reports the damage
                if is_after_the_last_round(paths, step, run.outlines.at(step), stage):
                    continue
            keys: set[str] = set()
            for file in folder.glob("*.safetensors"):
                with suppress(ValueError, OSError):  # the samples of a damaged file are generated again
                    keys.update(record_metadata(file.read_bytes())[1]["samples"]["key"])
            if keys:
                yield step, stage, len(keys)


def _notes(paths: RunPaths, roles: Sequence[str], start: int) -> Sequence[str]:
    """Return the notes of the plan."""
    try:
        if not start or is_healthy(paths, roles, start):
            return []
        healthy = healthy_steps(paths, roles)
    except CorruptArtifactError:
        return []  # an item of the plan reports the damage
    note = f"a health rule stopped the run at step {start}; it continues from the states of that step"
    if not healthy:
        return [note]
    back = f"ppoctl resume {quoted(paths.root)} --back-to {healthy[-1]}"
    return [note, f"to continue from the last healthy states instead, and drop all later results: {back}"]


def _lines_items(run: RecordedRun, saved: Sequence[str], start: int) -> list[ResumeItem]:
    """Return items for the journal and the ledger, if damaged, missing, or shorter than when states were saved."""
    paths, items = run.paths, list[ResumeItem]()
    recorded_seq, recorded_bytes = _recorded_by_states(run, saved, start)
    repaired_seq = -1
    try:
        lines = run.lines
        repaired_seq = max((line["seq"] for line in lines if line.get("event") == REPAIRED), default=-1)
        if (lines[-1]["seq"] if lines else 0) < recorded_seq:
            items.append(ResumeItem(paths.journal.name, "corrupt", f"truncated: it had line {recorded_seq}"))
    except CorruptArtifactError as error:
        items.append(ResumeItem(paths.journal.name, "corrupt", error.message))
    try:
        end = end_of_blocks(paths.ledger)
        if end < recorded_bytes and repaired_seq < recorded_seq:
            items.append(
                ResumeItem(paths.ledger.name, "corrupt", f"truncated: it has {end} bytes, it had {recorded_bytes}")
            )
    except CorruptArtifactError as error:
        items.append(ResumeItem(paths.ledger.name, "corrupt", error.message))
    return items


def _recorded_by_states(run: RecordedRun, saved: Sequence[str], start: int) -> tuple[int, int]:
    """Return the journal's last line number and the ledger's bytes that the newest saved states recorded."""
    seq, size_bytes = 0, 0
    for role in saved:
        try:
            manifest = run.state_manifest(role, start)
        except CorruptArtifactError:
            continue  # `_state_items` reports the damage
        if manifest is not None:
            seq, size_bytes = max(seq, manifest.extra["journal_seq"]), max(size_bytes, manifest.extra["ledger_bytes"])
    return seq, size_bytes


def _state_items(paths: RunPaths, roles: Sequence[str], start: int) -> list[ResumeItem]:
    """Return items for the states that the run continues from, and for other states that cannot be read.

    The resume does not load the other states, but retention reads their manifests to decide whether to delete them.
    """
    items: list[ResumeItem] = []
    for role in roles:
        for step in paths.saved_steps(role):
            item = _item(paths, paths.state(role, step), "restored", is_needed=step == start)
            if step == start or item.action == "corrupt":
                items.append(item)
    return items


def _items_before(run: RecordedRun, start: int) -> list[ResumeItem]:
    """Return items for the records up to step `start` that later steps read."""
    read = run.outlines.read_after(start)
    return [
        _item(run.paths, run.paths.stage(step, stage.name), "recalled")
        for step in sorted({step for step, _ in read})
        for stage in run.stages(step)
        if (step, stage.entry.name) in read
    ]


def _step_items(run: RecordedRun, step: int, *, is_last: bool) -> list[ResumeItem]:
    """Return items for the step's stages, in the order in which they run.

    An absent stage is missing if a later stage of the step or a later step exists. An absent evaluation is never
    missing, since not every step has one.
    """
    paths, present = run.paths, run.stages(step)
    stages = (*(stage.name for stage in present), EVAL)
    updates = {stage.name for stage in present if stage.entry.trains is not None}
    by_stage = {
        stage: _item(paths, paths.stage(step, stage), "replayed" if stage in updates else "recalled", "run")
        for stage in stages
    }
    last_present = max((number for number, stage in enumerate(stages) if by_stage[stage].action != "run"), default=-1)
    items: list[ResumeItem] = []
    for number, stage in enumerate(stages):
        item = by_stage[stage]
        if item.action == "run" and stage == EVAL:
            continue
        is_hole = item.action == "run" and (number < last_present or not is_last)
        is_hole = is_hole and not _may_end_later(run, step, stage)
        items.append(ResumeItem(item.name, "missing") if is_hole else item)
    return items


def _may_end_later(run: RecordedRun, step: int, stage: str) -> bool:
    """Whether the record of a stage can be missing after later stages, because no stage has read it yet."""
    readers = run.outlines.readers(step, stage)
    return bool(readers) and readers[0] > step + 1 and not run.paths.has_committed(readers[0])


def _item(
    paths: RunPaths, folder: Path, action: str, absent: str = "missing", *, is_needed: bool = True
) -> ResumeItem:
    """Return the item of an artifact, with `action` if it is intact.

    If the artifact is not needed, only its manifest is read.
    """
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
