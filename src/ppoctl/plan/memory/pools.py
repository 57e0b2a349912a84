"""Pools of memory that several processes share, and whether the items of a pool fit in it.

A pool is the memory of a GPU, of a machine without GPUs, or of the host of a node. Its use is a sum over items.
Devices are assigned to nodes in order, as Ray packs them; the driver is on the first node. The memory of the GPU
driver and the pinned buffers of libraries are not counted.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from ppoctl.plan.memory.items import Sizes, process_items, shared_items
from ppoctl.plan.memory.residency import MemoryItem, resident
from ppoctl.recipe.parallel import GPUS_PER_NODE, devices, leaving, per_device, processes
from ppoctl.recipe.schema import Recipe

Process = tuple[str, int]
"""Role and rank."""


@dataclass(frozen=True)
class StageBytes:
    """Memory of a pool in one stage of a step."""

    stage: str
    bytes: int
    fits: bool | None
    """Whether the stage fits; None: the size of the pool is unknown."""


@dataclass(frozen=True)
class Pool:
    """Memory of a GPU, a machine, or a node, with its items."""

    name: str
    room: int | None
    """Size of the pool in bytes; None: unknown."""
    items: tuple[MemoryItem, ...]
    stages: tuple[StageBytes, ...]

    @property
    def fullest(self) -> StageBytes:
        return max(self.stages, key=lambda stage: stage.bytes)

    def largest(self, stage: str) -> list[MemoryItem]:
        """Return the items of a stage, summed by name, the largest first."""
        by_name: dict[str, MemoryItem] = {}
        for item in self.items:
            if item.is_in(stage):
                previous = by_name.get(item.name)
                by_name[item.name] = (
                    item if previous is None else replace(previous, bytes=previous.bytes + item.bytes)
                )
        return sorted(by_name.values(), key=lambda item: -item.bytes)


def gpu_pools(recipe: Recipe, sizes: Sizes, room: int, leaving: Collection[str]) -> list[Pool]:
    """Return the fullest GPU if roles are colocated; otherwise the fullest GPU of each role."""
    shared, count = recipe.cluster.placement == "colocated", devices(recipe)
    groups = defaultdict[str, list[Pool]](list)
    for occupants in _occupants(recipe):
        roles = [*dict.fromkeys(role for role, _ in occupants)]
        name = f"the {roles[0]}'s GPU"
        if shared:
            name = f"{f'the fullest of {count} GPUs' if count > 1 else 'the GPU'} ({', '.join(roles)})"
        items = resident(_items(recipe, sizes, occupants, roles), sizes.schedule, leaving)
        pool = pool_of(name, room, [item for item in items if item.place == "device"], sizes)
        groups["" if shared else roles[0]].append(pool)
    return [max(group, key=lambda pool: pool.fullest.bytes) for group in groups.values()]


def machine_pool(recipe: Recipe, sizes: Sizes, room: int | None) -> Pool:
    """Return the memory of all processes of a run without GPUs, on this machine or on all nodes of a Ray cluster.

    Without GPUs, no role is offloaded.
    """
    joins = recipe.cluster.ray_address is not None
    name = "all nodes of the Ray together" if joins else "this machine with all processes"
    everyone = {*processes(recipe), "driver", "node"}
    items = resident(_items(recipe, sizes, chain(*_occupants(recipe)), everyone), sizes.schedule, ())
    return pool_of(name, room, sorted(items, key=lambda item: item.place), sizes)


def fullest_node(recipe: Recipe, sizes: Sizes) -> Pool:
    """Return the host memory of the fullest node, if each node has `GPUS_PER_NODE` devices of the recipe."""
    occupants = _occupants(recipe)
    nodes = [occupants[first : first + GPUS_PER_NODE] for first in range(0, len(occupants), GPUS_PER_NODE)]
    pools = []
    for number, gpus in enumerate(nodes):
        name = f"a node with {len(gpus)} GPU{'s' * (len(gpus) > 1)}"
        name += f" (the fullest of {len(nodes)})" if len(nodes) > 1 else ""
        roles = {*processes(recipe), "node"} | ({"driver"} if number == 0 else set())
        items = resident(_items(recipe, sizes, chain(*gpus), roles), sizes.schedule, leaving(recipe))
        pools.append(pool_of(name, None, [item for item in items if item.place == "host"], sizes))
    return max(pools, key=lambda pool: pool.fullest.bytes)


def _occupants(recipe: Recipe) -> list[list[Process]]:
    """Return the processes on each device (`engines.ray.placement`)."""
    by_role = [_on_devices(role, size, per_device(recipe, role)) for role, size in processes(recipe).items()]
    if recipe.cluster.placement == "apart":
        return [*chain(*by_role)]
    return [[*chain(*on_device)] for on_device in zip_longest(*by_role, fillvalue=[])]


def _on_devices(role: str, size: int, together: int) -> list[list[Process]]:
    return [[(role, rank) for rank in range(first, first + together)] for first in range(0, size, together)]


def _items(
    recipe: Recipe, sizes: Sizes, occupants: Iterable[Process], roles: Collection[str]
) -> Iterator[MemoryItem]:
    """Yield the items of these processes, and the shared items of these roles."""
    for role, rank in occupants:
        yield from process_items(recipe, sizes, role, rank)
    yield from (item for item in shared_items(recipe, sizes) if item.role in roles)


def pool_of(name: str, room: int | None, items: Iterable[MemoryItem], sizes: Sizes) -> Pool:
    """Return the pool of these items, with its memory in each stage of a step."""
    totals = defaultdict[MemoryItem, int](int)
    for item in items:
        totals[replace(item, bytes=0)] += item.bytes
    merged = tuple(replace(item, bytes=total) for item, total in totals.items() if total)
    # vLLM does not start if the KV cache is too small for one sequence.
    can_generate = sizes.generator.full_sequences > 0 or all(item.role != "generator" for item in merged)
    stages = []
    for stage in sizes.schedule.stages:
        total = sum(item.bytes for item in merged if item.is_in(stage))
        fits = None if room is None else total <= room
        stages.append(
            StageBytes(stage, total, fits if can_generate or stage not in sizes.schedule.of("draws") else False)
        )
    return Pool(name, room, merged, tuple(stages))
