"""What lies where in each stage of a step, and whether it fits.

A place is what memory belongs to: a GPU with the processes that share it, or a machine without GPUs with all
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
"""Of the largest items of a stage."""


@dataclass(frozen=True)
class Item:
    """Something that takes memory of the place."""

    name: str
    bytes: int
    lower: str
    """The recipe key that makes it smaller, and which way to turn it."""
    stages: tuple[str, ...] = STAGES
    """When it is there."""


@dataclass(frozen=True)
class Place:
    """Where memory is counted."""

    name: str
    bytes: int | None
    """None: not known from here."""


@dataclass(frozen=True)
class StageBytes:
    """One stage in one place."""

    stage: str
    resident: tuple[str, ...]
    """Names of what is there."""
    bytes: int
    fits: bool | None
    largest: tuple[Item, ...]
    """What takes most, and what makes that smaller."""


@dataclass(frozen=True)
class Residency:
    """A place and what takes memory there."""

    place: Place
    items: tuple[Item, ...]
    stages: tuple[StageBytes, ...]

    @property
    def fullest(self) -> StageBytes:
        return max(self.stages, key=lambda stage: stage.bytes)


def residency(place: Place, items: Sequence[Item], *, draws: bool = True) -> Residency:
    """Every stage of a step in one place. None in which the generator works fits unless it `draws` there at all."""
    return Residency(place, tuple(items), tuple(stages_in(place, items, draws=draws)))


def stages_in(place: Place, items: Sequence[Item], *, draws: bool = True) -> list[StageBytes]:
    """Every stage of a step."""
    found = [_stage(place, stage, [item for item in items if stage in item.stages]) for stage in STAGES]
    return found if draws else [replace(stage, fits=False) if stage.stage in DRAWS else stage for stage in found]


def _stage(place: Place, stage: str, items: Sequence[Item]) -> StageBytes:
    total = sum(item.bytes for item in items)
    largest = sorted(items, key=lambda item: -item.bytes)[:SHOWN]
    fits = None if place.bytes is None else total <= place.bytes
    return StageBytes(stage, tuple(item.name for item in items), total, fits, tuple(largest))


def at_work(name: str, lower: str, by_stage: Mapping[str, int]) -> list[Item]:
    """An item whose size differs from stage to stage."""
    return [Item(name, size, lower, (stage,)) for stage, size in by_stage.items() if size]
