"""A recipe's bytes: roles rank by rank, generator, driver, and what each stage needs of a GPU or a machine."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import ceil
from typing import Any

from ppoctl.recipe.memory.activations import Microbatch, Precision
from ppoctl.recipe.memory.decoder import Decoder
from ppoctl.recipe.memory.driver import Batch, DriverBytes, Records, driver_bytes, records_of
from ppoctl.recipe.memory.generator import GeneratorBytes, buckets, on_cpu, on_gpu
from ppoctl.recipe.memory.residency import STAGES, Item, Place, StageBytes, at_work, stages_in
from ppoctl.recipe.memory.trainer import RankBytes, Training, ranks_of, state_bytes
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.rules import longest_sequence
from ppoctl.recipe.schema import ByTokens, KlInLoss, NoKl, Recipe, TrainedTable

GIB = 2**30
MIB = 2**20
OBJECT_STORE_BYTES = 256 * MIB
"""Of a Ray of the run's own (`engines.ray.cluster`)."""
RANK_BYTES, DRIVER_BYTES = 400 * MIB, 550 * MIB
"""A process of a role, and the driver with vLLM, before any model: Python and libraries, as seen with torch 2.13 and
vLLM 0.32 for CPUs."""
ROLES = ("actor", "critic")
_MORE_NODES = "take more nodes (`cluster.ray_address`) or a smaller model"


@dataclass(frozen=True)
class RoleBytes:
    """Actor or critic."""

    processes: int
    ranks: tuple[RankBytes, ...]
    """One of each pipeline stage."""
    state: int
    """A saved state."""

    @property
    def largest(self) -> RankBytes:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def resident(self) -> int:
        """Of all processes together, between calls."""
        return sum(rank.resident for rank in self.ranks) * self.processes // len(self.ranks)


@dataclass(frozen=True)
class Memory:
    """All of it. Estimates; see the modules they come from."""

    device: str
    """cpu or gpu."""
    place: Place
    roles: Mapping[str, RoleBytes]
    generator: GeneratorBytes
    driver: DriverBytes
    records: Records
    """A step's, on disk."""
    buckets: int
    """Buckets in which weights go to the generator."""
    largest_bucket: int
    items: tuple[Item, ...]
    """What takes memory of the place."""
    stages: tuple[StageBytes, ...]

    @property
    def pair(self) -> int:
        """Saved states of both roles."""
        return sum(role.state for role in self.roles.values())


def machine_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def estimate(recipe: Recipe, decoder: Decoder, gpu_gib: float | None = None) -> Memory:
    """For GPUs of `gpu_gib`; without it for CPUs, where this machine's memory is what everything has to fit."""
    weight = 4 if recipe.model.dtype == "float32" else 2
    at = Precision(weight, "cpu" if gpu_gib is None else "gpu")
    trainings = {role: training_of(recipe, role, decoder, at) for role in ROLES}
    roles = {role: _role(training, weight) for role, training in trainings.items()}
    sent = buckets(decoder, trainings["actor"].layout, weight)
    new_tokens = max(recipe.rollout.max_new_tokens, recipe.eval.max_new_tokens or 0)
    window = recipe.rollout.max_prompt_tokens + new_tokens
    if gpu_gib is None:
        generator = on_cpu(decoder, weight, recipe.generator.kv_cache_mib * MIB, window)
    else:
        generator = on_gpu(decoder, weight, int(recipe.generator.gpu_memory_frac * gpu_gib * GIB), window)
    batch = batch_of(recipe)
    driver = driver_bytes(batch, max(sent, default=0))
    on_machine = gpu_gib is None
    items = [*_trainer_items(recipe, trainings, all_ranks=on_machine), *_generator_items(generator, at.device)]
    if on_machine:
        items += _driver_items(driver, ranks=_ranks_apart(trainings))
    place = _place(recipe, gpu_gib)
    return Memory(
        device=at.device,
        place=place,
        roles=roles,
        generator=generator,
        driver=driver,
        records=records_of(batch),
        buckets=len(sent),
        largest_bucket=max(sent, default=0),
        items=tuple(items),
        stages=tuple(stages_in(place, items)),
    )


