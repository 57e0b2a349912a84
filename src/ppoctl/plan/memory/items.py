"""The items of the memory estimate.

Each item has a name, bytes, a place, a role, the key that makes the item smaller, the stages that need it, and its
state in the other stages. All other numbers of the estimate are sums of items.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ppoctl.algorithms.role_model import reward_models
from ppoctl.algorithms.roles import POLICY, head_of
from ppoctl.algorithms.sizes import environment_processes, longest_sequence, microbatch_limit
from ppoctl.core.key_path import dotted
from ppoctl.plan.memory.assumptions import (
    COMMUNICATOR_BYTES,
    COMMUNICATORS,
    CUDA_CONTEXT_BYTES,
    CUDA_GRAPHS_BYTES,
    ENVIRONMENT_BYTES,
    FRAGMENTS_FRAC,
    RANK_BYTES,
    STAGING_BYTES,
    VLLM_BYTES,
)
from ppoctl.plan.memory.driver import DriverBytes, StepBatch, object_store_bytes, update_input_bytes
from ppoctl.plan.memory.generator_memory import GeneratorBytes, TransferBytes
from ppoctl.plan.memory.residency import MemoryItem, MemoryPlace, ResidencySchedule
from ppoctl.plan.memory.scoring import ScoringBytes
from ppoctl.plan.memory.trainer_memory import RankBytes, RoleBytes
from ppoctl.recipe.parallel import is_one_process, layouts, processes
from ppoctl.recipe.schema import Recipe

_MORE_NODES = "use more nodes (`cluster.ray_address`) or a smaller model"
_APART = 'set `cluster.placement = "apart"`'
_NO_LESS = "nothing makes it smaller: every process needs it"
_NOT_GATHERED = 'set `checkpoint.reshardable = "dp"`'


@dataclass(frozen=True)
class Sizes:
    """Inputs from which the items of a run are computed."""

    device: str
    """Device of trainer and generator: `cpu` or `gpu`."""
    roles: Mapping[str, RoleBytes]
    generator: GeneratorBytes
    driver: DriverBytes
    sending: TransferBytes
    batch: StepBatch
    schedule: ResidencySchedule
    scoring: Mapping[str, ScoringBytes]
    """Key of the table -> reward model."""


def process_items(recipe: Recipe, sizes: Sizes, role: str, rank: int) -> Iterator[MemoryItem]:
    """Yield the items of one process of a role."""
    if role == "generator":
        yield from _engine_items(recipe, sizes)
    elif role in sizes.scoring:
        yield from _scoring_items(sizes, role, rank)
    elif role in sizes.roles:
        yield from _device_items_of_rank(recipe, sizes, role, rank)
        yield from _host_items_of_rank(recipe, sizes, role, rank)
    runs_vllm = role == "generator" or _is_scored_by_vllm(recipe, role)
    if is_one_process(recipe) and not runs_vllm:  # the role runs in the driver
        return
    yield MemoryItem("libraries", VLLM_BYTES if runs_vllm else RANK_BYTES, "host", role, _fewer_processes(recipe))
    if sizes.device == "gpu":
        advice = _NO_LESS if recipe.cluster.placement == "apart" else _APART
        yield MemoryItem("CUDA contexts", CUDA_CONTEXT_BYTES, "device", role, advice)
        group_size = recipe.generator.tensor if role == "generator" else processes(recipe)[role]
        if group_size > 1:
            yield MemoryItem("NCCL", COMMUNICATORS * COMMUNICATOR_BYTES, "device", role, advice)
        if recipe.cluster.weights == "broadcast" and role in (POLICY, "generator"):
            links = layouts(recipe)[POLICY].pipeline if role == "generator" else 1  # one communicator per sender
            stored = 'set `cluster.weights = "store"`'
            yield MemoryItem("NCCL for weights", links * COMMUNICATOR_BYTES, "device", role, stored)


def _fewer_processes(recipe: Recipe) -> str:
    """Return advice that lowers the number of processes."""
    return f"lower {', '.join(f'`{role}.parallel`' for role in recipe.trained)} and `generator.engines`"


def _is_scored_by_vllm(recipe: Recipe, role: str) -> bool:
    return any(dotted(key) == role and table.engine == "vllm" for key, table in reward_models(recipe).items())


def shared_items(recipe: Recipe, sizes: Sizes) -> Iterator[MemoryItem]:
    """Yield the items that exist once, for any number of processes: weights in transfer, items of driver and node."""
    of_driver = partial(MemoryItem, place="host", role="driver")
    first, *rest = sizes.schedule.stages
    less = "lower `rollout.prompts_per_step` or `rollout.max_new_tokens`"
    beside = sizes.schedule.of("beside generation")
    yield of_driver("samples and records", sizes.driver.samples, lower=less, stages=(first, *beside))
    yield of_driver("samples and records", sizes.driver.records, lower=less, stages=(*rest, *beside))
    sent, generation = sizes.sending, sizes.schedule.of("draws")
    smaller = "lower `cluster.weights_bucket_mib`"
    for role, copies in sent.copies.items():
        place: MemoryPlace = "host" if role == "node" else "device"
        yield MemoryItem("weights in transfer", copies * sent.largest, place, role, smaller, generation)
    yield of_driver("published weights", sent.published, lower='set `cluster.weights = "store"`')
    if answering := environment_processes(recipe):
        yield of_driver("environments", answering * ENVIRONMENT_BYTES, lower="lower `environment.workers`")
    alone = is_one_process(recipe)
    yield of_driver("libraries", RANK_BYTES, lower=_MORE_NODES if alone else _fewer_processes(recipe))
    if alone and sizes.device == "gpu":
        yield MemoryItem("CUDA contexts", CUDA_CONTEXT_BYTES, "device", POLICY, _MORE_NODES)
    if not alone and recipe.cluster.ray_address is None:  # the object store of a running Ray has a fixed size
        without = "use one process for all roles: without Ray there is no object store"
        yield MemoryItem("object store", object_store_bytes(recipe), "host", "node", without)


def _engine_items(recipe: Recipe, sizes: Sizes) -> Iterator[MemoryItem]:
    engine, stages = sizes.generator, sizes.schedule.of("generator")
    smaller, less = "raise `generator.tensor`", "lower `generator.gpu_memory_frac`"
    if sizes.device == "cpu":
        smaller = "lower `generator.engines`" if recipe.generator.engines > 1 else "choose a smaller model"
        less = "lower `generator.kv_cache_mib`"
    if recipe.generator.engines_per_gpu > 1:
        smaller = "lower `generator.engines_per_gpu`"
    # vLLM moves nothing to the host: the trainer sends the weights again after vLLM's sleep.
    yield MemoryItem("generator weights", engine.weights, "device", "generator", smaller, stages, "dropped")
    yield MemoryItem("KV cache", engine.kv_cache, "device", "generator", less, stages, "dropped")
    transfers = sizes.schedule.of("draws")
    yield MemoryItem("experts in transfer", sizes.sending.experts, "device", "generator", less, transfers)
    if sizes.device == "gpu" and recipe.generator.compile is not False:
        yield MemoryItem("CUDA graphs", CUDA_GRAPHS_BYTES, "device", "generator", "set `generator.compile = false`")


def _scoring_items(sizes: Sizes, role: str, rank: int) -> Iterator[MemoryItem]:
    scoring = sizes.scoring[role]
    rank_bytes, stages = scoring.ranks[rank // scoring.layout.stage_ranks], sizes.schedule.of("scoring")
    split = _MORE_NODES if sizes.device == "cpu" else f"raise `{role}.parallel.tensor` or `.pipeline`"
    less = f"lower `{role}.max_tokens`"
    on_device = partial(MemoryItem, place="device", role=role)
    yield on_device("reward model weights", rank_bytes.weights, lower=split, stages=stages, between="moved")
    yield on_device("reward model gather buffer", rank_bytes.gather_buffer, lower=less)
    yield on_device("reward model activations", rank_bytes.forward, lower=less, stages=stages)
    if sizes.device == "gpu":
        yield on_device("fragments", int(FRAGMENTS_FRAC * rank_bytes.forward), lower=less, stages=stages)


def _device_items_of_rank(recipe: Recipe, sizes: Sizes, role: str, rank: int) -> Iterator[MemoryItem]:
    rank_bytes, schedule = _rank(recipe, sizes, role, rank), sizes.schedule
    weights, training = (schedule.of(f"{role} {part}") for part in ("weights", "training"))
    split, shared = _advice(recipe, sizes, role)
    smaller_forward, smaller_update = (
        _smaller_microbatch(recipe, role, with_gradient=with_gradient) for with_gradient in (False, True)
    )
    on_device = partial(MemoryItem, place="device", role=role)
    yield on_device(f"{role} weights", rank_bytes.weights, lower=split, stages=weights, between="moved")
    yield on_device(f"{role} gradients", rank_bytes.gradients, lower=split, stages=training, between="dropped")
    kept = rank_bytes.device_optimizer
    yield on_device(f"{role} optimizer", kept, lower=shared, stages=training, between="moved")
    yield on_device("reference", rank_bytes.reference, lower=split, stages=schedule.of("reference"), between="moved")
    if role == POLICY:
        merges = schedule.of("draws")
        yield on_device("merged weight", rank_bytes.merged, lower=f"raise `{role}.parallel.tensor`", stages=merges)
    yield on_device(f"{role} gather buffer", rank_bytes.gather_buffer, lower=smaller_forward)
    yield on_device(
        f"{role} activations", rank_bytes.forward, lower=smaller_forward, stages=schedule.of(f"{role} scores")
    )
    yield on_device(
        f"{role} activations", rank_bytes.update, lower=smaller_update, stages=schedule.of(f"{role} updates")
    )
    if sizes.device == "gpu":
        in_passes, in_updates = (int(FRAGMENTS_FRAC * size) for size in (rank_bytes.forward, rank_bytes.update))
        yield on_device("fragments", in_passes, lower=smaller_forward, stages=schedule.of(f"{role} scores"))
        yield on_device("fragments", in_updates, lower=smaller_update, stages=schedule.of(f"{role} updates"))


def _host_items_of_rank(recipe: Recipe, sizes: Sizes, role: str, rank: int) -> Iterator[MemoryItem]:
    on_host = partial(MemoryItem, place="host", role=role)
    if not is_one_process(recipe):
        less = "lower `rollout.prompts_per_step` or `rollout.max_new_tokens`"
        yield on_host("rollouts in ranks", update_input_bytes(sizes.batch, head_of(role)), lower=less)
    rank_bytes, fewer = _rank(recipe, sizes, role, rank), _advice(recipe, sizes, role)[1]
    yield on_host(f"{role} optimizer", rank_bytes.host_optimizer, lower=fewer)
    yield on_host("staging of optimizers", rank_bytes.host_staging, lower=f'set `{role}.optimizer.on = "device"`')
    schedule, layout = sizes.schedule, layouts(recipe)[role]
    saves, loads = schedule.of(f"{role} saves"), schedule.of(f"{role} loads")
    gathers = layout.distributed_optimizer and recipe.checkpoint.reshardable == "full"
    # The first data rank of each model shard writes the state. If the state is gathered, it writes the gathered copy.
    is_first = rank % layout.stage_ranks < layout.tensor
    gathered = 3 * 4 * rank_bytes.trained_parameters
    if recipe.checkpoint.asynchronous:
        state = sizes.roles[role].state
        written = state // layout.model_ranks * is_first
        if layout.distributed_optimizer and not gathers:
            written = state // layout.world_size
        background = schedule.without(*(f"{name} loads" for name in sizes.roles))
        yield on_host(
            "states being written", written, lower="set `checkpoint.asynchronous = false`", stages=background
        )
        if sizes.device == "gpu":
            yield on_host("staging", STAGING_BYTES, lower="set `checkpoint.asynchronous = false`", stages=saves)
    elif gathers:
        yield on_host("states being written", gathered * is_first, lower=_NOT_GATHERED, stages=saves)
    if gathers:
        # Each rank has its shard. The first rank also has the received shards, the joined state and the previous
        # tensor.
        held = gathered // (layout.data * layout.context) + gathered * is_first
        yield on_host("gathered for a save", held, lower=_NOT_GATHERED, stages=saves)
        # In Megatron-Core, each rank reads the complete state of the model shard and then selects its own shard.
        yield on_host("read by a load", gathered, lower=_NOT_GATHERED, stages=loads)


def _rank(recipe: Recipe, sizes: Sizes, role: str, rank: int) -> RankBytes:
    """Return the bytes of a rank. Megatron-Core numbers the ranks with the pipeline rank as the slowest index."""
    return sizes.roles[role].ranks[rank // layouts(recipe)[role].stage_ranks]


def _advice(recipe: Recipe, sizes: Sizes, role: str) -> tuple[str, str]:
    """Return advice that makes the model and the optimizer of a role smaller. On one machine, more ranks do not."""
    copies = layouts(recipe)[role].data
    if sizes.device == "cpu":
        fewer = f"lower `{role}.parallel.data`" if copies > 1 else _MORE_NODES
        return fewer, fewer
    split = f"raise `{role}.parallel.tensor` or `.pipeline`" + (", and lower `.data`" if copies > 1 else "")
    return split, f"raise `{role}.parallel.data` with `distributed_optimizer = true`"


def _smaller_microbatch(recipe: Recipe, role: str, *, with_gradient: bool) -> str:
    table = recipe.trained[role]
    key, most = microbatch_limit(table.batching, with_gradient=with_gradient)
    advice = f"lower `{role}.batching.{key}`"
    if "tokens" in key and most <= longest_sequence(recipe) + 1:
        # A sequence must fit in a microbatch. Context ranks split the microbatch.
        advice = f"raise `{role}.parallel.context`"
    return advice + (f", or set `{role}.recompute`" if with_gradient and table.recompute != "full" else "")
