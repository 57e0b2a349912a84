"""The memory estimate of a recipe: ranks of roles, generator (vLLM), driver, and the memory of a GPU by stage."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from math import ceil, isqrt
from typing import Any, NamedTuple

from ppoctl.algorithms.choose import StepFunctionAt, step_function_at, trace_at
from ppoctl.algorithms.kl_use import kl_use
from ppoctl.algorithms.role_model import model_in, model_of, reward_model_of, reward_models
from ppoctl.algorithms.roles import POLICY, head_of
from ppoctl.algorithms.sizes import generator_window, longest_sequence, minibatch_seqs, sequences_per_round
from ppoctl.core.errors import OutOfMemoryError
from ppoctl.core.key_path import dotted
from ppoctl.core.machine import memory as machine_memory
from ppoctl.models.model import Model
from ppoctl.models.shape import ModelShape
from ppoctl.plan.memory.assumptions import GIB
from ppoctl.plan.memory.attention_memory import pair_bytes
from ppoctl.plan.memory.driver import batch_of, driver_bytes, records_of
from ppoctl.plan.memory.generator_memory import (
    TransferBytes,
    bucket_bytes,
    copies_of,
    expert_transfer_bytes,
    generator_bytes,
)
from ppoctl.plan.memory.items import Sizes
from ppoctl.plan.memory.pipeline import stages_of
from ppoctl.plan.memory.pools import Pool, StageBytes, fullest_node, gpu_pools, machine_pool
from ppoctl.plan.memory.residency import schedule_of
from ppoctl.plan.memory.scoring import ScoringBytes, scoring_bytes
from ppoctl.plan.memory.shard import MicrobatchShape, ModelShard, Precision
from ppoctl.plan.memory.trainer_memory import Training, role_bytes
from ppoctl.plan.shared_sizes import microbatches, most_tokens, shapes_of
from ppoctl.recipe.parallel import GPUS_PER_NODE, devices, is_one_process, layouts, leaving, processes
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class Memory(Sizes):
    """Estimated bytes of a whole run. The modules of this package describe the inherited fields."""

    records: Mapping[str, int]
    """Stage -> bytes of its record on disk."""
    places: tuple[Pool, ...]
    """Pools of memory with their items."""
    node: Pool | None
    """Host memory of the fullest node. None: the run is on CPUs, so all memory is one pool."""
    taking_turns: StageBytes | None
    """The fullest stage if all roles on shared GPUs were offloaded in turn. None: they are, no GPU is shared, or none
    can be, because generation is ahead of training."""
    assumptions: tuple[str, ...]
    """Sentences about the assumptions that the estimate makes about this model and a GPU."""
    warnings: tuple[str, ...]
    """Sentences about sequence lengths that do not fit."""


class _Computed(NamedTuple):
    """The model of a role, and the precision in which the role computes."""

    shape: ModelShape
    at: Precision


def estimate_here(
    recipe: Recipe,
    gpu_gib: float | None = None,
    ray_bytes: int | None = None,
    choose: StepFunctionAt = step_function_at,
) -> Memory | None:
    """Return the result of `estimate` for a recipe; None: a model is not on this machine."""
    if any(reward_model_of(recipe, key).shape is None for key in reward_models(recipe)):
        return None
    shapes = shapes_of(recipe)
    return None if shapes is None else estimate(recipe, shapes, gpu_gib, ray_bytes, choose)


def estimate(
    recipe: Recipe,
    shapes: Mapping[str, ModelShape],
    gpu_gib: float | None = None,
    ray_bytes: int | None = None,
    choose: StepFunctionAt = step_function_at,
) -> Memory:
    """Return the memory of a recipe on GPUs of `gpu_gib` GiB or, if None, on CPUs.

    `shapes` has the architecture of the model of each trained role. On CPUs, the limit is the memory of this machine
    or, if it is given, `ray_bytes`: the memory of all nodes of a running Ray. Reward models that are not on this
    machine are not counted. The step is the last one, in which all roles train.
    """
    device = "cpu" if gpu_gib is None else "gpu"
    models = {
        role: _Computed(shape, Precision(model_of(recipe, role).weight_bytes, device))
        for role, shape in shapes.items()
    }
    policy, at = models[POLICY]
    batch, room = batch_of(recipe), None if gpu_gib is None else int(gpu_gib * GIB)
    traced, window = trace_at(recipe, recipe.steps, choose), generator_window(recipe)
    records = records_of(traced, recipe, batch)
    sizes = Sizes(
        device=device,
        roles={role: role_bytes(training_of(recipe, role, *model)) for role, model in models.items()},
        generator=generator_bytes(policy, at.weight, recipe.generator, window, room),
        driver=driver_bytes(batch_of(recipe, sequences=sequences_per_round(recipe)), records),
        sending=_sending(recipe, policy, at),
        batch=batch,
        schedule=schedule_of(traced, recipe),
        scoring=dict(_scoring(recipe, device)),
    )
    if room is None:
        host = machine_memory.machine_bytes() if recipe.cluster.ray_address is None else ray_bytes
        places, least = [machine_pool(recipe, sizes, host)], None
    else:
        places = gpu_pools(recipe, sizes, room, leaving(recipe))
        least = _taking_turns(recipe, sizes, room)
    return Memory(
        **vars(sizes),
        records=records,
        places=tuple(places),
        node=None if room is None else fullest_node(recipe, sizes),
        taking_turns=least,
        assumptions=tuple(
            dict.fromkeys(text for model in models.values() for text in _assumptions(model.shape, room))
        ),
        warnings=tuple(_warnings(recipe, models, room)),
    )


def misfit(memory: Memory, plan_command: str = "ppoctl plan RECIPE") -> OutOfMemoryError | None:
    """Return the error if the fullest stage does not fit, or if an engine will not start; None: the run fits.

    The hint is the command that searches for settings that fit (`plan_command` with `--fit`) or, without GPUs, advice
    about the largest item.
    """
    fullest = max(memory.places, key=lambda pool: pool.fullest.bytes)
    stage, room = fullest.fullest, fullest.room
    if room is not None and stage.bytes > room:
        largest = fullest.largest(stage.stage)[0]
        return OutOfMemoryError(
            f"stage `{stage.stage}` needs {stage.bytes / GIB:,.3g} GiB on {fullest.name}, which has "
            f"{room / GIB:,.3g}; most of it is {largest.name}, {largest.bytes / GIB:,.3g} GiB",
            hint=largest.lower if memory.device == "cpu" else f"{plan_command} --fit {room / GIB:g}",
        )
    return too_small_a_cache(memory)


def too_small_a_cache(memory: Memory) -> OutOfMemoryError | None:
    """Return the error of an engine whose KV cache is too small for one sequence; None: the engine starts."""
    engine = memory.generator
    if engine.full_sequences > 0:
        return None
    needed = engine.sequence_bytes / 2**20
    keys = {
        "cpu": "`generator.kv_cache_mib`",
        "gpu": "`generator.gpu_memory_frac` or `generator.tensor`",
    }
    return OutOfMemoryError(
        f"vLLM will not start: a sequence of full length needs {needed:,.3g} MiB, more than its KV cache has",
        hint=f"raise {keys[memory.device]}",
    )


def _scoring(recipe: Recipe, device: str) -> Iterator[tuple[str, ScoringBytes]]:
    for key in reward_models(recipe):
        if (shape := reward_model_of(recipe, key).shape) is not None:
            yield dotted(key), scoring_bytes(recipe, key, shape, device)


def _sending(recipe: Recipe, shape: ModelShape, at: Precision) -> TransferBytes:
    cluster, has_ray = recipe.cluster, not is_one_process(recipe)
    nodes = ceil(devices(recipe) / GPUS_PER_NODE) if at.device == "gpu" else 1
    # Colocated engines use the devices in order, beginning with the first device.
    shares_first = (
        cluster.placement == "colocated" and recipe.generator.engines * recipe.generator.tensor <= GPUS_PER_NODE
    )
    one_node = nodes == 1 or shares_first
    buckets = bucket_bytes(shape, layouts(recipe)[POLICY], at.weight, cluster.weights_bucket_mib * 2**20)
    in_memory = one_node and not (has_ray and cluster.weights == "store")
    copies = copies_of(cluster, one_node=one_node, has_ray=has_ray)
    experts = expert_transfer_bytes(shape, at.weight, at.device)
    return TransferBytes(buckets, copies, sum(buckets) if in_memory else 0, experts)


def _assumptions(shape: ModelShape, room: int | None) -> Iterator[str]:
    if shape.experts is not None:
        yield (
            "all experts receive equally many tokens: the real memory of a rank's experts grows with the tokens "
            "that are routed to it"
        )
    if shape.keeps_scores:
        yield (
            "attention keeps its scores, so activations grow with the square of the sequence length: all sequences "
            "have full length"
        )
    if any(shape.windows):
        yield "the KV cache holds full contexts also in layers with a sliding window"
    if room is not None:
        yield (
            "GPU memory of CUDA contexts, NCCL, fragmentation and CUDA graphs is taken from reports; docs/gpu.md "
            "lists "
            "the numbers, which ppoctl has not measured"
        )


def _warnings(recipe: Recipe, models: Mapping[str, "_Computed"], room: int | None) -> Iterator[str]:
    """Yield a warning for each role whose attention keeps scores, if sequences of full length do not fit on a GPU."""
    longest = longest_sequence(recipe)
    for role, layout in layouts(recipe).items():
        (shape, at), recompute = models[role], recipe.trained[role].recompute
        stages = stages_of(shape, layout)
        keeps = max(len(stage.layers) for stage in stages) if shape.keeps_scores else 0
        if room is None or not keeps:
            continue
        pair = pair_bytes(ModelShard(Model(shape, head_of(role)), layout, stages[0], at, recompute))
        layers = 1 if recompute == "full" else keeps
        most = isqrt(room * layout.context // (pair * layers))
        if longest <= most:
            continue
        advice = (
            "" if recompute == "full" else f'; `{role}.recompute = "full"` keeps the scores of one layer at a time'
        )
        yield (
            f"attention of the {role} has no flash kernel and keeps {pair * longest**2 // layout.context / GIB:,.3g} "
            f"GiB of scores for a sequence of {longest:,} tokens in each of {keeps} layers of a rank; a GPU has "
            f"memory for {most:,} tokens{advice}"
        )


def _taking_turns(recipe: Recipe, sizes: Sizes, room: int) -> StageBytes | None:
    everyone = set(processes(recipe))
    if recipe.cluster.placement == "apart" or set(leaving(recipe)) == everyone or recipe.rollout.ahead > 0:
        return None
    [pool] = gpu_pools(recipe, sizes, room, everyone)
    return pool.fullest


def training_of(recipe: Recipe, role: str, shape: ModelShape, at: Precision) -> Training:
    """Return the inputs of the estimate of a role. Microbatches are assumed to be full, with the shortest prompts."""
    table, layout, longest = recipe.trained[role], layouts(recipe)[role], longest_sequence(recipe)

    def microbatch(rows: int, *, with_gradient: bool) -> MicrobatchShape:
        rank_rows = ceil(rows / layout.data)
        most = most_tokens(table.batching, rank_rows, longest, with_gradient=with_gradient)
        tokens = ceil(most / layout.context)
        return MicrobatchShape(tokens, tokens, table.batching.logits_chunk_tokens, min(longest, most))

    use, model = kl_use(recipe), model_in(recipe, role, shape)
    full_kl_in = {"forward": use.is_full_before, "update": use.is_full_in_update} if role == POLICY else {}
    return Training(
        model=model if use.is_on else replace(model, reference=None),
        layout=layout,
        precision=at,
        microbatch=microbatch(minibatch_seqs(recipe, role), with_gradient=True),
        forward=microbatch(batch_of(recipe).sequences, with_gradient=False),
        microbatches=microbatches(recipe, role, longest)[1],
        recompute=table.recompute,
        full_kl_in=frozenset(name for name, is_full in full_kl_in.items() if is_full),
        filtered=role == POLICY and recipe.rollout.top_p < 1,
        optimizer_on=table.optimizer.on,
        kernels=table.kernels,
    )


def with_totals(value: Any) -> Any:
    """Return the value as JSON types. Dataclasses become objects that include their properties, such as sums."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: with_totals(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {name: with_totals(item) for name, item in value.items()}
    return [with_totals(item) for item in value] if isinstance(value, list | tuple) else value
