"""Residency: the stages during which each memory item is in memory.

A schedule lists the stages of a step during which each role computes. An item lists the stages that need the item,
and the state of the item in the other stages.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ppoctl.recipe.roles import POLICY
from ppoctl.store.outline import EVAL, Outline, OutlineEntry

MemoryPlace = Literal["device", "host"]

EVAL_SCORES = f"{EVAL}_scores"
"""Stage that scores the responses of an evaluation, if scoring uses devices."""


@dataclass(frozen=True)
class ResidencySchedule:
    """Stages of a step function during which each part of a role is on the device or computes."""

    stages: tuple[str, ...]
    """Names of all stages of a step in order, then an evaluation, the saves, and the loads of a resume. The startup
    of a new run needs the same memory as the loads."""
    parts: Mapping[str, tuple[str, ...]]
    """Part -> stages of the part.

    `generator`, `reference`, `ROLE weights`, `ROLE training` (gradients and optimizer): stages during which the part
    is on the device, if roles are offloaded in turn. `draws`: stages in which the generator (vLLM) generates.
    `ROLE scores`: stages in which a role computes log-probs or values; for the policy, this includes the canary.
    `ROLE updates`, `ROLE saves`, `ROLE loads`: stages in which a role is updated, saved or loaded. `scoring`: stages
    during which reward models are on the device.
    """

    def of(self, part: str) -> tuple[str, ...]:
        """Return the stages of a part."""
        return self.parts.get(part, ())

    def without(self, *parts: str) -> tuple[str, ...]:
        """Return all stages except the stages of these parts."""
        return tuple(stage for stage in self.stages if all(stage not in self.of(part) for part in parts))


def schedule_of(
    outline: Outline, *, update_reads_reference: bool = False, idle: Collection[str] = (), scores: bool = False
) -> ResidencySchedule:
    """Return the schedule of the roles, from the roles that each stage reads and trains.

    A role remains on the device until another role needs the device. Advantages need no device. Neither do the
    stages in `idle`, nor rewards, unless reward models score (`scores`). Roles are saved one after the other, and
    a resume loads them one after the other. The processes of the policy read the reference; with
    `update_reads_reference`, the policy's update reads it, too.
    """
    saves, loads = (
        [OutlineEntry(f"{role}_{verb}", (role,), role) for role in outline.roles] for verb in ("save", "load")
    )
    evaluation = [
        OutlineEntry(EVAL, (POLICY, "prompts")),
        *([OutlineEntry(EVAL_SCORES, ("prompts",))] if scores else []),
    ]
    stages = (*outline.stages, *evaluation, *saves, *loads)
    parts = defaultdict[str, list[str]](list)
    resident_parts: tuple[str, ...] = ()
    for stage in stages:
        roles = [role for role in stage.reads if role in outline.roles and stage.name not in idle]
        weights = tuple(f"{role} weights" for role in roles)
        working, last = resident_parts, resident_parts
        if scores and not roles and "prompts" in stage.reads:
            working = last = ("scoring",)
        elif roles and "prompts" in stage.reads:
            parts["draws"].append(stage.name)
            # The policy computes the log-probs of the canary while the generator (vLLM) holds the KV cache.
            working, last = ("generator", *weights), ("generator",)
        elif stage.trains is not None:
            working = last = (*weights, f"{stage.trains} training")
            if update_reads_reference and stage.trains == POLICY and stage not in (*saves, *loads):
                working = last = (*working, "reference")
        elif roles:
            working = last = (*weights, *(["reference"] if POLICY in roles else []))
        work = [f"{role} scores" for role in roles]
        if stage.trains is not None:
            kind = "saves" if stage in saves else "loads" if stage in loads else "updates"
            work = [f"{stage.trains} {kind}"]
        for part in (*working, *work):
            parts[part].append(stage.name)
        resident_parts = last
    return ResidencySchedule(
        tuple(stage.name for stage in stages), {part: tuple(names) for part, names in parts.items()}
    )


@dataclass(frozen=True)
class MemoryItem:
    """One item that uses memory."""

    name: str
    bytes: int
    place: MemoryPlace
    role: str
    """Role that uses the memory, or `driver`, or `node`. `node` means an item that each node has once."""
    lower: str
    """Advice that makes the item smaller: the recipe key, and whether to raise or lower it."""
    stages: tuple[str, ...] | None = None
    """Stages that need the item; None: all."""
    between: Literal["gone", "moved", "dropped"] = "gone"
    """State of the item in other stages. gone: the item exists only in its stages. moved, dropped: the item remains
    in memory unless its role is offloaded while other roles compute (`cluster.offload`). An offloaded item is moved
    to the host (moved) or freed (dropped)."""

    def is_in(self, stage: str) -> bool:
        """Return whether the item is in memory in a stage."""
        return self.stages is None or stage in self.stages


def resident(
    items: Iterable[MemoryItem], schedule: ResidencySchedule, leaving: Collection[str]
) -> Iterator[MemoryItem]:
    """Yield the items as they are in memory if the roles in `leaving` are offloaded in turn.

    A moved item keeps its host buffer while the item is on the device. During the load of a role, its items have no
    host buffer yet.
    """
    for item in items:
        if item.between == "gone" or item.role in leaving:
            yield item
        else:
            yield replace(item, stages=None)
        if item.between == "moved" and item.role in leaving:
            stages = schedule.without(f"{item.role} loads")
            yield MemoryItem(
                "offloaded", item.bytes, "host", item.role, "remove the role from `cluster.offload`", stages
            )
