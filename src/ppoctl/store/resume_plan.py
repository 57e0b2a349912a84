"""What a resume will do with each item, before it does anything: restored, recalled, replayed or run. Light.

A hole (a stage gone while a later one of the run is there, or a file that does not match its manifest) is named and
refused; with permission everything that depends on it is set aside into `discarded/`, never deleted.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ppoctl.errors import CorruptArtifactError, StorageError
from ppoctl.store import manifest as manifests
from ppoctl.store.layout import MANIFEST, ROLES, STAGES, RunLayout
from ppoctl.store.retention import saved_pairs


@dataclass(frozen=True)
class Item:
    """One line of the table."""

    name: str
    """`states/actor/000002`, `steps/000003/10-rollout`."""
    action: str
    """restored | recalled | replayed | run | missing | corrupt"""
    note: str = ""


@dataclass(frozen=True)
class ResumePlan:
    """The whole table."""

    start: int
    """Step of the saved pair it goes on from; 0: the model source."""
    items: tuple[Item, ...]

    @property
    def broken(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.action in ("missing", "corrupt"))

    def require_whole(self, layout: RunLayout) -> None:
        """Raise StorageError naming every missing or corrupt item."""
        if not self.broken:
            return
        names = ", ".join(
            f"`{item.name}` ({item.action}{': ' + item.note if item.note else ''})" for item in self.broken
        )
        error = CorruptArtifactError if any(item.action == "corrupt" for item in self.broken) else StorageError
        raise error(
            f"cannot resume `{layout.root}` as it was: {names}",
            hint=f"set aside what depends on it and make it again: ppoctl resume {layout.root} --allow-missing",
        )


def plan_resume(layout: RunLayout) -> ResumePlan:
    """Look at manifests and digests, touching nothing."""
    start = (saved_pairs(layout) or [0])[-1]
    items: list[Item] = []
    if start:
        items += [_state_item(layout, role, start) for role in ROLES]
    steps = [step for step in layout.committed_steps() if step > start and _has_something(layout, step)]
    if steps:
        last = max(steps)
        for step in range(start + 1, last + 1):
            items += _step_items(layout, step, is_last=step == last)
    return ResumePlan(start=start, items=tuple(items))


def set_aside_broken(layout: RunLayout, plan: ResumePlan, *, attempt: int) -> list[str]:
    """Move broken items, and all that came after them, to `discarded/attempt-N/`. Returns the moved names."""
    order = [item.name for item in plan.items]
    broken = {item.name for item in plan.broken}
    if not broken:
        return []
    broken_steps = [index for index, name in enumerate(order) if name in broken and name.startswith("steps/")]
    first = min(broken_steps, default=len(order))
    moving = [name for name in order if name in broken and name.startswith("states/")] + order[first:]
    moved: list[str] = []
    for name in moving:
        source = layout.root / name
        if source.is_dir():
            target = layout.root / "discarded" / f"attempt-{attempt}" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, target)
            moved.append(name)
    return moved


def _has_something(layout: RunLayout, step: int) -> bool:
    """Setting aside and kills leave folders of steps in which nothing is committed; they make no hole before them."""
    return any((layout.stage(step, stage) / MANIFEST).is_file() for stage in STAGES)


def _state_item(layout: RunLayout, role: str, step: int) -> Item:
    folder = layout.state(role, step)
    return Item(folder.relative_to(layout.root).as_posix(), *_checked(folder, "restored"))


def _step_items(layout: RunLayout, step: int, *, is_last: bool) -> list[Item]:
    found: list[tuple[str, Item]] = []
    for stage in STAGES:
        folder = layout.stage(step, stage)
        name = folder.relative_to(layout.root).as_posix()
        action = "replayed" if stage.endswith("_update") else "recalled"
        try:
            committed = manifests.read(folder) is not None
        except CorruptArtifactError as error:
            found.append((stage, Item(name, "corrupt", error.message)))
            continue
        found.append((stage, Item(name, *_checked(folder, action)) if committed else Item(name, "run")))
    done = [stage for stage, item in found if item.action != "run"]
    last_done = max((list(STAGES).index(stage) for stage in done), default=-1)
    items: list[Item] = []
    for stage, item in found:
        hole = item.action == "run" and (list(STAGES).index(stage) < last_done or not is_last)
        optional = stage in ("eval", "actor_update")  # not every step evaluates; a critic-only step has no actor's
        if hole and optional:
            continue
        items.append(Item(item.name, "missing") if hole else item)
    return [item for item in items if not (item.action == "run" and item.name.endswith("eval"))]


def _checked(folder: Path, action: str) -> tuple[str, str]:
    """The action, or why it cannot be had."""
    try:
        manifest = manifests.read(folder)
        if manifest is None:
            return "missing", ""
        manifests.verify(folder, manifest)
    except CorruptArtifactError as error:
        return "corrupt", error.message
    return action, ""
