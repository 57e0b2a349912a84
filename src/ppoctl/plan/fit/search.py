"""The search: settings of a recipe that fit on GPUs of a given size, the fastest first.

A *structure* fixes the layouts, what trains, the place of each optimizer, the engines and the offloaded roles. Within
a structure, the roles are independent: each role takes the fastest recomputation and microbatch that fit next to the
other roles, for each size of the KV cache that changes the number of waves of decoding. Structures are tried in the
order of a lower bound of their time: the time without a limit of memory. Less work of any kind never makes a step
longer, whether decoding overlaps with the other work or not. So the fastest choice of each role gives the bound.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from heapq import heappop, heappush
from itertools import combinations, product
from math import ceil
from operator import add, le
from typing import Literal

from ppoctl.algorithms.role_model import reward_models
from ppoctl.algorithms.role_table import BySequences, ByTokens, Recompute
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.sizes import longest_sequence, minibatch_seqs
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.shape import ModelShape
from ppoctl.plan.fit.choices import (
    FitCandidate,
    RoleChoice,
    TrainedPartTable,
    candidate_of,
    on_shared_gpus,
    settled,
    split_layout,
)
from ppoctl.plan.fit.footprint import Footprints, Occupants, ProcessBytes, StageVector, occupants, total
from ppoctl.plan.fit.seconds import StepSeconds, StepTimes, offload_seconds
from ppoctl.plan.memory.assumptions import GIB
from ppoctl.recipe.parallel import devices, layouts
from ppoctl.recipe.schema import GeneratorTable, Recipe

MARGIN_GIB = 1.5
"""GPU memory that a proposed recipe leaves free, because the estimate contains assumed sizes."""
LARGEST_BUDGET = 32768
"""Largest number of tokens of a microbatch that is tried."""
LONG_SEQUENCE = 8192
"""Number of tokens of a sequence from which context ranks are tried."""
LARGEST_CACHE_FRAC = 0.9
"""Largest `generator.gpu_memory_frac` that is tried."""
SMALL_CHUNK = 256
"""Number of tokens of a chunk of logits that is tried in addition to the recipe's."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
PLACES: tuple[Literal["device", "cpu"], ...] = ("device", "cpu")
TrainedParts = Mapping[str, TrainedPartTable]
"""Role -> what trains."""

IsValid = Callable[[Recipe], bool]
"""Function that checks the rules of recipes."""


@dataclass(frozen=True)
class Found:
    """Settings that fit, or come nearest, and their time."""

    candidate: FitCandidate
    seconds: StepSeconds
    peak: int
    """Bytes of the fullest stage on the fullest GPU."""


class _Option:
    """One choice of recomputation and batching of a role. Its memory is computed when it is first read."""

    def __init__(self, footprints: Footprints, role: str, choice: RoleChoice, seconds: StepSeconds) -> None:
        self.role, self.choice, self.seconds = role, choice, seconds
        self._footprints = footprints

    @cached_property
    def processes(self) -> tuple[ProcessBytes, ...]:
        """Memory of a process of each pipeline stage."""
        return self._footprints.role(self.role, self.choice)


@dataclass(frozen=True)
class _RoleOptions:
    """Choices of a role in a structure."""

    smallest: _Option
    """The choice with the smallest microbatch and full recomputation."""
    fastest_first: Sequence[_Option]

    @property
    def moved(self) -> int:
        """Bytes that are moved in each round trip of an offloaded role."""
        return max(process.moved for process in self.smallest.processes)


@dataclass(frozen=True)
class _Structure:
    roles: Mapping[str, _RoleOptions]
    caches: Sequence[GeneratorTable]
    """Tables of the engines with different sizes of the KV cache, the largest first."""
    offload: tuple[str, ...]
    fixed: StepSeconds
    """Seconds of offloading."""
    least: StepSeconds
    """Seconds without decoding, if each role has its fastest choice."""
    bound: tuple[float, float]
    """Lower bound of `StepSeconds.rank`."""


