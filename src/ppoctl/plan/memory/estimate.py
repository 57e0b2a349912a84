"""The memory estimate of a recipe: roles rank by rank, generator, driver, and what each stage needs of a GPU or
machine."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from ppoctl.errors import OutOfMemoryError
from ppoctl.loop.stories import PPO, outline
from ppoctl.model.shape import ModelShape
from ppoctl.plan.memory.driver import Batch, DriverBytes, Records, driver_bytes, records_of
from ppoctl.plan.memory.generator import GeneratorBytes, TransferBytes, copies_of, on_cpu, on_gpu, transfer_bytes
from ppoctl.plan.memory.items import PlanInputs, moved_out, on_gpus, on_machines
from ppoctl.plan.memory.node import NodeBytes, fullest_node
from ppoctl.plan.memory.part import Microbatch, Precision
from ppoctl.plan.memory.residency import Residency, StageBytes, device_schedule
from ppoctl.plan.memory.trainer import RankBytes, Training, ranks_of, state_bytes
from ppoctl.plan.microbatches import microbatches, most_tokens
from ppoctl.recipe.parallel import GPUS_PER_NODE, devices, is_one_process, layouts, processes
from ppoctl.recipe.schema import KlInLoss, NoKl, Recipe, TrainedTable
from ppoctl.recipe.sizes import longest_sequence, sequences_per_step

GIB = 2**30


@dataclass(frozen=True)
class RoleBytes:
    """Bytes of actor or critic."""

    processes: int
    ranks: tuple[RankBytes, ...]
    """Bytes of one rank of each pipeline stage."""
    state: int
    """Bytes of a saved state."""

    @property
    def largest(self) -> RankBytes:
        """The rank of the role that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def resident(self) -> int:
        """Bytes of all processes of the role together, between calls."""
        return sum(rank.resident for rank in self.ranks) * self.processes // len(self.ranks)


@dataclass(frozen=True)
class Memory:
    """Estimated bytes of a whole run; see the modules they come from."""

    device: str
    """Device of trainer and generator, cpu or gpu."""
    roles: Mapping[str, RoleBytes]
    generator: GeneratorBytes
    driver: DriverBytes
    records: Records
    """Bytes of the records of a step, on disk."""
    sending: TransferBytes
    places: tuple[Residency, ...]
    """Pools of memory, and what takes the memory of each."""
    moved_out: int
    """Largest number of bytes that `cluster.offload` moves from one GPU to the host; 0: none."""
    node: NodeBytes | None
    """Host bytes of the fullest node; None on a CPU, where memory is all one."""
    taking_turns: StageBytes | None
    """The fullest stage if roles on shared GPUs took turns; None: they do already, or share none."""
    assumptions: tuple[str, ...]
    """Assumptions that the estimate makes about this model, in words."""

    @property
    def pair(self) -> int:
        """Bytes of the saved states of both roles."""
        return sum(role.state for role in self.roles.values())


def machine_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Bytes of this machine's physical memory, or of the part that its container may have (the file `limit` says
    so)."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(limit.read_text("ascii")))
    except (OSError, ValueError):  # `max`: all of it
        return physical


def estimate(recipe: Recipe, shape: ModelShape, gpu_gib: float | None = None, ray_bytes: int | None = None) -> Memory:
    """The memory of a recipe on GPUs of `gpu_gib` GiB; None: on CPUs. There the limit is this machine's memory, or
    `ray_bytes`, that of all nodes of a running Ray, where it is known."""
    weight = 4 if recipe.model.dtype == "float32" else 2
    at = Precision(weight, "cpu" if gpu_gib is None else "gpu")
    told = outline(PPO)
    trainings = {role: training_of(recipe, role, shape, at) for role in told.roles}
    roles = {role: _role(training, weight) for role, training in trainings.items()}
    new_tokens = max(recipe.rollout.max_new_tokens, recipe.eval.max_new_tokens or 0)
    window = recipe.rollout.max_prompt_tokens + new_tokens
    if gpu_gib is None:
        generator = on_cpu(shape, weight, recipe.generator, window)
    else:
        generator = on_gpu(shape, weight, recipe.generator, gpu_gib * GIB, window)
    # In one process they are handed over as they are.
    sent = TransferBytes() if is_one_process(recipe) else _sending(recipe, shape, trainings["actor"], at)
    batch = batch_of(recipe)
    inputs = PlanInputs(
        recipe=recipe,
        trainings=trainings,
        ranks={role: found.ranks for role, found in roles.items()},
        generator=generator,
        driver=driver_bytes(batch),
        sending=sent,
        batch=batch,
        states={role: found.state for role, found in roles.items()},
        turns=device_schedule(told),
    )
    joins = recipe.cluster.ray_address is not None
    host = ray_bytes if joins else machine_bytes()
    places = on_machines(inputs, host) if gpu_gib is None else on_gpus(inputs, int(gpu_gib * GIB))
    turns = None if gpu_gib is None else _taking_turns(inputs, int(gpu_gib * GIB))
    return Memory(
        device=at.device,
        roles=roles,
        generator=generator,
        driver=inputs.driver,
        records=records_of(batch),
        sending=sent,
        places=tuple(places),
        moved_out=moved_out(inputs),
        node=None if gpu_gib is None else fullest_node(inputs),
        taking_turns=turns,
        assumptions=tuple(_assumptions(shape)),
    )