def training_of(recipe: Recipe, role: str, decoder: Decoder, at: Precision) -> Training:
    """What decides the bytes of a role: microbatches are full, and all prompts as short as can be."""
    table: TrainedTable = getattr(recipe, role)
    layout = layouts(recipe)[role]
    rows, longest = ceil(recipe.ppo.minibatch_seqs / layout.data), longest_sequence(recipe)
    if isinstance(table.batching, ByTokens):
        tokens = min(table.batching.max_tokens_per_microbatch, rows * longest)
        number = ceil(rows / (table.batching.max_tokens_per_microbatch // longest))
    else:
        tokens = min(table.batching.microbatch_seqs, rows) * longest
        number = ceil(rows / table.batching.microbatch_seqs)
    return Training(
        role=role,
        decoder=decoder,
        layout=layout,
        precision=at,
        microbatch=Microbatch(tokens, tokens, table.batching.logits_chunk_tokens),
        microbatches=number,
        has_reference=role == "actor" and not isinstance(recipe.ppo.kl, NoKl),
    )


def batch_of(recipe: Recipe, *, sequences: int | None = None) -> Batch:
    """The sequences of a step, or so many of them."""
    rollout, kl = recipe.rollout, recipe.ppo.kl
    return Batch(
        sequences=sequences or rollout.prompts_per_step * rollout.samples_per_prompt,
        prompt_tokens=rollout.max_prompt_tokens,
        response_tokens=rollout.max_new_tokens,
        has_reference=not isinstance(kl, NoKl),
        reference_in_loss=isinstance(kl, KlInLoss),
    )


def _role(training: Training, weight: int) -> RoleBytes:
    return RoleBytes(
        processes=training.layout.world_size,
        ranks=tuple(ranks_of(training)),
        state=state_bytes(training.decoder, training.role, training.layout, weight),
    )


def _place(recipe: Recipe, gpu_gib: float | None) -> Place:
    if gpu_gib is not None:
        return Place("a GPU with a rank of each role and the generator", int(gpu_gib * GIB))
    if recipe.cluster.ray_address is not None:
        return Place("all nodes of the Ray together", None)
    return Place("this machine with all processes", machine_bytes())


def _trainer_items(recipe: Recipe, trainings: Mapping[str, Training], *, all_ranks: bool) -> Iterator[Item]:
    """Of the largest rank of each role, or of all ranks of all roles."""
    for role, training in trainings.items():
        ranks = ranks_of(training)
        found = ranks if all_ranks else [max(ranks, key=lambda rank: rank.peak)]
        copies = training.layout.tensor * training.layout.data if all_ranks else 1

        def total(name: str, found: list[RankBytes] = found, copies: int = copies) -> int:
            return copies * sum(int(getattr(rank, name)) for rank in found)

        split = f"raise `{role}.parallel.tensor` or `.pipeline`"
        shared = f"raise `{role}.parallel.data` with `distributed_optimizer = true`"
        if all_ranks:  # more ranks share it, and are here too
            split = shared = f"lower `{role}.parallel.data`" if training.layout.data > 1 else _MORE_NODES
        yield Item(f"{role} weights", total("weights"), split)
        yield Item(f"{role} gradients", total("gradients"), split)
        yield Item(f"{role} optimizer", total("main_weights") + total("moments"), shared)
        if training.has_reference:
            yield Item("reference", total("reference"), split)
        key = (
            "max_tokens_per_microbatch" if isinstance(getattr(recipe, role).batching, ByTokens) else "microbatch_seqs"
        )
        reads = {"actor": ("rollout", "logprobs", "eval"), "critic": ("values",)}[role]
        works = dict.fromkeys(reads, total("forward")) | {f"{role}_update": total("update")}
        yield from at_work(f"{role} at work", f"lower `{role}.batching.{key}`", works)


def _generator_items(generator: GeneratorBytes, device: str) -> Iterator[Item]:
    key = "kv_cache_mib" if device == "cpu" else "gpu_memory_frac"
    yield Item("generator weights", generator.weights, "choose a smaller model")
    yield Item("KV cache", generator.kv_cache, f"lower `generator.{key}`")


def _driver_items(driver: DriverBytes, *, ranks: int) -> Iterator[Item]:
    lower = "lower `rollout.prompts_per_step` or `rollout.max_new_tokens`"
    rest = dict.fromkeys(STAGES[1:], driver.records)
    yield from at_work("samples and records", lower, {"rollout": driver.samples + driver.buckets, **rest})
    yield Item("libraries", DRIVER_BYTES + ranks * RANK_BYTES, "lower `actor.parallel` and `critic.parallel`")
    if ranks:
        yield Item("object store", OBJECT_STORE_BYTES, "leave out `actor.parallel` and `critic.parallel`")


def _ranks_apart(trainings: Mapping[str, Training]) -> int:
    """Processes beside the driver's, which has the roles of one process."""
    return sum(size for training in trainings.values() if (size := training.layout.world_size) > 1)


def with_totals(value: Any) -> Any:
    """JSON-able: records with their sums beside what is summed."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: with_totals(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: with_totals(each) for name, each in value.items()}
    return [with_totals(each) for each in value] if isinstance(value, list | tuple) else value
