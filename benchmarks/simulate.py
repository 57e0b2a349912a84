"""A PPO step on 8 to 1,024 GPUs, in bytes and seconds, from a recipe and from given unit costs.

    PYTHONPATH=src python benchmarks/simulate.py RECIPE [--set KEY=VALUE ...] [--units h200|h100] [--gpu-gib GIB]

No step is measured: docs/scaling.md shows the table of one recipe and the conclusions. The units `h100` contain what
one H100 has measured, on one GPU and with 1.5B parameters; the units `h200` are assumed.

It models the present code: the generator's engines on all GPUs (colocated), or on their part of them (separate),
called by the driver every few tokens. The driver holds every rollout and puts it into Ray's object store for each
call, and a node pulls one copy of it; replies are not sharded. Weights are sent bucket by bucket, out of memory of a
rank of each node, out of the object store of one rank's node, or in a broadcast (`cluster.weights`). Records are
written by the driver, states by the ranks. All data that a node pulls are assumed to come from the node that made
them (Ray may take them from a node that already has them), and all responses to have full length: these are upper
bounds. Stages run in sequence; only states are written in the background, and a bucket of weights is read while the
next is made. With `rollout.ahead = 1`, weights are sent first. Then the engines generate for the next step while the
trainers work, and at the end records are committed and states saved: a step takes the longer of both sides. On shared
GPUs both sides compete, so the step is then a lower bound.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from math import ceil, lcm
from pathlib import Path
from typing import Any

from ppoctl.algorithms.choose import trace_at
from ppoctl.algorithms.roles import head_of
from ppoctl.algorithms.sizes import updates_per_step
from ppoctl.cli import render
from ppoctl.core import units
from ppoctl.core.errors import PpoctlError, RecipeError
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.vllm.engine import MOST_STEPS
from ppoctl.models.cost import count_parameters, forward_flops
from ppoctl.models.model import Model
from ppoctl.models.shape import ModelShape
from ppoctl.models.shape_reader import shape_if_known
from ppoctl.plan.fit import seconds
from ppoctl.plan.memory.assumptions import GIB
from ppoctl.plan.memory.driver import (
    StepBatch,
    batch_of,
    driver_bytes,
    records_of,
    sequences_bytes,
    update_input_bytes,
)
from ppoctl.plan.memory.generator_memory import bucket_bytes, generator_bytes
from ppoctl.plan.memory.trainer_memory import state_bytes
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.parallel import GPUS_PER_NODE, devices, layouts
from ppoctl.recipe.schema import Recipe

WORLDS = (8, 64, 256, 1024)


def _unit(value: float, means: str) -> Any:
    """Return a field that holds a cost, with its unit and source."""
    return field(default=value, metadata={"means": means})


@dataclass(frozen=True)
class Units:
    """The unit costs. Those of an H200 are assumed."""

    gpu_gib: float = _unit(141.0, "GiB of an H200's memory (data sheet)")
    gpu_flops: float = _unit(seconds.GPU_FLOPS, "FLOP/s of an H200 in bfloat16, dense (data sheet)")
    forward_utilisation: float = _unit(seconds.GPU_UTILISATION, "share of it that forward passes reach (assumed)")
    update_utilisation: float = _unit(seconds.GPU_UTILISATION, "share of it that updates reach (assumed)")
    gpu_memory_bytes_s: float = _unit(seconds.GPU_MEMORY_BYTES_S, "bytes/s of an H200's memory (data sheet)")
    decode_utilisation: float = _unit(seconds.DECODE_UTILISATION, "share of it that decoding reaches (assumed)")
    decode_row_s: float = _unit(0.0, "seconds of an engine's Python per sequence and token (not counted)")
    gpu_nic_bytes_s: float = _unit(seconds.GPU_NIC_BYTES_S, "bytes/s from a GPU to other nodes, 400 Gbit/s (assumed)")
    gpu_host_bytes_s: float = _unit(seconds.GPU_HOST_BYTES_S, "bytes/s between a GPU and its host's memory (assumed)")
    store_bytes_s: float = _unit(3e9, "bytes/s out of or into one node's object store, TCP (assumed)")
    copy_bytes_s: float = _unit(5e9, "bytes/s that one thread copies in host memory (assumed)")
    encode_bytes_s: float = _unit(0.8e9, "bytes/s of a record into safetensors (benchmarks/driver_costs.py)")
    digest_bytes_s: float = _unit(1.4e9, "bytes/s of SHA-256 in one thread (benchmarks/driver_costs.py)")
    checksum_bytes_s: float = _unit(100e9, "bytes/s of a weight's checksum on a GPU (assumed)")
    disk_bytes_s: float = _unit(2e9, "bytes/s that one node writes to the shared file system (assumed)")
    call_s: float = _unit(1e-3, "seconds of the driver per call and rank (assumed for Ray)")
    token_s: float = _unit(4.2e-7, "seconds of the driver's Python per drawn token (benchmarks/driver_costs.py)")
    balance_row_s: float = _unit(2e-6, "seconds per row to split a minibatch over ranks (benchmarks/balance.py)")
    score_s: float = _unit(1e-3, "seconds of a reward worker per sample (assumed)")

    def described(self) -> list[tuple[str, float, str]]:
        """Yield name, value and meaning of each."""
        return [(one.name, float(getattr(self, one.name)), one.metadata["means"]) for one in fields(self)]


@dataclass(frozen=True)
class H100Units(Units):
    """Unit costs as one H100 has measured them (docs/gpu.md); all others as in `Units`."""

    gpu_gib: float = _unit(79.0, "GiB of an H100's memory (nvidia-smi)")
    gpu_flops: float = _unit(798e12, "FLOP/s of matrix products on an H100 in bfloat16 (measured)")
    forward_utilisation: float = _unit(0.36, "share of it that forward passes reach (measured: values of 1.5B)")
    update_utilisation: float = _unit(
        0.32 * 989 / 798, "share of it that updates reach (measured: 1.5B, 0.32 of 989e12)"
    )
    gpu_memory_bytes_s: float = _unit(3.35e12, "bytes/s of an H100's memory (data sheet)")
    decode_utilisation: float = _unit(
        0.58, "share of it that decoding reaches (measured: about 15 GB in 0.32 of 24 ms, the GPU's busy time)"
    )
    decode_row_s: float = _unit(
        0.68 * 0.024 / 512,
        "seconds of an engine's Python per sequence and token (measured: the rest of 24 ms, 512 sequences)",
    )
    gpu_host_bytes_s: float = _unit(54e9, "bytes/s between a GPU and its host's memory (measured)")


UNITS = {"h200": Units(), "h100": H100Units()}


@dataclass(frozen=True)
class World:
    """A number of GPUs, and the parameters of a step on them."""

    gpus: int
    actor: ParallelTable
    critic: ParallelTable
    engines: int
    batch: StepBatch
    minibatch: int
    weight: int
    """Bytes of one model parameter."""

    @property
    def nodes(self) -> int:
        return ceil(self.gpus / GPUS_PER_NODE)


@dataclass(frozen=True)
class SimulatedStep:
    """One PPO step. Bytes, then seconds: `_s` fields up to `save_s` add up to `step_s` and `hidden_s`."""

    gpus: int
    is_ahead: bool
    """Whether the engines generate for the next step while this step trains."""
    sequences: int
    data_ranks: int
    engines: int
    driver_bytes: int
    """Peak host memory of the driver."""
    object_bytes: int
    """Bytes that are put into the object store of the driver's node."""
    sent_bytes: int
    """Bytes that leave that node for all others."""
    sent_weights_bytes: int
    """Bytes that leave the nodes of the ranks that send weights."""
    weights_s: float
    """Seconds of the transfer of the actor's weights into all engines."""
    rollout_s: float
    """Seconds in which engines decode."""
    asking_s: float
    """Seconds in which engines wait for the driver, which calls one after the other."""
    samples_s: float
    """Seconds of the driver's Python for generated tokens: samples created, kept for a crash, and made a record."""
    reward_s: float
    forward_s: float
    """Seconds of values, log-probs, and the reference's if they are read."""
    critic_update_s: float
    actor_update_s: float
    data_s: float
    """Seconds of sending sequences to all ranks, once; grids of objectives, once a role; and of merging the
    replies."""
    commit_s: float
    """Seconds of encoding, digesting and writing records."""
    save_s: float
    """Seconds that training waits for states of both roles to be saved, averaged over the steps between saves."""

    @property
    def step_s(self) -> float:
        """Seconds of the complete step."""
        return sum(self.costs.values()) - self.hidden_s

    @property
    def hidden_s(self) -> float:
        """Seconds of the shorter of generation and training, if both run at the same time."""
        return min(map(self._sum, (GENERATION, TRAINING))) if self.is_ahead else 0.0

    def _sum(self, names: Iterable[str]) -> float:
        return sum(self.costs[name] for name in names)

    @property
    def costs(self) -> dict[str, float]:
        """Return the costs that make up a step."""
        names = [one.name for one in fields(self) if one.name.endswith("_s")]
        return {name: getattr(self, name) for name in names}

    @property
    def scaling_s(self) -> float:
        """Seconds of the part of a step that more GPUs share."""
        sides = [self._sum(WORK & set(side)) for side in (GENERATION, TRAINING)]
        return max(sides) if self.is_ahead else sum(sides)


