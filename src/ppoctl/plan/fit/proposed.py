"""The proposals of `plan --fit`: results of the search with as few changes as possible, checked with the estimate of
`plan` and with the rules of recipes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ppoctl.core.key_path import KeyPath
from ppoctl.models.shape import ModelShape
from ppoctl.models.trainable_tables import AdaptersTable, LoraTable, TopLayersTable
from ppoctl.plan.fit.choices import FitCandidate, TrainedPartTable, candidate_of, changes, settled
from ppoctl.plan.fit.search import FitSearch, Found, IsValid, TrainedParts
from ppoctl.plan.fit.seconds import StepSeconds, sequences_at_once
from ppoctl.plan.memory.estimate import Memory, estimate, misfit
from ppoctl.recipe.parallel import devices
from ppoctl.recipe.schema import Recipe

MOST = 3
"""Number of proposals."""
EXAMINED = 100
"""Number of results of the search that are examined for each part that may train."""
CLEARLY_FASTER = 0.75
"""A proposal that changes the results replaces one that does not if its time is at most this fraction of the time of
the fastest that does not."""
TOP_LAYERS = (1 / 2, 1 / 4, 1 / 8)
"""Fractions of the layers that are tried as the last layers that train."""
ADAPTERS = AdaptersTable(lora=LoraTable(rank=8))
"""Adapters that are tried."""
NEGLIGIBLE = 0.01
"""A setting of the recipe is kept if the step is slower by at most this fraction."""


@dataclass(frozen=True)
class Proposal:
    """A recipe that fits, as changes of another one."""

    recipe: Recipe
    changes: Mapping[KeyPath, Any]
    """Key -> new value. Empty: the recipe fits as it is."""
    results: tuple[str, ...]
    """Sentences about changes of the results; empty: the results do not change."""
    seconds: StepSeconds
    memory: Memory
    at_once: int
    """Sequences of full length that an engine decodes at the same time."""


@dataclass(frozen=True)
class Proposals:
    """The answer of `plan --fit`."""

    gpus: int
    own_gpus: int
    """Number of GPUs of the recipe as it is."""
    as_it_is: StepSeconds
    found: tuple[Proposal, ...]
    """Recipes that fit with the margin: those that do not change the results first, the fastest first."""
    nearest: Proposal | None
    """If none fits: the settings with the smallest memory of the fullest stage; None: no engine starts."""


@dataclass
class _Proposer:
    search: FitSearch
    shapes: Mapping[str, ModelShape]
    gpu_gib: float
    accepts: IsValid
    examined: list[FitCandidate] = field(default_factory=list)
    found: list[Proposal] = field(default_factory=list)

    def accepted(self, trained: TrainedParts) -> Iterator[Proposal]:
        """Yield the proposals for what trains, the fastest first. Two proposals differ in more than the sizes of
        microbatches and cache, and none contains all changes of a faster one."""
        for each in islice(self.search.fastest(trained), EXAMINED):
            found = self._with_few_changes(each)
            if found.candidate in self.examined:
                continue
            self.examined.append(found.candidate)
            recipe = settled(self.search.base, found.candidate)
            changed = changes(self.search.recipe, recipe)
            if any(
                _kind(recipe) == _kind(other.recipe)
                or (other.changes.items() <= changed.items() and other.seconds.total <= found.seconds.total)
                for other in self.found
            ):
                continue
            proposal = self.proposal(found)
            if self._fits(proposal.memory) and self.accepts(proposal.recipe):
                self.found.append(proposal)
                yield proposal

    def proposal(self, found: Found) -> Proposal:
        """Return these settings as changes of the recipe."""
        search, candidate = self.search, found.candidate
        recipe = settled(search.base, candidate)
        results = tuple(
            _change_of_results(role, choice.train)
            for role, choice in candidate.roles.items()
            if choice.train != search.recipe.trained[role].train
        )
        engine = search.footprints.engine_bytes(candidate.generator)
        at_once = sequences_at_once(search.times.sequences, candidate.generator, engine)
        memory = estimate(recipe, self.shapes, self.gpu_gib)
        return Proposal(recipe, changes(search.recipe, recipe), results, found.seconds, memory, at_once)

    def _fits(self, memory: Memory) -> bool:
        fullest = max(pool.fullest.bytes for pool in memory.places)
        return misfit(memory) is None and fullest <= self.search.limit

    def _with_few_changes(self, found: Found) -> Found:
        """Return the settings with each value of the recipe that costs nearly nothing."""
        own, most = candidate_of(self.search.recipe), found.seconds.total * (1 + NEGLIGIBLE)
        for path in _values(own):
            candidate = _with_value_of(own, found.candidate, path)
            if candidate.generator.engines * candidate.generator.tensor > self.search.gpus:
                continue
            measured = self.search.measured(candidate)
            if measured.seconds.total <= most and self.search.fits(measured):
                found = measured
        return found


def propose(
    recipe: Recipe,
    shapes: Mapping[str, ModelShape],
    gpu_gib: float,
    gpus: int | None,
    accepts: IsValid,
    notify: Callable[[str], None],
) -> Proposals:
    """Return the fastest recipes that fit on GPUs of `gpu_gib` GiB.

    `gpus` is the number of GPUs; None: that of the recipe. `accepts` checks the rules of recipes. `notify` receives
    what is searched.
    """
    search = FitSearch(recipe, shapes, gpu_gib, gpus or devices(recipe), accepts)
    proposer = _Proposer(search, shapes, gpu_gib, accepts)
    own = {role: table.train for role, table in recipe.trained.items()}
    notify("settings that do not change the results")
    same, others = list(islice(proposer.accepted(own), MOST)), list[Proposal]()
    kinds = [list(filter(search.may_train, kind)) for kind in _other_parts(recipe, shapes)]
    for kind in kinds:
        notify("adapters and frozen layers")
        others += next((found for trained in kind if (found := list(islice(proposer.accepted(trained), 1)))), [])
    others.sort(key=lambda each: each.seconds.total)
    is_faster = same and others and others[0].seconds.total <= CLEARLY_FASTER * same[0].seconds.total
    same = same[: MOST - 1] if is_faster else same
    chosen = (*same, *others[: MOST - len(same)])
    nearest = None
    if not chosen:
        parts = [own, *(trained for kind in kinds for trained in kind)]
        started = [each for each in map(search.nearest, parts) if each is not None]
        if started:
            nearest = proposer.proposal(min(started, key=lambda each: each.peak))
    as_it_is = search.measured(candidate_of(recipe)).seconds
    return Proposals(search.gpus, devices(recipe), as_it_is, chosen, nearest)


def _other_parts(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> Iterator[list[TrainedParts]]:
    """Yield what may train in place of all layers, as lists of which the first that fits is proposed: adapters of one
    role, adapters of all roles, and the last layers of all roles, the most layers first. A role that trains a part in
    the recipe keeps it."""
    own = {role: table.train for role, table in recipe.trained.items()}
    whole = [role for role, part in own.items() if part is None]
    for role in whole if len(whole) > 1 else ():
        yield [{**own, role: ADAPTERS}]
    if whole:
        yield [{**own, **dict.fromkeys(whole, ADAPTERS)}]
        yield [{**own, **{role: _top_layers_for(shapes[role], frac) for role in whole}} for frac in TOP_LAYERS]


def _kind(recipe: Recipe) -> object:
    """Return the settings of a recipe without the sizes of microbatches and of the cache."""
    candidate = candidate_of(recipe)
    roles = [replace(choice, batching=None) for choice in candidate.roles.values()]  # type: ignore[arg-type]
    return roles, candidate.offload, candidate.generator.tensor


def _values(candidate: FitCandidate) -> list[tuple[str, ...]]:
    """Return the paths of the values that `_with_few_changes` sets back, the largest changes first."""
    paths: list[tuple[str, ...]] = [("offload",), ("engines", "tensor"), ("compile",), ("gpu_memory_frac",)]
    for role, choice in candidate.roles.items():
        paths += [(role, "optimizer_on"), (role, "recompute")]
        paths += [(role, "batching", name) for name in type(choice.batching).model_fields]
    return paths


def _with_value_of(own: FitCandidate, candidate: FitCandidate, path: tuple[str, ...]) -> FitCandidate:
    """Return the candidate with one value of `own`."""
    first, *names = path
    if first == "offload":
        return replace(candidate, offload=own.offload)
    if first not in own.roles:
        update = {name: getattr(own.generator, name) for name in path}
        return replace(candidate, generator=candidate.generator.model_copy(update=update))
    choice, own_choice = candidate.roles[first], own.roles[first]
    if names[0] == "batching":
        batching = choice.batching.model_copy(update={names[1]: getattr(own_choice.batching, names[1])})
        return candidate.with_role(first, replace(choice, batching=batching))
    return candidate.with_role(first, replace(choice, **{names[0]: getattr(own_choice, names[0])}))


def _top_layers_for(shape: ModelShape, frac: float) -> TopLayersTable:
    """Return the last layers that are tried: this fraction of all, at least one."""
    return TopLayersTable(top_layers=max(1, int(shape.num_layers * frac)))


def _change_of_results(role: str, part: TrainedPartTable) -> str:
    """Return what a role trains in place of all layers."""
    if isinstance(part, AdaptersTable):
        return (
            f"the {role} trains adapters of rank {part.lora.rank} (their learning rate is usually ten times as high)"
        )
    assert part is not None
    return f"only the last {part.top_layers} layers of the {role} train"
