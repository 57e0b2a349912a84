"""Residency: the stages during which each memory item is in memory.

A schedule lists the stages of a step during which each role computes. An item lists the stages that need the item,
and the state of the item in the other stages.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ppoctl.algorithms.evaluation_spec import EVALUATION
from ppoctl.algorithms.kl_use import kl_use
from ppoctl.algorithms.role_model import reward_models
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.stage_spec import ModelPass
from ppoctl.algorithms.trace import Trace
from ppoctl.plan.step_work import step_work
from ppoctl.recipe.schema import Recipe
from ppoctl.store.outline import EVAL

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
    `beside generation`: stages during which it generates the responses of the next step.
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


@dataclass(frozen=True)
class _StageUse:
    """Passes of one stage, or of the save or load of a role."""

    name: str
    passes: tuple[ModelPass, ...] = ()
    work: Literal["updates", "saves", "loads"] = "updates"
    """Kind of work of a pass that trains. A save and a load need the same parts of a role as an update."""

    def has(self, kind: str) -> bool:
        return any(each.kind == kind for each in self.passes)

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles whose processes compute."""
        return tuple(dict.fromkeys(each.role for each in self.passes if each.role))


def schedule_of(traced: Trace, recipe: Recipe) -> ResidencySchedule:
    """Return the schedule of the roles, from the passes of each stage.

    A role remains on the device until another role needs the device. Stages without a pass need no device, nor does
    scoring without reward models. Roles are saved one after the other, and a resume loads them one after the other.
    """
    scores, has_reference = bool(reward_models(recipe)), kl_use(recipe).is_on
    uses = [_StageUse(each.name, each.passes) for each in step_work(traced, recipe)]
    uses.append(_StageUse(EVAL, tuple(each for each in EVALUATION.passes(recipe) if each.kind == "generate")))
    uses += [_StageUse(EVAL_SCORES, (ModelPass("score"),))] * scores
    uses += [_StageUse(f"{role}_save", (ModelPass("train", role),), "saves") for role in traced.roles]
    uses += [_StageUse(f"{role}_load", (ModelPass("train", role),), "loads") for role in traced.roles]
    parts = defaultdict[str, list[str]](list)
    if any(call.is_parallel for call in traced.calls):
        parts["beside generation"] += [call.stage.name for call in traced.calls]
    resident_parts: tuple[str, ...] = ()
    for use in uses:
        weights = tuple(f"{role} weights" for role in use.roles)
        working, last, work = resident_parts, resident_parts, "scores"
        if use.has("generate"):
            parts["draws"].append(use.name)
            # The policy computes the log-probs of the canary while the generator (vLLM) holds the KV cache.
            working, last = ("generator", *weights), ("generator",)
        elif use.has("train"):
            training = tuple(f"{role} training" for role in use.roles)
            # The reference stays on the device if the policy was the last role that computed.
            reads_reference = any(each.with_reference for each in use.passes)
            has_it = reads_reference or (POLICY in use.roles and "reference" in resident_parts)
            working = last = (*weights, *training, *(["reference"] if has_it else []))
            work = use.work
        elif use.has("forward"):
            is_resident = has_reference and POLICY in use.roles
            working = last = (*weights, *(["reference"] if is_resident else []))
        elif use.has("score") and scores:
            working = last = ("scoring",)
        for part in (*working, *(f"{role} {work}" for role in use.roles)):
            parts[part].append(use.name)
        resident_parts = last
    return ResidencySchedule(tuple(use.name for use in uses), {part: tuple(names) for part, names in parts.items()})


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
