"""Items that take memory of a GPU or a machine, role by role, and the key that makes each smaller."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ppoctl.plan.memory.driver import Batch, DriverBytes
from ppoctl.plan.memory.generator import GeneratorBytes, TransferBytes
from ppoctl.plan.memory.residency import DeviceSchedule, Item, MemoryPool, Residency, at_work, residency
from ppoctl.plan.memory.trainer import RankBytes, Training
from ppoctl.recipe.parallel import OBJECT_STORE_BYTES, devices, is_one_process, processes
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.sizes import longest_sequence, microbatch_limit

MIB = 2**20
RANK_BYTES, VLLM_BYTES = 400 * MIB, 550 * MIB
"""Bytes of Python and libraries in a process before any model, and in one with vLLM (an engine's; the driver of a run
in one process), as seen with torch 2.13 and vLLM 0.32 for CPUs."""
_SMALLER_BUCKETS = "lower `cluster.weights_bucket_mib`"
_MORE_NODES = "take more nodes (`cluster.ray_address`) or a smaller model"


@dataclass(frozen=True)
class PlanInputs:
    """Inputs from which the items of a GPU, a machine or a node are counted."""

    recipe: Recipe
    trainings: Mapping[str, Training]
    ranks: Mapping[str, Sequence[RankBytes]]
    """Bytes of one rank of each pipeline stage, by role."""
    generator: GeneratorBytes
    driver: DriverBytes
    sending: TransferBytes
    batch: Batch
    states: Mapping[str, int]
    """Bytes of a saved state, by role."""
    turns: DeviceSchedule
    """Stages in which each role is at work."""

    def stage(self, role: str, rank: int) -> int:
        """The pipeline stage of a rank; Megatron-Core counts over pipeline ranks last."""
        return 0 if role == "generator" else rank // self.trainings[role].layout.stage_ranks


def on_gpus(inputs: PlanInputs, gpu_bytes: int) -> list[Residency]:
    """Memory on the fullest GPU where roles are colocated; where they are apart, on the GPU of each role's fullest
    rank."""
    count = devices(inputs.recipe)
    if inputs.recipe.cluster.placement == "apart":
        fullest = {role: _fullest(inputs, role) for role in inputs.ranks} | {"generator": 0}
        return [_residency(inputs, f"the {role}'s GPU", gpu_bytes, {role: rank}) for role, rank in fullest.items()]
    shared: dict[tuple[tuple[str, int], ...], Residency] = {}
    for number in range(count):
        tenants = {role: number for role, size in processes(inputs.recipe).items() if number < size}
        alike = tuple((role, inputs.stage(role, rank)) for role, rank in tenants.items())
        if alike not in shared:
            name = f"the fullest of {count} GPUs" if count > 1 else "the GPU"
            shared[alike] = _residency(inputs, f"{name} ({', '.join(tenants)})", gpu_bytes, tenants)
    return [max(shared.values(), key=lambda found: found.fullest.bytes)]


def on_machines(inputs: PlanInputs, host_bytes: int | None) -> list[Residency]:
    """Memory of all processes together, on this machine or on the nodes of a Ray; `host_bytes`: what there is, None
    where that is not known."""
    joins = inputs.recipe.cluster.ray_address is not None
    place = MemoryPool("all nodes of the Ray together" if joins else "this machine with all processes", host_bytes)
    items: list[Item] = []
    for role, training in inputs.trainings.items():
        layout = training.layout
        copies = layout.stage_ranks
        advice = f"lower `{role}.parallel.data`" if layout.data > 1 else _MORE_NODES
        items += _trainer_items(inputs, role, [*inputs.ranks[role]] * copies, _Advice(advice, advice))
    count, generator = inputs.generator.processes, inputs.generator
    fewer = "lower `generator.engines`" if generator.engines > 1 else None
    items.append(Item("generator weights", count * generator.weights, fewer or "choose a smaller model"))
    items.append(Item("KV cache", count * generator.kv_cache, "lower `generator.kv_cache_mib`"))
    items += at_work(
        "weights on their way", _SMALLER_BUCKETS, dict.fromkeys(inputs.turns.draws[:1], inputs.sending.on_the_way)
    )
    if inputs.sending.published:
        items.append(Item("published weights", inputs.sending.published, 'set `cluster.weights = "store"`'))
    return [residency(place, [*items, *_driver_items(inputs)], inputs.turns, draws=_draws(inputs))]


@dataclass(frozen=True)
class _Advice:
    model: str
    """Change of the recipe that makes weights and gradients smaller."""
    optimizer: str


def _residency(inputs: PlanInputs, name: str, gpu_bytes: int, tenants: Mapping[str, int]) -> Residency:
    """Memory of one GPU, given the rank of each role on it."""
    items: list[Item] = []
    for role, rank in tenants.items():
        if role == "generator":
            turn = _turn(inputs, role)
            items.append(Item("generator weights", inputs.generator.weights, "raise `generator.tensor`", turn))
            items.append(Item("KV cache", inputs.generator.kv_cache, "lower `generator.gpu_memory_frac`", turn))
            continue
        layout = inputs.trainings[role].layout
        split = f"raise `{role}.parallel.tensor` or `.pipeline`" + (", and lower `.data`" if layout.data > 1 else "")
        shared = f"raise `{role}.parallel.data` with `distributed_optimizer = true`"
        turns = {part: _turn(inputs, f"{role} {part}") for part in ("weights", "training")}
        turns["reference"] = _turn(inputs, "reference")
        ranks = [inputs.ranks[role][inputs.stage(role, rank)]]
        items += _trainer_items(inputs, role, ranks, _Advice(split, shared), turns)
    parts = {"actor": inputs.sending.on_sender, "generator": inputs.sending.on_engine}
    on_the_way = sum(size for role, size in parts.items() if role in tenants)
    items += at_work("weights on their way", _SMALLER_BUCKETS, dict.fromkeys(inputs.turns.draws[:1], on_the_way))
    return residency(
        MemoryPool(name, gpu_bytes), items, inputs.turns, draws="generator" not in tenants or _draws(inputs)
    )


def _draws(inputs: PlanInputs) -> bool:
    """Whether vLLM starts: its cache must hold one sequence of full length."""
    return inputs.generator.full_sequences > 0


def _turn(inputs: PlanInputs, part: str) -> tuple[str, ...] | None:
    """Stages in which this part of a role is on the device; None: all."""
    return inputs.turns.on_device.get(part, ()) if inputs.recipe.cluster.offload else None


def moved_out(inputs: PlanInputs) -> int:
    """Largest number of host bytes that the roles of one GPU take while they are not at work."""
    if not inputs.recipe.cluster.offload:
        return 0
    trainers = 0
    for role in inputs.ranks:
        rank = inputs.ranks[role][inputs.stage(role, _fullest(inputs, role))]
        trainers += rank.weights + rank.main_weights + rank.moments + rank.reference
    return trainers + inputs.generator.weights


def _fullest(inputs: PlanInputs, role: str) -> int:
    """Number of a rank in the pipeline stage of the role that needs most."""
    layout, ranks = inputs.trainings[role].layout, inputs.ranks[role]
    return max(ranks, key=lambda rank: rank.peak).stage * layout.stage_ranks


def _trainer_items(
    inputs: PlanInputs,
    role: str,
    ranks: Sequence[RankBytes],
    advice: _Advice,
    turns: Mapping[str, tuple[str, ...] | None] = dict.fromkeys(("weights", "training", "reference")),
) -> Iterator[Item]:
    def total(name: str) -> int:
        return sum(int(getattr(rank, name)) for rank in ranks)

    training = inputs.trainings[role]
    yield Item(f"{role} weights", total("weights"), advice.model, turns["weights"])
    yield Item(f"{role} gradients", total("gradients"), advice.model, turns["training"])
    kept = total("main_weights") + total("moments")
    yield Item(f"{role} optimizer", kept, advice.optimizer, turns["training"])
    if training.has_reference:
        yield Item("reference", total("reference"), advice.model, turns["reference"])
    if total("gather_buffer"):
        yield Item(f"{role} gather buffer", total("gather_buffer"), _lower(inputs, role, with_gradient=False))
    reads = _lower(inputs, role, with_gradient=False)
    yield from at_work(f"{role} at work", reads, dict.fromkeys(inputs.turns.scores[role], total("forward")))
    trains = _lower(inputs, role, with_gradient=True)
    if training.recompute != "full":
        trains += f", or set `{role}.recompute`"
    yield from at_work(
        f"{role} at work", trains, dict.fromkeys(inputs.turns.on_device.get(f"{role} training", ()), total("update"))
    )


def _lower(inputs: PlanInputs, role: str, *, with_gradient: bool) -> str:
    key, most = microbatch_limit(getattr(inputs.recipe, role).batching, with_gradient=with_gradient)
    if "tokens" in key and most <= longest_sequence(inputs.recipe) + 1:
        # A sequence must fit; context ranks have a part of it each.
        return f"raise `{role}.parallel.context`"
    return f"lower `{role}.batching.{key}`"


def _driver_items(inputs: PlanInputs) -> Iterator[Item]:
    driver, recipe = inputs.driver, inputs.recipe
    lower = "lower `rollout.prompts_per_step` or `rollout.max_new_tokens`"
    first, *rest = inputs.turns.stages
    yield from at_work("samples and records", lower, {first: driver.samples, **dict.fromkeys(rest, driver.records)})
    if recipe.checkpoint.asynchronous:
        yield Item("states being written", sum(inputs.states.values()), "set `checkpoint.asynchronous = false`")
    if is_one_process(recipe):
        yield Item("libraries", VLLM_BYTES, _MORE_NODES)
        return
    sizes = processes(recipe)
    ranks, engines = sizes["actor"] + sizes["critic"], sizes["generator"]
    libraries = (1 + ranks) * RANK_BYTES + engines * VLLM_BYTES
    yield Item("libraries", libraries, "lower `actor.parallel`, `critic.parallel` and `generator.engines`")
    yield Item("object store", OBJECT_STORE_BYTES, "leave them out: in one process there is none")
