"""Memory of each pool in each stage of a step, and whether it fits.

A pool is what memory belongs to: a GPU with the processes that share it, or a machine without GPUs with all
processes of a run. Whatever is resident is so in all stages, unless roles take turns (`cluster.offload`): then each
part is there for the stages that `DeviceSchedule` names, and on the host in the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ppoctl.store.outline import EVAL, Outline, ToldStage

SHOWN = 4
"""Number of the largest items of a stage that are shown."""


@dataclass(frozen=True)
class DeviceSchedule:
    """Stages of a story in which each role is at work."""

    stages: tuple[str, ...]
    """Names of all stages, in order, an evaluation last."""
    draws: tuple[str, ...]
    """Stages in which the generator works."""
    scores: Mapping[str, tuple[str, ...]]
    """Stages in which a role computes log-probs or values, by role; the actor also for the canary."""
    on_device: Mapping[str, tuple[str, ...]]
    """Stages in which a part of a role is on the device, where roles take turns."""


def device_schedule(outline: Outline) -> DeviceSchedule:
    """Schedule of the roles, from what each stage reads and trains. Whoever had a turn last stays until the next one
    needs the device: rewards and advantages need none."""
    stages = (*outline.stages, ToldStage(EVAL, ("actor", "prompts")))
    scores: dict[str, list[str]] = {role: [] for role in outline.roles}
    on_device: dict[str, list[str]] = {}
    draws: list[str] = []
    staying: tuple[str, ...] = ()
    for stage in stages:
        roles = [role for role in stage.reads if role in outline.roles]
        weights = tuple(f"{role} weights" for role in roles)
        working, last = staying, staying
        if roles and "prompts" in stage.reads:
            draws.append(stage.name)
            # The canary asks the actor for log-probs while the generator has its cache.
            working, last = ("generator", *weights), ("generator",)
        elif stage.trains is not None:
            working = last = (*weights, f"{stage.trains} training")
        elif roles:
            working = last = (*weights, *(["reference"] if "actor" in roles else []))
        for role in roles if stage.trains is None else ():
            scores[role].append(stage.name)
        for part in working:
            on_device.setdefault(part, []).append(stage.name)
        staying = last
    return DeviceSchedule(
        stages=tuple(stage.name for stage in stages),
        draws=tuple(draws),
        scores={role: tuple(names) for role, names in scores.items()},
        on_device={part: tuple(names) for part, names in on_device.items()},
    )


@dataclass(frozen=True)
class Item:
    """One thing that takes memory of a pool."""

    name: str
    bytes: int
    lower: str
    """The recipe key that makes the item smaller, and which way to turn it."""
    stages: tuple[str, ...] | None = None
    """Stages in which the item is there; None: in all."""


@dataclass(frozen=True)
class MemoryPool:
    """Memory that several items share: of a GPU, of a machine, or of all nodes together."""

    name: str
    bytes: int | None
    """Bytes of the pool; None: not known from here."""


@dataclass(frozen=True)
class StageBytes:
    """Memory of a pool in one stage of a step."""

    stage: str
    resident: tuple[str, ...]
    """Names of the items that are there."""
    bytes: int
    fits: bool | None
    largest: tuple[Item, ...]
    """The items that take most."""


@dataclass(frozen=True)
class Residency:
    """A memory pool with the items that take its memory."""

    place: MemoryPool
    items: tuple[Item, ...]
    stages: tuple[StageBytes, ...]

    @property
    def fullest(self) -> StageBytes:
        return max(self.stages, key=lambda stage: stage.bytes)


def residency(place: MemoryPool, items: Sequence[Item], turns: DeviceSchedule, *, draws: bool = True) -> Residency:
    """The items of a pool with its memory in every stage of a step. No stage in which the generator works fits unless
    it `draws` there at all."""
    return Residency(place, tuple(items), tuple(stages_in(place, items, turns, draws=draws)))


def stages_in(
    place: MemoryPool, items: Sequence[Item], turns: DeviceSchedule, *, draws: bool = True
) -> list[StageBytes]:
    """Bytes of a pool in every stage of a step; `draws` as in `residency`."""
    found = [
        _stage(place, stage, [item for item in items if item.stages is None or stage in item.stages])
        for stage in turns.stages
    ]
    return (
        found if draws else [replace(stage, fits=False) if stage.stage in turns.draws else stage for stage in found]
    )


def _stage(place: MemoryPool, stage: str, items: Sequence[Item]) -> StageBytes:
    total = sum(item.bytes for item in items)
    largest = sorted(items, key=lambda item: -item.bytes)[:SHOWN]
    fits = None if place.bytes is None else total <= place.bytes
    return StageBytes(stage, tuple(item.name for item in items), total, fits, tuple(largest))


def at_work(name: str, lower: str, by_stage: Mapping[str, int]) -> list[Item]:
    """Items of something whose size differs from stage to stage: one item for each size."""
    return [Item(name, size, lower, (stage,)) for stage, size in by_stage.items() if size]
