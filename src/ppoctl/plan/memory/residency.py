"""When what is in memory. A schedule says in which stages of a step each role is at work; an item says in which of
them it is needed, and what becomes of it in the others.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ppoctl.store.outline import EVAL, Outline, OutlineEntry

MemoryPlace = Literal["device", "host"]

EVAL_SCORES = f"{EVAL}_scores"
"""What an evaluation's responses are scored in, where that takes devices."""


@dataclass(frozen=True)
class ResidencySchedule:
    """Stages of a story in which the parts of roles are at work."""

    stages: tuple[str, ...]
    """Names of all stages, in order, then an evaluation, the saves, and the loads of a resume; a start from the model
    takes what a load takes."""
    parts: Mapping[str, tuple[str, ...]]
    """Stages by part. `generator`, `reference`, `ROLE weights` and `ROLE training` (gradients and optimizer): those
    in which a part is on the device where roles take turns. `draws`: those in which the generator works. `ROLE
    scores`: those in which a role computes log-probs or values, the actor also for the canary. Likewise `ROLE
    updates`, `ROLE saves`, `ROLE loads`. `scoring`: those in which reward models are on the device."""

    def of(self, part: str) -> tuple[str, ...]:
        return self.parts.get(part, ())

    def without(self, *parts: str) -> tuple[str, ...]:
        """All stages but those of these parts."""
        return tuple(stage for stage in self.stages if all(stage not in self.of(part) for part in parts))


def schedule_of(
    outline: Outline, *, update_reads_reference: bool = False, idle: Collection[str] = (), scores: bool = False
) -> ResidencySchedule:
    """Schedule of the roles, from what each stage reads and trains. Whoever had a turn last stays until the next one
    needs the device: advantages need none, nor do the stages in `idle`, nor rewards, but where models score
    (`scores`). Roles are saved and, by a resume, loaded one after the other. The actor's update may read the
    reference."""
    saves, loads = (
        [OutlineEntry(f"{role}_{does}", (role,), role) for role in outline.roles] for does in ("save", "load")
    )
    evaluation = [
        OutlineEntry(EVAL, ("actor", "prompts")),
        *([OutlineEntry(EVAL_SCORES, ("prompts",))] if scores else []),
    ]
    stages = (*outline.stages, *evaluation, *saves, *loads)
    parts = defaultdict[str, list[str]](list)
    staying: tuple[str, ...] = ()
    for stage in stages:
        roles = [role for role in stage.reads if role in outline.roles and stage.name not in idle]
        weights = tuple(f"{role} weights" for role in roles)
        working, last = staying, staying
        if scores and not roles and "prompts" in stage.reads:
            working = last = ("scoring",)
        elif roles and "prompts" in stage.reads:
            parts["draws"].append(stage.name)
            # The canary asks the actor for log-probs while the generator has its cache.
            working, last = ("generator", *weights), ("generator",)
        elif stage.trains is not None:
            working = last = (*weights, f"{stage.trains} training")
            if update_reads_reference and stage.trains == "actor" and stage not in (*saves, *loads):
                working = last = (*working, "reference")
        elif roles:
            working = last = (*weights, *(["reference"] if "actor" in roles else []))
        does = [f"{role} scores" for role in roles]
        if stage.trains is not None:
            kind = "saves" if stage in saves else "loads" if stage in loads else "updates"
            does = [f"{stage.trains} {kind}"]
        for part in (*working, *does):
            parts[part].append(stage.name)
        staying = last
    return ResidencySchedule(
        tuple(stage.name for stage in stages), {part: tuple(names) for part, names in parts.items()}
    )


@dataclass(frozen=True)
class MemoryItem:
    """One thing that takes memory."""

    name: str
    bytes: int
    place: MemoryPlace
    role: str
    """Role whose memory it is; `driver`; `node` for what each node has once."""
    lower: str
    """The recipe key that makes the item smaller, and which way to turn it."""
    stages: tuple[str, ...] | None = None
    """Stages in which it is needed; None: all."""
    between: Literal["gone", "moved", "dropped"] = "gone"
    """What becomes of it in other stages. gone: it is there in its stages only. moved, dropped: it stays, unless its
    role leaves while others work (`cluster.offload`); then it is moved to the host, or dropped."""

    def is_in(self, stage: str) -> bool:
        return self.stages is None or stage in self.stages


def resident(
    items: Iterable[MemoryItem], schedule: ResidencySchedule, leaving: Collection[str]
) -> Iterator[MemoryItem]:
    """The items as they are in memory where the roles in `leaving` take turns. What is moved keeps its room on the
    host also while it is on the device; what has just been loaded has none yet."""
    for item in items:
        if item.between == "gone" or item.role in leaving:
            yield item
        else:
            yield replace(item, stages=None)
        if item.between == "moved" and item.role in leaving:
            stages = schedule.without(f"{item.role} loads")
            yield MemoryItem(
                "moved out", item.bytes, "host", item.role, "leave the role out of `cluster.offload`", stages
            )
