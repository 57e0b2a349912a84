"""What lies where in each stage of a step, and whether it fits.

A pool is what memory belongs to: a GPU with the processes that share it, or a machine without GPUs with all
processes of a run. Whatever is resident is so in all stages, unless roles take turns (`cluster.offload`): then each
part is there for the stages of `TURNS`, and on the host in the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

STAGES = ("rollout", "reward", "values", "logprobs", "advantages", "critic_update", "actor_update", "eval")

TURNS: Mapping[str, tuple[str, ...]] = {
    # The canary asks the actor for log-probs while the generator has its cache. Who has had a turn stays until the
    # next one: reward and advantages need no device.
    "generator": ("rollout", "reward", "eval"),
    "actor weights": ("rollout", "logprobs", "advantages", "actor_update", "eval"),
    "actor training": ("actor_update",),
    "reference": ("logprobs", "advantages"),
    "critic weights": ("values", "critic_update"),
    "critic training": ("critic_update",),
}
"""Who is on the device in which stage, where roles take turns."""

DRAWS = ("rollout", "eval")
"""Stages in which the generator works."""

SHOWN = 4
"""How many of the largest items of a stage are shown."""


@dataclass(frozen=True)
class Item:
    """Something that takes memory of a pool."""

    name: str
    bytes: int
    lower: str
    """The recipe key that makes the item smaller, and which way to turn it."""
    stages: tuple[str, ...] = STAGES
    """Stages in which the item is there."""


@dataclass(frozen=True)
class MemoryPool:
    """Memory that several items share: that of a GPU, of a machine, of all nodes."""

    name: str
    bytes: int | None
    """What the pool has; None: not known from here."""


@dataclass(frozen=True)
class StageBytes:
    """What takes memory of a pool in one stage of a step."""

    stage: str
    resident: tuple[str, ...]
    """Names of the items that are there."""
    bytes: int
    fits: bool | None
    largest: tuple[Item, ...]
    """The items that take most."""


@dataclass(frozen=True)
class Residency:
    """A pool and what takes its memory."""

    place: MemoryPool
    items: tuple[Item, ...]
    stages: tuple[StageBytes, ...]

    @property
    def fullest(self) -> StageBytes:
        return max(self.stages, key=lambda stage: stage.bytes)


def residency(place: MemoryPool, items: Sequence[Item], *, draws: bool = True) -> Residency:
    """What takes memory of a pool in every stage of a step. No stage in which the generator works fits unless it
    `draws` there at all."""
    return Residency(place, tuple(items), tuple(stages_in(place, items, draws=draws)))


def stages_in(place: MemoryPool, items: Sequence[Item], *, draws: bool = True) -> list[StageBytes]:
    """Bytes of a pool in every stage of a step; `draws` as in `residency`."""
    found = [_stage(place, stage, [item for item in items if stage in item.stages]) for stage in STAGES]
    return found if draws else [replace(stage, fits=False) if stage.stage in DRAWS else stage for stage in found]


def _stage(place: MemoryPool, stage: str, items: Sequence[Item]) -> StageBytes:
    total = sum(item.bytes for item in items)
    largest = sorted(items, key=lambda item: -item.bytes)[:SHOWN]
    fits = None if place.bytes is None else total <= place.bytes
    return StageBytes(stage, tuple(item.name for item in items), total, fits, tuple(largest))


def at_work(name: str, lower: str, by_stage: Mapping[str, int]) -> list[Item]:
    """The item of something whose size differs from stage to stage, once for each size."""
    return [Item(name, size, lower, (stage,)) for stage, size in by_stage.items() if size]
