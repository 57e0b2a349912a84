"""Estimated time of a PPO step, to compare settings. The arithmetic is that of docs/scaling.md.

Most of the constants are assumed, so only ratios of times have a meaning. All responses are assumed to have full
length. The transfer of weights to the engines is not counted. Stages run one after the other, and communication does
not overlap with computation. Only decoding overlaps with all other work if generation is ahead of training
(`rollout.ahead`).

    decoding        engines read the weights and the KV cache once per token, for all sequences at once
    passes          FLOPs of log-probs, values and reference
    updates         FLOPs of forward and backward passes, with the idle time of pipeline ranks
    recomputation   forward passes that are repeated in backward passes
    microbatches    reads of weights and updates of gradients in GPU memory, once per microbatch
    communication   between tensor, context and data ranks
    optimizer       the optimizer step, and the transfers of an optimizer on the CPU
    offload         transfers of offloaded roles
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from ppoctl.algorithms import sizes
from ppoctl.algorithms.choose import trace_at
from ppoctl.algorithms.role_model import model_of
from ppoctl.algorithms.roles import POLICY, head_of
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.shape import ModelShape
from ppoctl.plan.fit.choices import RoleChoice, TrainedPartTable, candidate_of, settled
from ppoctl.plan.flops import full_row_work, pass_flops
from ppoctl.plan.memory.driver import StepBatch, batch_of
from ppoctl.plan.memory.generator_memory import GeneratorBytes
from ppoctl.plan.shared_sizes import microbatches
from ppoctl.plan.step_work import step_work, uses_of
from ppoctl.plan.trained_part import trained_part
from ppoctl.recipe.parallel import GPUS_PER_NODE, engine_count, layouts
from ppoctl.recipe.schema import GeneratorTable, Recipe

GPU_FLOPS = 989e12
"""FLOP/s of an H200 in bfloat16, dense (data sheet)."""
GPU_UTILISATION = 0.35
"""Fraction of it that training and scoring reach (assumed)."""
GPU_MEMORY_BYTES_S = 4.8e12
"""Bytes/s of an H200's memory (data sheet)."""
DECODE_UTILISATION = 0.5
"""Fraction of it that decoding reaches (assumed)."""
GPU_NIC_BYTES_S = 50e9
"""Bytes/s from a GPU to other nodes, 400 Gbit/s (assumed)."""
GPU_HOST_BYTES_S = 25e9
"""Bytes/s between a GPU and its host's memory (assumed)."""
GPU_LINK_BYTES_S = 450e9
"""Bytes/s from a GPU to the other GPUs of its node, NVLink of an H200 (data sheet)."""
HOST_MEMORY_BYTES_S = 200e9
"""Bytes/s of a node's memory during an optimizer step on the CPU, all cores together (assumed)."""
EAGER_LAYER_S = 3e-4
"""Seconds in which a host starts the kernels of a layer one by one, if an engine has no CUDA graphs (assumed)."""
ALL_REDUCE_S = 1e-5
"""Seconds of an all-reduce of few bytes between GPUs of a node (assumed)."""

MLP_RECOMPUTED = 2 / 3
"""Fraction of the FLOPs of an MLP that `recompute = "selective"` repeats: all but the last projection."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step by kind of work."""

    decoding: float = 0.0
    passes: float = 0.0
    updates: float = 0.0
    recomputation: float = 0.0
    microbatches: float = 0.0
    communication: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0
    overlaps: bool = False
    """Whether decoding and all other work run at the same time."""

    @property
    def kinds(self) -> dict[str, float]:
        """Seconds of each kind of work."""
        return {name: value for name, value in vars(self).items() if name != "overlaps"}

    @property
    def total(self) -> float:
        """Seconds of the step: the sum or, with overlap, the longer of decoding and of all other work. On shared GPUs
        both compete, so the step then takes at least this time."""
        return max(self.decoding, replace(self, decoding=0.0).work) if self.overlaps else self.work

    @property
    def work(self) -> float:
        """Sum of the seconds of all kinds of work."""
        return sum(self.kinds.values())

    @property
    def rank(self) -> tuple[float, float]:
        """Key that sorts settings, the fastest first. If steps take the same time, less work is better."""
        return self.total, self.work

    def __add__(self, other: "StepSeconds") -> "StepSeconds":
        kinds = {name: value + getattr(other, name) for name, value in self.kinds.items()}
        return StepSeconds(**kinds, overlaps=self.overlaps or other.overlaps)


@dataclass(frozen=True)
class RoleWork:
    """Work of a role in one step that no layout and no microbatch changes."""

    passes: float
    """FLOPs of passes without gradients."""
    updates: float
    """FLOPs of updates."""
    forwards_of_updates: float
    """FLOPs of the forward passes of the updates through the layers that keep activations."""
    mlp_frac: float
    """Fraction of the FLOPs of a layer's matrices that are the MLP's."""
    rows_passed: int
    """Rows of all passes without gradients."""
    rows_trained: int
    """Rows of all updates of a step."""
    parameters: int
    trained_parameters: int


