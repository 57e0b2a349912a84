"""What takes memory of a GPU or of a machine, role by role, and which key makes it smaller."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ppoctl.recipe.batching import limit
from ppoctl.recipe.memory.driver import Batch, DriverBytes
from ppoctl.recipe.memory.generator import GeneratorBytes, Sending
from ppoctl.recipe.memory.residency import STAGES, TURNS, Item, Place, Residency, at_work, residency
from ppoctl.recipe.memory.trainer import RankBytes, Training
from ppoctl.recipe.parallel import devices, is_one_process, processes
from ppoctl.recipe.rules import longest_sequence
from ppoctl.recipe.schema import Recipe

MIB = 2**20
OBJECT_STORE_BYTES = 256 * MIB
"""Of a Ray of the run's own (`engines.ray.cluster`)."""
RANK_BYTES, VLLM_BYTES = 400 * MIB, 550 * MIB
"""A process before any model, and one with vLLM (an engine's; the driver of a run in one process): Python and
libraries, as seen with torch 2.13 and vLLM 0.32 for CPUs."""
_READS = {"actor": ("rollout", "logprobs", "eval"), "critic": ("values",)}
"""Stages in which a role scores: the actor also for the canary."""
_SMALLER_BUCKETS = "lower `cluster.weights_bucket_mib`"
_MORE_NODES = "take more nodes (`cluster.ray_address`) or a smaller model"


@dataclass(frozen=True)
class Known:
    """What the items are made of."""

    recipe: Recipe
    trainings: Mapping[str, Training]
    ranks: Mapping[str, Sequence[RankBytes]]
    """One of each pipeline stage of a role."""
    generator: GeneratorBytes
    driver: DriverBytes
    sending: Sending
    batch: Batch
    states: Mapping[str, int]
    """A saved state of each role."""

    def stage(self, role: str, rank: int) -> int:
        """The pipeline stage of a rank; Megatron-Core counts over pipeline ranks last."""
        return 0 if role == "generator" else rank // self.trainings[role].layout.stage_ranks


def on_gpus(known: Known, gpu_bytes: int) -> list[Residency]:
    """Colocated: the fullest GPU. Apart: one of each role, that of its fullest rank."""
    room = devices(known.recipe)
    if known.recipe.cluster.placement == "apart":
        fullest = {role: _fullest(known, role) for role in known.ranks} | {"generator": 0}
        return [_residency(known, f"the {role}'s GPU", gpu_bytes, {role: rank}) for role, rank in fullest.items()]
    shared: dict[tuple[tuple[str, int], ...], Residency] = {}
    for number in range(room):
        tenants = {role: number for role, size in processes(known.recipe).items() if number < size}
        alike = tuple((role, known.stage(role, rank)) for role, rank in tenants.items())
        if alike not in shared:
            name = f"the fullest of {room} GPUs" if room > 1 else "the GPU"
            shared[alike] = _residency(known, f"{name} ({', '.join(tenants)})", gpu_bytes, tenants)
    return [max(shared.values(), key=lambda found: found.fullest.bytes)]


def on_machines(known: Known, host_bytes: int | None) -> list[Residency]:
    """All processes together, on this machine or on the nodes of a Ray; `host_bytes`: what there is, if known."""
    joins = known.recipe.cluster.ray_address is not None
    place = Place("all nodes of the Ray together" if joins else "this machine with all processes", host_bytes)
    items: list[Item] = []
    for role, training in known.trainings.items():
        layout = training.layout
        copies = layout.stage_ranks
        advice = f"lower `{role}.parallel.data`" if layout.data > 1 else _MORE_NODES
        items += _trainer_items(known, role, [*known.ranks[role]] * copies, _Advice(advice, advice))
    count, generator = known.generator.processes, known.generator
    fewer = "lower `generator.engines`" if generator.engines > 1 else None
    items.append(Item("generator weights", count * generator.weights, fewer or "choose a smaller model"))
    items.append(Item("KV cache", count * generator.kv_cache, "lower `generator.kv_cache_mib`"))
    items += at_work("weights on their way", _SMALLER_BUCKETS, {"rollout": known.sending.on_the_way})
    return [residency(place, [*items, *_driver_items(known)], draws=_draws(known))]


@dataclass(frozen=True)
class _Advice:
    model: str
    """What makes weights and gradients smaller."""
    optimizer: str


