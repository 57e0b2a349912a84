"""Memory that several processes share, and whether what is in it fits: a GPU, a machine without GPUs, a node's host.
Each is a sum over items. Devices are given to nodes in their order, as Ray packs them; the driver is on the first. Of
a GPU's driver and pinned buffers of its libraries nothing is known here.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from ppoctl.plan.memory.items import Sizes, process_items, shared_items
from ppoctl.plan.memory.residency import MemoryItem, resident
from ppoctl.recipe.parallel import GPUS_PER_NODE, devices, leaving, processes
from ppoctl.recipe.schema import Recipe

Process = tuple[str, int]
"""A role, and a rank of it."""


@dataclass(frozen=True)
class StageBytes:
    """Memory of a pool in one stage of a step."""

    stage: str
    bytes: int
    fits: bool | None
    """Whether the stage can be; None: not known from here."""


@dataclass(frozen=True)
class Pool:
    """Memory of a GPU, of a machine, or of a node, with what takes it."""

    name: str
    room: int | None
    """Bytes that there are; None: not known from here."""
    items: tuple[MemoryItem, ...]
    stages: tuple[StageBytes, ...]

    @property
    def fullest(self) -> StageBytes:
        return max(self.stages, key=lambda stage: stage.bytes)

    def largest(self, stage: str) -> list[MemoryItem]:
        """What is there in a stage, added up by name, the largest first."""
        found: dict[str, MemoryItem] = {}
        for item in self.items:
            if item.is_in(stage):
                before = found.get(item.name)
                found[item.name] = item if before is None else replace(before, bytes=before.bytes + item.bytes)
        return sorted(found.values(), key=lambda item: -item.bytes)


def gpu_pools(recipe: Recipe, sizes: Sizes, room: int, leaving: Collection[str]) -> list[Pool]:
    """Memory of the fullest GPU where roles are colocated; where they are apart, of each role's fullest."""
    shared, count = recipe.cluster.placement == "colocated", devices(recipe)
    groups = defaultdict[str, list[Pool]](list)
    for tenants in _tenants(recipe):
        roles = [role for role, _ in tenants]
        name = f"the {roles[0]}'s GPU"
        if shared:
            name = f"{f'the fullest of {count} GPUs' if count > 1 else 'the GPU'} ({', '.join(roles)})"
        items = resident(_items(recipe, sizes, tenants, roles), sizes.schedule, leaving)
        found = pool_of(name, room, [item for item in items if item.place == "device"], sizes)
        groups["" if shared else roles[0]].append(found)
    return [max(alike, key=lambda pool: pool.fullest.bytes) for alike in groups.values()]


def machine_pool(recipe: Recipe, sizes: Sizes, room: int | None) -> Pool:
    """Memory of all processes together, without GPUs: on this machine, or the nodes of a Ray. Nothing leaves it."""
    joins = recipe.cluster.ray_address is not None
    name = "all nodes of the Ray together" if joins else "this machine with all processes"
    everyone = {*processes(recipe), "driver", "node"}
    items = resident(_items(recipe, sizes, chain(*_tenants(recipe)), everyone), sizes.schedule, ())
    return pool_of(name, room, sorted(items, key=lambda item: item.place), sizes)


def fullest_node(recipe: Recipe, sizes: Sizes) -> Pool:
    """Host memory of the fullest of all nodes of `GPUS_PER_NODE` that the recipe's devices take."""
    tenants = _tenants(recipe)
    nodes = [tenants[first : first + GPUS_PER_NODE] for first in range(0, len(tenants), GPUS_PER_NODE)]
    found = []
    for number, gpus in enumerate(nodes):
        name = f"a node with {len(gpus)} GPU{'s' * (len(gpus) > 1)}"
        name += f" (the fullest of {len(nodes)})" if len(nodes) > 1 else ""
        roles = {*processes(recipe), "node"} | ({"driver"} if number == 0 else set())
        items = resident(_items(recipe, sizes, chain(*gpus), roles), sizes.schedule, leaving(recipe))
        found.append(pool_of(name, None, [item for item in items if item.place == "host"], sizes))
    return max(found, key=lambda pool: pool.fullest.bytes)


def _tenants(recipe: Recipe) -> list[list[Process]]:
    """Processes on each device (`engines.ray.placement`)."""
    sizes = processes(recipe)
    if recipe.cluster.placement == "apart":
        return [[(role, rank)] for role, size in sizes.items() for rank in range(size)]
    return [[(role, rank) for role, size in sizes.items() if rank < size] for rank in range(max(sizes.values()))]


def _items(recipe: Recipe, sizes: Sizes, tenants: Iterable[Process], roles: Collection[str]) -> Iterator[MemoryItem]:
    """Items of these processes, and of what there is once those of these roles."""
    for role, rank in tenants:
        yield from process_items(recipe, sizes, role, rank)
    yield from (item for item in shared_items(recipe, sizes) if item.role in roles)


def pool_of(name: str, room: int | None, items: Iterable[MemoryItem], sizes: Sizes) -> Pool:
    """The pool of these items, with its memory in every stage of a step."""
    totals = defaultdict[MemoryItem, int](int)
    for item in items:
        totals[replace(item, bytes=0)] += item.bytes
    found = tuple(replace(item, bytes=total) for item, total in totals.items() if total)
    # vLLM starts with a cache that holds one sequence.
    draws = sizes.generator.full_sequences > 0 or all(item.role != "generator" for item in found)
    stages = []
    for stage in sizes.schedule.stages:
        total = sum(item.bytes for item in found if item.is_in(stage))
        fits = None if room is None else total <= room
        stages.append(StageBytes(stage, total, fits if draws or stage not in sizes.schedule.of("draws") else False))
    return Pool(name, room, found, tuple(stages))