def role_work(recipe: Recipe, role: str, shapes: Mapping[str, ModelShape]) -> RoleWork:
    """Return the work of a trained role."""
    shape, flops = shapes[role], pass_flops(recipe, shapes)
    work = step_work(trace_at(recipe, recipe.steps), recipe)
    forwards = (use for use in uses_of(work, recipe) if (use.model.kind, use.model.role) == ("forward", role))
    trained = sizes.trained_sequences(recipe, role) * sizes.epochs(recipe, role)
    part = trained_part(recipe, role)
    mlp = 3 * shape.hidden_size * shape.ffn_hidden_size
    attention = shape.hidden_size * 2 * (shape.query_channels + shape.key_channels)
    return RoleWork(
        passes=flops.get(("forward", role), 0.0),
        updates=flops.get(("train", role), 0.0),
        forwards_of_updates=trained * full_row_work(recipe, role, shape).top,
        mlp_frac=mlp / (mlp + attention),
        rows_passed=sum(use.rows * (1 + use.model.with_reference) for use in forwards),
        rows_trained=trained,
        parameters=part.parameters or 0,
        trained_parameters=part.trained_parameters or 0,
    )


def role_seconds(recipe: Recipe, role: str, shape: ModelShape, work: RoleWork) -> StepSeconds:
    """Return the seconds of a trained role in a step, without decoding and offload."""
    table, layout = recipe.trained[role], layouts(recipe)[role]
    rate = GPU_FLOPS * GPU_UTILISATION * layout.world_size
    minibatch, updates = sizes.minibatch_seqs(recipe, role), sizes.updates_per_step(recipe, role)
    longest, weight = sizes.longest_sequence(recipe), model_of(recipe, role).weight_bytes
    in_minibatch = microbatches(recipe, role, longest)[1]
    key, most = sizes.microbatch_limit(table.batching, with_gradient=False)
    rows = ceil(work.rows_passed / layout.data)
    in_passes = ceil(rows / max(1, most // longest if "tokens" in key else most))
    # The data rank with the most rows of a minibatch decides; pipeline ranks wait at both ends of a minibatch.
    uneven = ceil(minibatch / layout.data) * layout.data / minibatch
    idle = (layout.pipeline - 1) / layout.stages_per_rank
    wait, wait_passes = 1 + idle / in_minibatch, 1 + idle / max(1, in_passes)
    again = {"none": 0.0, "selective": work.mlp_frac * MLP_RECOMPUTED, "full": 1.0}[table.recompute]
    weights = work.parameters * weight / layout.model_ranks
    gradients = work.trained_parameters * 4 / layout.model_ranks
    read = updates * in_minibatch * (weights * (2 + again) + 2 * gradients) + in_passes * weights
    read += _output_layer_reads(recipe, role, shape, work) * weight
    return StepSeconds(
        passes=work.passes / rate * wait_passes,
        updates=work.updates / rate * uneven * wait,
        recomputation=work.forwards_of_updates * again / rate * uneven * wait,
        microbatches=read / GPU_MEMORY_BYTES_S,
        communication=_communication(recipe, role, shape, work, again),
        optimizer=updates * optimizer_seconds(work.trained_parameters, layout, weight, table.optimizer.on),
    )


def optimizer_seconds(trained: int, layout: ParallelTable, weight: int, on: str) -> float:
    """Return the seconds of one optimizer step of `trained` parameters. AdamW reads and writes a main weight and two
    moments of 4 bytes, reads a gradient of 4 bytes and writes a weight of `weight` bytes. On the CPU, gradients and
    weights are moved between GPU and host, and the ranks of a node share its memory."""
    copies = layout.data * layout.context if layout.distributed_optimizer else 1
    mine = trained / (layout.model_ranks * copies)
    moved, computed = mine * (4 + weight), mine * (2 * 12 + 4 + weight)
    if on == "device":
        return computed / GPU_MEMORY_BYTES_S
    return moved / GPU_HOST_BYTES_S + computed * min(layout.world_size, GPUS_PER_NODE) / HOST_MEMORY_BYTES_S


def sequences_at_once(sequences: int, table: GeneratorTable, engine: GeneratorBytes) -> int:
    """Return the number of sequences of full length that an engine decodes at the same time."""
    most = ceil(table.max_concurrent_seqs / table.engines_per_gpu)
    return max(1, min(ceil(sequences / engine_count(table)), most, engine.full_sequences))


def decode_seconds(
    batch: StepBatch, shape: ModelShape, table: GeneratorTable, engine: GeneratorBytes, sequences: int
) -> float:
    """Return the seconds in which engines decode the responses of a step. Sequences are decoded in waves of as many
    as the KV cache holds."""
    together, tensor = sequences_at_once(sequences, table, engine), table.tensor
    tokens = ceil(ceil(sequences / engine_count(table)) / together) * batch.response_tokens
    window = engine.sequence_bytes / (batch.prompt_tokens + batch.response_tokens)
    cache = together * (batch.prompt_tokens + batch.response_tokens / 2) * window
    each = table.engines_per_gpu * (engine.weights + cache) / (GPU_MEMORY_BYTES_S * DECODE_UTILISATION)
    if tensor > 1:  # two all-reduces in each layer, of a hidden state in two bytes
        sent = 2 * together * shape.hidden_size * 2 * (tensor - 1) / tensor
        each += 2 * shape.num_layers * (ALL_REDUCE_S + sent / _link(tensor))
    if table.compile is False:
        each += shape.num_layers * EAGER_LAYER_S
    return tokens * each


def offload_seconds(moved: int) -> float:
    """Return the seconds of moving these bytes of a GPU to the host and back."""
    return 2 * moved / GPU_HOST_BYTES_S


def _communication(recipe: Recipe, role: str, shape: ModelShape, work: RoleWork, again: float) -> float:
    """Return the seconds of communication: two all-reduces of hidden states in each layer and pass over tensor ranks,
    keys and values over context ranks, and float32 gradients over data ranks (a distributed optimizer gathers weights
    instead of reducing a second time)."""
    layout, weight = layouts(recipe)[role], model_of(recipe, role).weight_bytes
    longest, link = sizes.longest_sequence(recipe), _link(layout.world_size)
    share = longest / (layout.data * layout.context)
    forward = work.rows_passed * share + work.rows_trained * share * (2 + again)
    layers = shape.num_layers / layout.pipeline
    reduced = 2 * 2 * shape.hidden_size * weight * (layout.tensor - 1) / layout.tensor
    gathered = 2 * shape.key_channels / layout.tensor * weight * (layout.context - 1)
    copies = layout.data * layout.context
    per_parameter = 4 + (weight if layout.distributed_optimizer else 4)
    sent = work.trained_parameters / layout.model_ranks * per_parameter * (copies - 1) / copies
    of_updates = sizes.updates_per_step(recipe, role) * sent / link
    return forward * layers * (reduced / _link(layout.tensor) + gathered / link) + of_updates


def _output_layer_reads(recipe: Recipe, role: str, shape: ModelShape, work: RoleWork) -> float:
    """Return how many numbers of the output layer a rank reads in a step: all of them once per chunk of logits, and
    twice more in a backward pass."""
    if head_of(role) != "token":
        return 0.0
    layout, chunk = layouts(recipe)[role], recipe.trained[role].batching.logits_chunk_tokens
    chunks = (work.rows_passed + 3 * work.rows_trained) / layout.data * sizes.longest_sequence(recipe) / chunk
    return chunks / layout.context * shape.padded_vocab_size * shape.hidden_size / layout.tensor


def _link(ranks: int) -> float:
    return GPU_LINK_BYTES_S if ranks <= GPUS_PER_NODE else GPU_NIC_BYTES_S


class StepTimes:
    """Estimated times of a recipe for different settings of each role."""

    def __init__(self, recipe: Recipe, shapes: Mapping[str, ModelShape]) -> None:
        self._recipe, self._shapes = recipe, shapes
        self._work: dict[tuple[str, TrainedPartTable], RoleWork] = {}
        self._roles: dict[tuple[str, RoleChoice], StepSeconds] = {}
        self._batch = batch_of(recipe)
        work = step_work(trace_at(recipe, recipe.steps), recipe)
        self.sequences = sum(use.rows for use in uses_of(work, recipe) if use.model.kind == "generate")
        """Number of sequences that engines generate in a step."""

    def role(self, role: str, choice: RoleChoice) -> StepSeconds:
        """Return the seconds of a trained role in a step, without decoding and offload."""
        if (found := self._roles.get((role, choice))) is None:
            recipe = settled(self._recipe, candidate_of(self._recipe).with_role(role, choice))
            if (role, choice.train) not in self._work:
                self._work[role, choice.train] = role_work(recipe, role, self._shapes)
            work = self._work[role, choice.train]
            found = self._roles[role, choice] = role_seconds(recipe, role, self._shapes[role], work)
        return found

    def decoding(self, table: GeneratorTable, engine: GeneratorBytes) -> StepSeconds:
        """Return the seconds in which engines decode."""
        seconds = decode_seconds(self._batch, self._shapes[POLICY], table, engine, self.sequences)
        return StepSeconds(decoding=seconds, overlaps=self._recipe.rollout.ahead > 0)