def _residency(known: Known, name: str, gpu_bytes: int, tenants: Mapping[str, int]) -> Residency:
    """Of one GPU, by the rank of each role on it."""
    items: list[Item] = []
    for role, rank in tenants.items():
        if role == "generator":
            turn = _turn(known, role)
            items.append(Item("generator weights", known.generator.weights, "raise `generator.tensor`", turn))
            items.append(Item("KV cache", known.generator.kv_cache, "lower `generator.gpu_memory_frac`", turn))
            continue
        layout = known.trainings[role].layout
        split = f"raise `{role}.parallel.tensor` or `.pipeline`" + (", and lower `.data`" if layout.data > 1 else "")
        shared = f"raise `{role}.parallel.data` with `distributed_optimizer = true`"
        turns = {part: _turn(known, f"{role} {part}") for part in ("weights", "training")}
        turns["reference"] = _turn(known, "reference")
        ranks = [known.ranks[role][known.stage(role, rank)]]
        items += _trainer_items(known, role, ranks, _Advice(split, shared), turns)
    parts = {"actor": known.sending.on_sender, "generator": known.sending.on_engine}
    on_the_way = sum(size for role, size in parts.items() if role in tenants)
    items += at_work("weights on their way", _SMALLER_BUCKETS, {"rollout": on_the_way})
    return residency(Place(name, gpu_bytes), items, draws="generator" not in tenants or _draws(known))


def _draws(known: Known) -> bool:
    """Whether vLLM starts: its cache holds one sequence of full length."""
    return known.generator.full_sequences > 0


def _turn(known: Known, part: str) -> tuple[str, ...]:
    """The stages in which it is on the device."""
    return TURNS[part] if known.recipe.cluster.offload else STAGES


def moved_out(known: Known) -> int:
    """Host memory that the roles of one GPU take when they are not at work, at most."""
    if not known.recipe.cluster.offload:
        return 0
    trainers = 0
    for role in known.ranks:
        rank = known.ranks[role][known.stage(role, _fullest(known, role))]
        trainers += rank.weights + rank.main_weights + rank.moments + rank.reference
    return trainers + known.generator.weights


def _fullest(known: Known, role: str) -> int:
    """A rank of the pipeline stage that needs most."""
    layout, ranks = known.trainings[role].layout, known.ranks[role]
    return max(ranks, key=lambda rank: rank.peak).stage * layout.stage_ranks


def _trainer_items(
    known: Known,
    role: str,
    ranks: Sequence[RankBytes],
    advice: _Advice,
    turns: Mapping[str, tuple[str, ...]] = dict.fromkeys(("weights", "training", "reference"), STAGES),
) -> Iterator[Item]:
    def total(name: str) -> int:
        return sum(int(getattr(rank, name)) for rank in ranks)

    training = known.trainings[role]
    yield Item(f"{role} weights", total("weights"), advice.model, turns["weights"])
    yield Item(f"{role} gradients", total("gradients"), advice.model, turns["training"])
    kept = total("main_weights") + total("moments")
    yield Item(f"{role} optimizer", kept, advice.optimizer, turns["training"])
    if training.has_reference:
        yield Item("reference", total("reference"), advice.model, turns["reference"])
    if total("gather_buffer"):
        yield Item(f"{role} gather buffer", total("gather_buffer"), _lower(known, role, with_gradient=False))
    reads = _lower(known, role, with_gradient=False)
    yield from at_work(f"{role} at work", reads, dict.fromkeys(_READS[role], total("forward")))
    trains = _lower(known, role, with_gradient=True)
    if training.recompute != "full":
        trains += f", or set `{role}.recompute`"
    yield from at_work(f"{role} at work", trains, {f"{role}_update": total("update")})


def _lower(known: Known, role: str, *, with_gradient: bool) -> str:
    key, most = limit(getattr(known.recipe, role).batching, with_gradient=with_gradient)
    if "tokens" in key and most <= longest_sequence(known.recipe) + 1:
        # A sequence must fit; context ranks have a part of it each.
        return f"raise `{role}.parallel.context`"
    return f"lower `{role}.batching.{key}`"


def _driver_items(known: Known) -> Iterator[Item]:
    driver, recipe = known.driver, known.recipe
    lower = "lower `rollout.prompts_per_step` or `rollout.max_new_tokens`"
    rest = dict.fromkeys(STAGES[1:], driver.records)
    yield from at_work("samples and records", lower, {"rollout": driver.samples, **rest})
    if recipe.checkpoint.asynchronous:
        yield Item("states being written", sum(known.states.values()), "set `checkpoint.asynchronous = false`")
    if is_one_process(recipe):
        yield Item("libraries", VLLM_BYTES, _MORE_NODES)
        return
    sizes = processes(recipe)
    ranks, engines = sizes["actor"] + sizes["critic"], sizes["generator"]
    libraries = (1 + ranks) * RANK_BYTES + engines * VLLM_BYTES
    yield Item("libraries", libraries, "lower `actor.parallel`, `critic.parallel` and `generator.engines`")
    yield Item("object store", OBJECT_STORE_BYTES, "leave them out: in one process there is none")
