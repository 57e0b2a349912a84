"""GPU memory of each process by stage, from the items of the memory estimate (`plan.memory.items`).

The memory of a GPU is a sum over its processes. The bytes of a process depend only on the settings of its own role,
so they are computed once for each choice, and the memory of a recipe is a sum of a few of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from ppoctl.algorithms.role_model import model_of
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.sizes import generator_window
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.shape import ModelShape
from ppoctl.plan.fit.choices import RoleChoice, candidate_of, choice_of, settled
from ppoctl.plan.memory.assumptions import GIB
from ppoctl.plan.memory.estimate import estimate, training_of
from ppoctl.plan.memory.generator_memory import GeneratorBytes, generator_bytes
from ppoctl.plan.memory.items import Sizes, process_items, shared_items
from ppoctl.plan.memory.residency import MemoryItem, resident
from ppoctl.plan.memory.shard import Precision
from ppoctl.plan.memory.trainer_memory import role_bytes
from ppoctl.recipe.parallel import processes
from ppoctl.recipe.schema import GeneratorTable, Recipe
from ppoctl.store.outline import EVAL

StageVector = tuple[int, ...]
"""Bytes on one GPU in each stage of the schedule."""
Occupants = tuple[tuple[str, int], ...]
"""Trained roles with a process on a GPU, each with the pipeline stage of the process."""


@dataclass(frozen=True)
class ProcessBytes:
    """GPU memory of one process."""

    kept: StageVector
    """If the role is never offloaded."""
    offloaded: StageVector
    """If the role is offloaded while other roles compute."""
    moved: int
    """Bytes that are moved to the host and back in one step, if the role is offloaded; once per round trip."""

    def of(self, *, is_offloaded: bool) -> StageVector:
        """Return the bytes by stage."""
        return self.offloaded if is_offloaded else self.kept


class Footprints:
    """GPU memory of the processes of a recipe whose roles share GPUs, for different settings of each role."""

    def __init__(self, recipe: Recipe, shapes: Mapping[str, ModelShape], gpu_gib: float) -> None:
        self.recipe, self.shapes, self.gpu_gib = recipe, shapes, gpu_gib
        self._sizes: dict[tuple[int | None, ...], Sizes] = {}
        self._roles: dict[tuple[str, RoleChoice], tuple[ProcessBytes, ...]] = {}
        self._engine_bytes: dict[tuple[int, float], GeneratorBytes] = {}
        self._engines: dict[GeneratorTable, ProcessBytes] = {}
        self._rest: dict[tuple[ParallelTable, bool], StageVector] = {}
        self._usual = self._sizes_with(choice_of(recipe, POLICY).layout)
        self.stages = self._usual.schedule.stages

    def role(self, role: str, choice: RoleChoice) -> tuple[ProcessBytes, ...]:
        """Return the memory of a process of each pipeline stage of a trained role."""
        if (found := self._roles.get((role, choice))) is None:
            recipe = settled(self.recipe, candidate_of(self.recipe).with_role(role, choice))
            precision = Precision(model_of(recipe, role).weight_bytes, "gpu")
            ranks = role_bytes(training_of(recipe, role, self.shapes[role], precision))
            sizes = _with(self._usual, roles={**self._usual.roles, role: ranks})
            firsts = (stage * choice.layout.stage_ranks for stage in range(choice.layout.pipeline))
            found = tuple(self._process(process_items(recipe, sizes, role, rank), role) for rank in firsts)
            self._roles[role, choice] = found
        return found

    def engine_bytes(self, table: GeneratorTable) -> GeneratorBytes:
        """Return the bytes of one process of an engine."""
        key = (table.tensor, table.gpu_memory_frac)
        if (found := self._engine_bytes.get(key)) is None:
            weight, room = model_of(self.recipe, POLICY).weight_bytes, int(self.gpu_gib * GIB)
            found = generator_bytes(self.shapes[POLICY], weight, table, generator_window(self.recipe), room)
            self._engine_bytes[key] = found
        return found

    def engine(self, table: GeneratorTable) -> ProcessBytes:
        """Return the memory of the processes of the engines on a GPU."""
        if (found := self._engines.get(table)) is None:
            recipe = self.recipe.model_copy(update={"generator": table})
            sizes = _with(self._usual, generator=self.engine_bytes(table))
            each = (process_items(recipe, sizes, "generator", number) for number in range(table.engines_per_gpu))
            found = self._process(chain(*each), "generator")
            self._engines[table] = found
        return found

    def rest(self, policy: ParallelTable, *, offloads_rewards: bool) -> StageVector:
        """Return the memory that depends on no other setting than the layout of the policy: weights in transfer, and
        reward models."""
        if (found := self._rest.get((policy, offloads_rewards))) is None:
            sizes = self._sizes_with(policy)
            vectors = [self._process(shared_items(self.recipe, sizes), POLICY).kept]
            for role in sizes.scoring:
                ranks = range(processes(self.recipe)[role])
                each = [self._process(process_items(self.recipe, sizes, role, rank), role) for rank in ranks]
                of_ranks = (process.of(is_offloaded=offloads_rewards) for process in each)
                vectors.append(tuple(map(max, zip(*of_ranks, strict=True))))
            found = self._rest[policy, offloads_rewards] = total(vectors)
        return found

    def _sizes_with(self, policy: ParallelTable) -> Sizes:
        """Return the sizes of a recipe whose policy has this layout. Only its pipeline stages make a difference."""
        key = (policy.pipeline, policy.stages_per_rank, policy.first_stage_layers, policy.last_stage_layers)
        if (found := self._sizes.get(key)) is None:
            candidate = candidate_of(self.recipe)
            for role, choice in candidate.roles.items():
                changed = RoleChoice(policy, choice.train, choice.optimizer_on, choice.recompute, choice.batching)
                candidate = candidate.with_role(role, changed)
            memory = estimate(settled(self.recipe, candidate), self.shapes, self.gpu_gib)
            found = self._sizes[key] = _with(memory)
        return found

    def _process(self, items: Iterable[MemoryItem], role: str) -> ProcessBytes:
        on_device = [item for item in items if item.place == "device"]
        kept, offloaded = (
            [item for item in resident(on_device, self._usual.schedule, roles) if item.place == "device"]
            for roles in ((), (role,))
        )
        moved = sum(item.bytes * self._round_trips(item) for item in on_device if item.between == "moved")
        return ProcessBytes(self._by_stage(kept), self._by_stage(offloaded), moved)

    def _by_stage(self, items: list[MemoryItem]) -> StageVector:
        stages = self._usual.schedule.stages
        return tuple(sum(item.bytes for item in items if item.is_in(stage)) for stage in stages)

    def _round_trips(self, item: MemoryItem) -> int:
        """Return how often an offloaded item is loaded in one step. The stages of a step are a cycle."""
        ends = ("_save", "_load")
        step = [
            stage for stage in self._usual.schedule.stages if not stage.startswith(EVAL) and not stage.endswith(ends)
        ]
        present = [item.is_in(stage) for stage in step]
        return sum(here and not before for before, here in zip([present[-1], *present], present, strict=False))


def occupants(layouts: Mapping[str, ParallelTable]) -> Iterator[Occupants]:
    """Yield the trained roles of a GPU, each with its pipeline stage, for each different combination."""
    ranks = range(max(layout.world_size for layout in layouts.values()))
    yield from dict.fromkeys(
        tuple((role, rank // layout.stage_ranks) for role, layout in layouts.items() if rank < layout.world_size)
        for rank in ranks
    )


def total(vectors: Iterable[StageVector]) -> StageVector:
    """Return the sum of vectors, stage by stage."""
    return tuple(map(sum, zip(*vectors, strict=True)))


def _with(sizes: Sizes, **changed: Any) -> Sizes:
    return Sizes(**{field.name: getattr(sizes, field.name) for field in fields(Sizes)} | changed)