def simulate(recipe: Recipe, shape: ModelShape, units: Units, *, growing: bool = False) -> list[SimulatedStep]:
    """Yield a step on each of `WORLDS` that holds complete copies of the models; there may be none. The batch is the
    recipe's, or grows with the number of GPUs from that of the recipe's layout."""
    worlds = _worlds(recipe, WORLDS, growing=growing) or _worlds(recipe, _own_sizes(recipe), growing=growing)
    return [_step(recipe, shape, world, units) for world in worlds]


def _worlds(recipe: Recipe, sizes: Sequence[int], *, growing: bool) -> list[World]:
    found = [_world(recipe, gpus, growing=growing) for gpus in sizes]
    return [world for world in found if world is not None]


def _own_sizes(recipe: Recipe) -> list[int]:
    """Return the recipe's numbers of devices, doubled as often as each of `WORLDS` allows."""
    own = devices(recipe)
    found = [own << (most // own).bit_length() - 1 for most in WORLDS if most >= own]
    return list(dict.fromkeys(found)) or [own]


def _world(recipe: Recipe, gpus: int, *, growing: bool) -> World | None:
    """Return a world. Colocated: each role on all GPUs. Separate: each on as large a fraction of them as in the
    recipe."""
    written, table = layouts(recipe), recipe.generator
    colocated = recipe.cluster.placement == "colocated"

    def copies(number: int, ranks: int) -> int:
        """Return the number of copies, each on the recipe's number of ranks; 0: they do not fit."""
        of_all, rest = (gpus, 0) if colocated else divmod(number * ranks * gpus, devices(recipe))
        return 0 if rest or of_all % ranks else of_all // ranks

    data = {role: copies(layout.data, layout.model_ranks * layout.context) for role, layout in written.items()}
    engines = copies(table.engines, table.tensor)
    if not all([*data.values(), engines]):
        return None
    actor, critic = (written[role].model_copy(update={"data": data[role]}) for role in ("actor", "critic"))
    own = max(GPUS_PER_NODE, written["actor"].world_size) if colocated else devices(recipe)
    minibatch = max(1, round(recipe.ppo.minibatch_seqs * (gpus / own if growing else 1.0)))
    minibatches = batch_of(recipe).sequences // recipe.ppo.minibatch_seqs
    weight = 4 if recipe.model.dtype == "float32" else 2
    return World(gpus, actor, critic, engines, batch_of(recipe, sequences=minibatch * minibatches), minibatch, weight)


def _step(recipe: Recipe, shape: ModelShape, world: World, units: Units) -> SimulatedStep:
    batch = world.batch
    recorded_calls = calls(recipe, batch)
    put = sum(call.bytes for call in recorded_calls)
    records = records_of(trace_at(recipe, recipe.steps), recipe, batch)
    buckets = bucket_bytes(shape, world.actor, world.weight, recipe.cluster.weights_bucket_mib * 2**20)
    # Encoded for its identity and for its file; digested for its identity and as the file is read back.
    committed = 2 / units.encode_bytes_s + 2 / units.digest_bytes_s + 1 / units.disk_bytes_s
    decoding, asking = rollout_seconds(recipe, shape, world, units)
    step = SimulatedStep(
        gpus=world.gpus,
        is_ahead=recipe.rollout.ahead > 0,
        sequences=batch.sequences,
        data_ranks=world.actor.data,
        engines=world.engines,
        driver_bytes=driver_bytes(batch, records).peak,
        object_bytes=put,
        sent_bytes=put * (world.nodes - 1),
        sent_weights_bytes=sum(buckets) * _copies_sent(recipe, world),
        weights_s=_weights_seconds(recipe, sum(buckets), world, units)
        + len(buckets) * _rpc_for_weights(recipe, world) * units.call_s,
        rollout_s=decoding,
        asking_s=max(0.0, asking - decoding),
        samples_s=batch.cells * units.token_s,
        reward_s=ceil(batch.sequences / recipe.reward.workers) * units.score_s,
        forward_s=_forward_seconds(shape, world, units),
        critic_update_s=_update_seconds(recipe, shape, world, "critic", units),
        actor_update_s=_update_seconds(recipe, shape, world, "actor", units),
        data_s=_data_seconds(recorded_calls, world, units),
        commit_s=sum(records.values()) * committed,
        save_s=0.0,
    )
    return replace(step, save_s=_save_seconds(recipe, shape, world, step.step_s, units))


def rollout_seconds(recipe: Recipe, shape: ModelShape, world: World, units: Units) -> tuple[float, float]:
    """Return the seconds in which engines decode, and in which the driver calls them meanwhile. Sequences are decoded
    together in waves; a token of all of them reads the weights once, and the KV cache of each once. Then the engine's
    Python takes its time for each of them."""
    batch = world.batch
    window = batch.prompt_tokens + batch.response_tokens
    engine = generator_bytes(shape, world.weight, recipe.generator, window, units.gpu_gib * GIB)
    sequences = ceil(batch.sequences / world.engines)
    together = max(1, min(sequences, recipe.generator.max_concurrent_seqs, engine.full_sequences))
    tokens = ceil(sequences / together) * batch.response_tokens
    per_token = engine.kv_cache // max(1, engine.kv_tokens)
    mean_cache = together * (batch.prompt_tokens + batch.response_tokens / 2) * per_token
    each_s = (engine.weights + mean_cache) / (units.gpu_memory_bytes_s * units.decode_utilisation)
    each_s += together * units.decode_row_s
    busy = min(world.engines, batch.sequences) * recipe.generator.tensor
    return tokens * each_s, ceil(tokens / MOST_STEPS) * busy * units.call_s


def _copies_sent(recipe: Recipe, world: World) -> int:
    """Return the number of copies of the weights that leave the node of the sending rank. In a broadcast others
    forward what they receive. With shared memory, a node that has a copy of the stage needs none: colocated, each
    stage is on its part of the nodes."""
    others, way = world.nodes - 1, recipe.cluster.weights
    if way == "broadcast":
        return min(1, others)
    if way == "shared" and recipe.cluster.placement == "colocated":
        return world.nodes - max(1, world.nodes // world.actor.pipeline)
    return others


def _rpc_for_weights(recipe: Recipe, world: World) -> int:
    """Return the number of processes that the driver calls for each bucket: ranks that gather, and all of the
    engines. Over a link they are called once for all buckets."""
    if recipe.cluster.weights == "broadcast":
        return 0
    gathering = lcm(world.actor.tensor, world.actor.expert_ranks)
    near = min(world.nodes, world.actor.stage_ranks // gathering) if recipe.cluster.weights == "shared" else 1
    return max(1, near) * gathering + world.engines * recipe.generator.tensor


def _weights_seconds(recipe: Recipe, size: int, world: World, units: Units) -> float:
    """Return the seconds of a transfer. A rank makes buckets: checksums on its GPU and a copy there, or one to the
    host and one into the store. Meanwhile nodes pull the previous bucket, and engines copy their slice of it. A
    broadcast goes from GPU to GPU, as fast as one can send."""
    tensor, copies = recipe.generator.tensor, _copies_sent(recipe, world)
    checked = 1 / units.checksum_bytes_s
    if recipe.cluster.weights == "broadcast":
        return size * max(checked, 1 / units.gpu_nic_bytes_s)
    if recipe.cluster.weights == "shared" and not copies:
        # In addition, a rank keeps them on the host for engines that die: on several nodes in the store.
        kept = 1 / units.gpu_host_bytes_s + (1 / units.copy_bytes_s if world.nodes > 1 else 0.0)
        return size * (checked + 2 / units.gpu_memory_bytes_s + kept)
    made = checked + 1 / units.gpu_host_bytes_s + 1 / units.copy_bytes_s
    read = copies / units.store_bytes_s + 1 / (tensor * units.gpu_host_bytes_s)
    return size * max(made, read)


def _save_seconds(recipe: Recipe, shape: ModelShape, world: World, step_s: float, units: Units) -> float:
    """Return the seconds of saving per step. Ranks that write first copy their part; before that, the state of a
    distributed optimizer is gathered, unless it is saved for any number of data ranks only. The next save waits for
    the rest of the previous one; without `asynchronous` it waits for all of it."""
    table = recipe.checkpoint
    copied, disk_s, digests = 0.0, 0.0, []
    for role in ("actor", "critic"):
        layout: ParallelTable = getattr(world, role)
        size = state_bytes(Model(shape, head_of(role)), layout, world.weight)
        narrow = layout.distributed_optimizer and table.reshardable == "dp"
        each = size / (layout.world_size if narrow else layout.model_ranks)
        copied += each / units.gpu_host_bytes_s
        if layout.distributed_optimizer and not narrow:
            copied += each / units.gpu_nic_bytes_s
        digests.append(each / units.digest_bytes_s)
        disk_s += size / (units.disk_bytes_s * world.nodes)
    # In the background both roles write at the same time.
    waited = (
        max(0.0, max(digests) + disk_s - table.every_steps * step_s) if table.asynchronous else sum(digests) + disk_s
    )
    return (copied + waited) / table.every_steps


@dataclass(frozen=True)
class Call:
    """One call to all ranks of a role."""

    bytes: int
    """Bytes that each of them reads and that are not in its node's store."""
    grids: int
    """Number of returned [B, R] grids in float32."""


def calls(recipe: Recipe, batch: StepBatch) -> list[Call]:
    """Return the calls of one step: values, log-probs with entropies, the reference's (with entropies, too), updates.
    If log-probs are not computed before the update, the update returns entropies."""
    sequences, ppo = sequences_bytes(batch), recipe.ppo
    reads_before = ppo.old_logprobs == "trainer"
    entropies = ppo.epochs if ppo.policy_loss.entropy_coef or not reads_before else 0
    return [
        Call(sequences, 1),  # which are in every node's store from then on
        *([Call(0, 2)] if reads_before else []),
        *([Call(0, 2)] if batch.has_reference else []),
        Call(update_input_bytes(batch, "value") - sequences, ppo.critic_epochs or ppo.epochs),
        Call(update_input_bytes(batch, "token") - sequences, ppo.epochs + entropies),
    ]


def _pass_seconds(
    shape: ModelShape, world: World, layout: ParallelTable, rows: int, units: Units, utilisation: float
) -> float:
    """Return the seconds of a forward pass over rows: the data rank with the most rows decides. Context ranks
    exchange keys and values first, layer by layer, without overlap."""
    tokens = world.batch.prompt_tokens + world.batch.response_tokens - 1
    of_one_gpu = units.gpu_flops * utilisation * layout.model_ranks * layout.context
    others = tokens * (layout.context - 1) / layout.context
    channels = 2 * (shape.key_channels if shape.latent is None else shape.query_channels) / layout.model_ranks
    gathered = others * channels * shape.num_layers * world.weight / units.gpu_nic_bytes_s
    return ceil(rows / layout.data) * (forward_flops(shape, tokens, shape.vocab_size) / of_one_gpu + gathered)


def _forward_seconds(shape: ModelShape, world: World, units: Units) -> float:
    actor, critic = (
        _pass_seconds(shape, world, layout, world.batch.sequences, units, units.forward_utilisation)
        for layout in (world.actor, world.critic)
    )
    return critic + actor * (1 + world.batch.has_reference)


def _update_seconds(recipe: Recipe, shape: ModelShape, world: World, role: str, units: Units) -> float:
    """Return the seconds of an update. Forward and backward are three passes; then float32 gradients are reduced over
    the data ranks without overlap (a distributed optimizer gathers weights instead of reducing a second time)."""
    layout: ParallelTable = getattr(world, role)
    per_parameter = 4 + (world.weight if layout.distributed_optimizer else 4)
    copies = layout.data * layout.context
    sent = count_parameters(shape) / layout.model_ranks * per_parameter * (copies - 1) / copies
    one = 3 * _pass_seconds(shape, world, layout, world.minibatch, units, units.update_utilisation)
    one += sent / units.gpu_nic_bytes_s + world.minibatch * units.balance_row_s
    return updates_per_step(recipe, role) * one


def _data_seconds(recorded_calls: Sequence[Call], world: World, units: Units) -> float:
    """Return the seconds of data transfer. Each call: put once, sent to every other node out of the driver's, copied
    out by the ranks of a node at the same time; grids are returned and merged."""
    put = sum(call.bytes for call in recorded_calls)
    there = put * (2 / units.copy_bytes_s + (world.nodes - 1) / units.store_bytes_s)
    grids = 4 * world.batch.cells * sum(call.grids for call in recorded_calls)
    remote = 1 / units.store_bytes_s if world.nodes > 1 else 0.0
    return there + grids * (2 / units.copy_bytes_s + remote) + len(recorded_calls) * world.gpus * units.call_s


SECONDS = [
    ("weights to the engines", "weights_s"),
    ("rollout, engines", "rollout_s"),
    ("engines, waiting for the driver", "asking_s"),
    ("samples, driver's Python", "samples_s"),
    ("reward", "reward_s"),
    ("values and log-probs", "forward_s"),
    ("critic update", "critic_update_s"),
    ("actor update", "actor_update_s"),
    ("sequences to ranks, answers", "data_s"),
    ("records committed", "commit_s"),
    ("states saved, per step", "save_s"),
    ("hidden by overlap", "hidden_s"),
    ("step", "step_s"),
    ("of it, work of all GPUs", "scaling_s"),
]
WORK = {"rollout_s", "forward_s", "critic_update_s", "actor_update_s"}
GENERATION = ("rollout_s", "asking_s", "samples_s")
"""Costs of one side, if generation is ahead of training."""
TRAINING = ("reward_s", "forward_s", "critic_update_s", "actor_update_s", "data_s")
"""Costs of the other side."""


def show(recipe: Recipe, units: Units) -> None:
    """Print the step of the recipe's size, a step that grows with the GPUs, and the units. Raise RecipeError if the
    model is unknown on this machine, or if no number of GPUs holds it."""
    shape = shape_if_known(recipe.model.path)
    if shape is None:
        raise RecipeError(
            f"`model.path = {recipe.model.path}` is no local folder of a known family: nothing to simulate with",
            hint="name a folder with the model's config.json: --set model.path=FOLDER",
        )
    same = simulate(recipe, shape, units)
    if not same:
        raise RecipeError(
            "no number of GPUs from 8 to 1,024 holds whole copies of actor, critic and engines as they are laid out",
            hint="lay them out over powers of two: `tensor`, `pipeline` and `context` of each role",
        )
    growing = simulate(recipe, shape, units, growing=True)
    if recipe.rollout.ahead and recipe.cluster.placement == "colocated":
        render.line("generation and training share the GPUs: the times of steps are lower bounds")
        render.line()
    for title, steps in (
        (f"{recipe.name}: the same step on more GPUs", same),
        ("a step that grows with the GPUs", growing),
    ):
        render.heading(title)
        render.table(_rows(steps), ["", "GPUs", *(f"{step.gpus:,}" for step in steps)])
        render.line()
    render.heading("units")
    render.table([("", name, f"{value:g}", means) for name, value, means in units.described()])


def _rows(steps: list[SimulatedStep]) -> list[list[str]]:
    rows = [["sequences", *(f"{step.sequences:,}" for step in steps)]]
    rows.append(["data ranks of the actor", *(f"{step.data_ranks:,}" for step in steps)])
    rows.append(["engines", *(f"{step.engines:,}" for step in steps)])
    for name, key in (
        ("driver", "driver_bytes"),
        ("put into its object store", "object_bytes"),
        ("sent to other nodes", "sent_bytes"),
        ("weights sent to other nodes", "sent_weights_bytes"),
    ):
        rows.append([name, *(units.size(getattr(step, key)) for step in steps)])
    shown = [row for row in SECONDS if row[1] != "hidden_s" or any(step.is_ahead for step in steps)]
    rows += [[name, *(_seconds(getattr(step, key)) for step in steps)] for name, key in shown]
    rows.append(["largest of the rest", *(_largest(step) for step in steps)])
    return [["", *row] for row in rows]


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s" if value else "-"


def _largest(step: SimulatedStep) -> str:
    """Return the longest cost that is not shared by all GPUs."""
    rest = [(name, key) for name, key in SECONDS if key in step.costs and key not in WORK]
    name, _ = max(rest, key=lambda row: step.costs[row[1]])
    return name.split(",")[0].split(" to ")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description="A PPO step on 8 to 1,024 GPUs.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--units", choices=UNITS, default="h200")
    parser.add_argument("--gpu-gib", type=float)
    args = parser.parse_args()
    units = UNITS[args.units]
    try:
        show(load([args.recipe], args.sets).recipe, replace(units, gpu_gib=args.gpu_gib or units.gpu_gib))
    except PpoctlError as error:
        render.error(error.message)
        render.hint(error.hint or "")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