class FitSearch:
    """The search for one recipe, one size of GPU and one number of GPUs."""

    def __init__(
        self, recipe: Recipe, shapes: Mapping[str, ModelShape], gpu_gib: float, gpus: int, is_valid: IsValid
    ) -> None:
        self.recipe, self.gpus = recipe, gpus
        self.base = on_shared_gpus(recipe, gpus)
        self.limit = int((gpu_gib - MARGIN_GIB) * GIB)
        self.footprints, self.times = Footprints(self.base, shapes, gpu_gib), StepTimes(self.base, shapes)
        self._gpu_bytes = gpu_gib * GIB
        self._is_valid = is_valid

    def fastest(self, trained: TrainedParts) -> Iterator[Found]:
        """Yield the settings that fit, the fastest of each structure, the fastest structure first. `trained` has what
        trains of each role."""
        solved: list[tuple[tuple[float, float], int, Found]] = []
        structures = sorted(self._structures(trained), key=lambda structure: structure.bound)
        for number, structure in enumerate(structures):
            while solved and solved[0][0] <= structure.bound:
                yield heappop(solved)[2]
            if (found := self._solved(structure)) is not None:
                heappush(solved, (found.seconds.rank, number, found))
        while solved:
            yield heappop(solved)[2]

    def nearest(self, trained: TrainedParts) -> Found | None:
        """Return the settings whose fullest stage needs least memory; None: no engine starts."""
        smallest = map(self._smallest, self._structures(trained))
        return min(smallest, key=lambda found: found.peak, default=None)

    def measured(self, candidate: FitCandidate) -> Found:
        """Return these settings with their time and memory."""
        roles = [self.times.role(role, choice) for role, choice in candidate.roles.items()]
        decoding = self.times.decoding(candidate.generator, self.footprints.engine_bytes(candidate.generator))
        processes = {role: self.footprints.role(role, choice) for role, choice in candidate.roles.items()}
        moved = sum(
            max(each.moved for each in processes[role]) for role in candidate.roles if role in candidate.offload
        )
        seconds = reduce(add, roles, decoding) + StepSeconds(offload=offload_seconds(moved))
        shared = self._shared(candidate.generator, candidate.roles[POLICY].layout, candidate.offload)
        vectors = (
            total(
                [shared, *(processes[role][stage].of(is_offloaded=role in candidate.offload) for role, stage in gpu)]
            )
            for gpu in occupants({role: choice.layout for role, choice in candidate.roles.items()})
        )
        return Found(candidate, seconds, max(map(max, vectors)))

    def fits(self, found: Found) -> bool:
        """Return whether the settings fit with the margin, and engines start."""
        starts = self.footprints.engine_bytes(found.candidate.generator).full_sequences > 0
        return starts and found.peak <= self.limit

    def _shared(self, table: GeneratorTable, policy: ParallelTable, offload: Sequence[str]) -> StageVector:
        """Return the memory of everything but the trained roles."""
        engine = self.footprints.engine(table).of(is_offloaded="generator" in offload)
        return total([self.footprints.rest(policy, offloads_rewards="reward" in offload), engine])

    def _solved(self, structure: _Structure) -> Found | None:
        """Return the fastest settings of a structure that fit; None: there are none."""
        best: tuple[tuple[float, float], FitCandidate] | None = None
        policy, offload = structure.roles[POLICY].smallest.choice.layout, structure.offload
        gpus = list(occupants({role: options.smallest.choice.layout for role, options in structure.roles.items()}))
        for table in structure.caches:
            decoding = self._decoding(table)
            # A smaller cache may decode faster: its waves may be more even.
            if best is not None and (structure.least + decoding).rank >= best[0]:
                continue
            shared = self._shared(table, policy, offload)
            chosen = {role: options.smallest for role, options in structure.roles.items()}
            if self._choose(chosen, structure, shared, gpus):
                of_roles = (option.seconds for option in chosen.values())
                rank = reduce(add, of_roles, decoding + structure.fixed).rank
                if best is None or rank < best[0]:
                    roles = {role: option.choice for role, option in chosen.items()}
                    best = rank, FitCandidate(roles, table, offload)
        return None if best is None else self.measured(best[1])

    def _choose(
        self, chosen: dict[str, _Option], structure: _Structure, shared: StageVector, gpus: Sequence[Occupants]
    ) -> bool:
        """Replace each role's choice with the fastest one that fits next to the others. Return whether the smallest
        choices fit."""

        def of(role: str, stage: int) -> StageVector:
            return chosen[role].processes[stage].of(is_offloaded=role in structure.offload)

        for number, (role, options) in enumerate(structure.roles.items()):
            limits = list[tuple[int, StageVector]]()
            for gpu in gpus:
                others = total([shared, *(of(other, stage) for other, stage in gpu if other != role)])
                free = tuple(self.limit - used for used in others)
                limits += [(stage, free) for other, stage in gpu if other == role]
            away = role in structure.offload
            first = [options.smallest] if number == 0 else []
            for option in first:
                if not _is_within(option, limits, is_offloaded=away):
                    return False
            chosen[role] = next(
                option
                for option in (*options.fastest_first, options.smallest)
                if _is_within(option, limits, is_offloaded=away)
            )
        return True

    def _smallest(self, structure: _Structure) -> Found:
        """Return the settings of a structure with the smallest KV cache with which vLLM starts."""
        roles = {role: options.smallest.choice for role, options in structure.roles.items()}
        return self.measured(FitCandidate(roles, structure.caches[-1], structure.offload))

    def _structures(self, trained: TrainedParts) -> Iterator[_Structure]:
        roles = list(self.base.trained)
        engines = [
            (caches, min(map(self._decoding, caches), key=lambda each: each.decoding))
            for caches in map(self._caches, self._engines)
            if caches
        ]
        for layout in self._layouts:
            of_role = {
                (role, place): self._options(role, layout[role], trained[role], place)
                for role, place in product(roles, PLACES)
            }
            for places in product(PLACES, repeat=len(roles)):
                options = {role: of_role[role, place] for role, place in zip(roles, places, strict=True)}
                of_roles = (each.fastest_first[0].seconds for each in options.values())
                fastest = reduce(add, of_roles, StepSeconds())
                for offload in self._offloads:
                    moved = sum(options[role].moved for role in roles if role in offload)
                    fixed = StepSeconds(offload=offload_seconds(moved))
                    least = fastest + fixed
                    for caches, decoding in engines:
                        yield _Structure(options, caches, offload, fixed, least, (least + decoding).rank)

    @cached_property
    def _offloads(self) -> list[tuple[str, ...]]:
        """Roles that may be offloaded in turn, with the reward models if there are any; first: none."""
        roles, rewards = [*self.base.trained, "generator"], ("reward",) if reward_models(self.base) else ()
        subsets = (subset for size in range(1, len(roles) + 1) for subset in combinations(roles, size))
        candidate = candidate_of(self.base)
        return [
            (),
            *(
                offload
                for offload in ((*subset, *rewards) for subset in subsets)
                if self._is_valid(settled(self.base, replace(candidate, offload=offload)))
            ),
        ]

    def _decoding(self, table: GeneratorTable) -> StepSeconds:
        return self.times.decoding(table, self.footprints.engine_bytes(table))

    def _options(
        self, role: str, layout: ParallelTable, train: TrainedPartTable, place: Literal["device", "cpu"]
    ) -> _RoleOptions:
        """Return the choices of recomputation and batching of a role. If two are as fast, that of the recipe is
        first."""
        own, batchings = self.recipe.trained[role], _batchings(self.base, role)

        def option(recompute: Recompute, batching: BySequences | ByTokens) -> _Option:
            choice = RoleChoice(layout, train, place, recompute, batching)
            return _Option(self.footprints, role, choice, self.times.role(role, choice))

        def rank(option: _Option) -> tuple[float, bool, bool, int]:
            choice = option.choice
            is_other = (choice.recompute != own.recompute, choice.batching != own.batching)
            return option.seconds.total, *is_other, batchings.index(choice.batching)

        options = [option(recompute, batching) for recompute, batching in product(RECOMPUTE, batchings)]
        return _RoleOptions(option("full", batchings[0]), sorted(options, key=rank))

    @cached_property
    def _layouts(self) -> list[Mapping[str, ParallelTable]]:
        """Valid layouts of all roles: that of the recipe, and layouts with the same ranks for each role."""
        own, tried = layouts(self.recipe), list[Mapping[str, ParallelTable]]()
        if devices(self.recipe) == self.gpus and self.recipe.cluster.placement == "colocated":
            tried.append(own)
        powers = [2**exponent for exponent in range(4)]
        contexts = {1, *(layout.context for layout in own.values())}
        if longest_sequence(self.recipe) >= LONG_SEQUENCE:
            contexts |= set(powers)
        for tensor, pipeline, context in product(powers, powers, sorted(contexts)):
            if self.gpus % (tensor * pipeline * context) == 0:
                ranks = (self.gpus, tensor, pipeline, context)
                tried.append({role: split_layout(layout, *ranks) for role, layout in own.items()})
        different = (layout for number, layout in enumerate(tried) if layout not in tried[:number])
        return list(filter(self._is_allowed, different))

    def _is_allowed(self, layout: Mapping[str, ParallelTable]) -> bool:
        candidate = candidate_of(self.base)
        for role, table in layout.items():
            candidate = candidate.with_role(role, replace(candidate.roles[role], layout=table))
        return self._is_valid(settled(self.base, candidate))

    def may_train(self, trained: TrainedParts) -> bool:
        """Return whether the rules of recipes allow these parts to train."""
        candidate = candidate_of(self.base)
        for role, part in trained.items():
            candidate = candidate.with_role(role, replace(candidate.roles[role], train=part))
        return self._is_valid(settled(self.base, candidate))

    @cached_property
    def _engines(self) -> list[GeneratorTable]:
        """Return tables of engines, without a size of the cache: those of the recipe, and engines of 1 to 8 ranks on
        all GPUs; each also without CUDA graphs, whose memory the cache can then use."""
        own = self.recipe.generator
        sizes = [(self.gpus // tensor, tensor) for tensor in (1, 2, 4, 8) if self.gpus % tensor == 0]
        if devices(self.recipe) == self.gpus and own.engines * own.tensor <= self.gpus:
            sizes.insert(0, (own.engines, own.tensor))
        tables = [
            own.model_copy(update={"engines": engines, "tensor": tensor, "compile": compiled})
            for engines, tensor in dict.fromkeys(sizes)
            for compiled in dict.fromkeys((own.compile, False))
        ]
        return [table for table in tables if self._is_valid(self.base.model_copy(update={"generator": table}))]

    def _caches(self, table: GeneratorTable) -> list[GeneratorTable]:
        """Return the table with each fraction of a GPU that changes the number of waves of decoding, the largest
        first: the smallest fraction for that number. The fraction of the recipe is tried too."""
        engine = self.footprints.engine_bytes(table)
        most = min(ceil(self.times.sequences / table.engines), table.max_concurrent_seqs)  # of a GPU
        fracs = {table.gpu_memory_frac}
        for together in {ceil(most / waves) for waves in range(1, most + 1)}:
            # A hundredth more than the bytes: vLLM rounds the cache down.
            needed = (table.engines_per_gpu * engine.weights + together * engine.sequence_bytes) / self._gpu_bytes
            fracs.add(ceil(100 * needed) / 100)
        tables = (
            table.model_copy(update={"gpu_memory_frac": frac})
            for frac in sorted(fracs, reverse=True)
            if frac <= LARGEST_CACHE_FRAC
        )
        return [table for table in tables if self.footprints.engine_bytes(table).full_sequences > 0]


def _is_within(option: _Option, limits: Sequence[tuple[int, StageVector]], *, is_offloaded: bool) -> bool:
    """Return whether a choice needs at most these bytes in each stage, for each pipeline stage."""
    return all(all(map(le, option.processes[stage].of(is_offloaded=is_offloaded), free)) for stage, free in limits)


def _batchings(recipe: Recipe, role: str) -> list[BySequences | ByTokens]:
    """Return the batchings that are tried, the one with the smallest microbatches first: with the limits of the
    recipe, and with powers of two from the smallest limit that holds the longest sequence."""
    own = recipe.trained[role].batching
    update, forward = list(type(own).model_fields)[:2]
    least, most = (
        (1, minibatch_seqs(recipe, role))
        if isinstance(own, BySequences)
        else (longest_sequence(recipe) + 1, LARGEST_BUDGET)
    )
    powers = (2**exponent for exponent in range(16))
    limits = sorted({getattr(own, update), least, *(power for power in powers if least < power <= most)})
    chunks = sorted({own.logits_chunk_tokens, min(own.logits_chunk_tokens, SMALL_CHUNK)})
    has_forward = getattr(own, forward) is not None
    return [
        own.model_copy(update={update: limit, forward: other, "logits_chunk_tokens": chunk})
        for limit, chunk in product(limits, chunks)
        for other in (sorted({limit, getattr(own, forward)}) if has_forward else [None])
    ]