def misfit(memory: Memory) -> OutOfMemoryError | None:
    """The error of the fullest stage where it does not fit, or of an engine that will not start; None: all fits."""
    fullest = max(memory.places, key=lambda found: found.fullest.bytes)
    stage, room = fullest.fullest, fullest.place.bytes
    if room is not None and stage.bytes > room:
        largest = stage.largest[0]
        return OutOfMemoryError(
            f"stage `{stage.stage}` needs {stage.bytes / GIB:,.3g} GiB on {fullest.place.name}, which has "
            f"{room / GIB:,.3g}; most of it is {largest.name}, {largest.bytes / GIB:,.3g} GiB",
            hint=largest.lower,
        )
    if memory.generator.full_sequences == 0:
        needed = memory.generator.sequence_bytes / 2**20
        key = "generator.kv_cache_mib" if memory.device == "cpu" else "generator.gpu_memory_frac"
        return OutOfMemoryError(
            f"vLLM will not start: a sequence of full length takes {needed:,.3g} MiB, more than its cache has",
            hint=f"raise `{key}`",
        )
    return None


def _sending(recipe: Recipe, shape: ModelShape, actor: Training, at: Precision) -> TransferBytes:
    nodes = ceil(devices(recipe) / GPUS_PER_NODE) if at.device == "gpu" else 1
    # Devices of colocated engines begin with the first.
    one_node = nodes == 1 or (
        recipe.cluster.placement == "colocated" and processes(recipe)["generator"] <= GPUS_PER_NODE
    )
    copies = copies_of(recipe.cluster, one_node=one_node)
    sent = transfer_bytes(shape, actor.layout, at.weight, recipe.cluster.weights_bucket_mib * 2**20, copies)
    # Mixtures of experts leave a folder (`weights.sync`).
    in_memory = one_node and recipe.cluster.weights != "store" and shape.experts is None
    return replace(sent, published=sum(sent.buckets)) if in_memory else sent


def _assumptions(shape: ModelShape) -> Iterator[str]:
    if shape.experts is not None:
        yield (
            "every expert is chosen as often as any other: what experts keep of a microbatch, and need at work, "
            "grows with the tokens that really come to a rank"
        )
    if any(shape.keeps_scores(layer) for layer in range(shape.num_layers)):
        yield (
            "attention keeps its scores, so activations grow with the square of a sequence's length: all are taken "
            "to be of full length"
        )
        yield "the generator's cache has whole contexts in layers with a window too"


def _taking_turns(inputs: PlanInputs, gpu_bytes: int) -> StageBytes | None:
    cluster = inputs.recipe.cluster
    if cluster.offload or cluster.placement == "apart":
        return None
    recipe = inputs.recipe.model_copy(update={"cluster": cluster.model_copy(update={"offload": True})})
    (found,) = on_gpus(replace(inputs, recipe=recipe), gpu_bytes)
    return found.fullest


def training_of(recipe: Recipe, role: str, shape: ModelShape, at: Precision) -> Training:
    """The inputs that decide the bytes of a role: microbatches are full, and all prompts as short as can be."""
    table: TrainedTable = getattr(recipe, role)
    layout, longest = layouts(recipe)[role], longest_sequence(recipe)

    def microbatch(rows: int, *, with_gradient: bool) -> Microbatch:
        of_a_rank = ceil(rows / layout.data)
        most = most_tokens(table.batching, of_a_rank, longest, with_gradient=with_gradient)
        tokens = ceil(most / layout.context)
        return Microbatch(tokens, tokens, table.batching.logits_chunk_tokens, min(longest, most))

    return Training(
        role=role,
        shape=shape,
        layout=layout,
        precision=at,
        microbatch=microbatch(recipe.ppo.minibatch_seqs, with_gradient=True),
        forward=microbatch(batch_of(recipe).sequences, with_gradient=False),
        microbatches=microbatches(recipe, role, longest)[1],
        recompute=table.recompute,
        has_reference=role == "actor" and not isinstance(recipe.ppo.kl, NoKl),
    )


def batch_of(recipe: Recipe, *, sequences: int | None = None) -> Batch:
    """The sequences of a step; `sequences` replaces their number."""
    rollout, kl = recipe.rollout, recipe.ppo.kl
    return Batch(
        sequences=sequences or sequences_per_step(recipe),
        prompt_tokens=rollout.max_prompt_tokens,
        response_tokens=rollout.max_new_tokens,
        has_reference=not isinstance(kl, NoKl),
        reference_in_loss=isinstance(kl, KlInLoss),
    )


def _role(training: Training, weight: int) -> RoleBytes:
    return RoleBytes(
        processes=training.layout.world_size,
        ranks=tuple(ranks_of(training)),
        state=state_bytes(training.shape, training.role, training.layout, weight),
    )


def with_totals(value: Any) -> Any:
    """The value in JSON's types: records with their sums beside what is summed."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: with_totals(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: with_totals(each) for name, each in value.items()}
    return [with_totals(each) for each in value] if isinstance(value, list | tuple) else value
