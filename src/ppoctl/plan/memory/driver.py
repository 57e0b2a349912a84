"""Bytes of the driver, the process that runs the steps. The driver holds the rollouts of a step, commits them, and
sends them to ranks.

Letters: B sequences, R tokens of the longest response. Grids have the shape [B, R] for all response lengths.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ppoctl.algorithms.kl_use import kl_use
from ppoctl.algorithms.role_model import model_of
from ppoctl.algorithms.roles import POLICY, head_of
from ppoctl.algorithms.sizes import response_tokens, trained_sequences
from ppoctl.algorithms.trace import Trace
from ppoctl.core.batch.fields import RecordField
from ppoctl.models.head import Head
from ppoctl.plan.memory.assumptions import TEXT_BYTES_PER_TOKEN
from ppoctl.plan.shared_sizes import stage_rows
from ppoctl.recipe.parallel import OBJECT_STORE_BYTES
from ppoctl.recipe.schema import Recipe

SAMPLE_TOKEN_BYTES = 8 + 32 + 8 + 24
"""Bytes of one response token as Python objects: an id (pointer, int) and a log-prob (pointer, float)."""
ID_BYTES = 4
EXPERT_BYTES = 2
"""Bytes of the number of an expert that a process receives."""
ELEMENT_BYTES = {"bool": 1, "uint8": 1, "int32": 4, "int64": 8, "float32": 4}
"""Dtype of a tensor -> bytes of an element."""
OBJECTIVE_CELL_BYTES: Mapping[Head, int] = {"token": 4 + 4 + 1, "value": 4 + 4 + 1}
"""Head of the trained model -> bytes per cell of the grids that are sent with an update. The grids are old log-probs
and advantages for a token head, old values and returns for a value head, and the mask for both."""
REFERENCE_CELL_BYTES = 4
VALUE_HEAD_CELL_BYTES = 4 + 4
"""Bytes per cell of the old values and the returns, which the update of a policy with a value head receives too."""


@dataclass(frozen=True)
class StepBatch:
    """Sequences that models of one PPO step receive together. All sequences are assumed to have full length."""

    sequences: int
    prompt_tokens: int
    """Tokens of one prompt."""
    response_tokens: int
    """Tokens of one response, R."""
    has_reference: bool
    reference_in_loss: bool
    """Whether the update of the policy receives the log-probs of the reference."""
    has_value_head: bool = False
    """Whether the policy's model has a value head."""
    token_experts: int = 0
    """Experts of one token in all layers, if records store them."""

    @property
    def cells(self) -> int:
        """Cells of a response grid."""
        return self.sequences * self.response_tokens

    @property
    def input_tokens(self) -> int:
        """Tokens that a model reads."""
        return self.sequences * (self.prompt_tokens + self.response_tokens - 1)


@dataclass(frozen=True)
class DriverBytes:
    """Bytes that the driver holds at one time: samples during generation, later all records."""

    samples: int
    """Python objects of the samples of a step, with the rollout record that is made from them."""
    records: int
    """All records of a step. Each record exists twice: as tensors, and as committed bytes, which the record keeps."""

    @property
    def peak(self) -> int:
        return max(self.samples, self.records)


def batch_of(recipe: Recipe, *, sequences: int | None = None) -> StepBatch:
    """Return the sequences of a step. `sequences` replaces the number from the recipe: the most that a role trains
    on."""
    rollout, use, shape = recipe.rollout, kl_use(recipe), model_of(recipe, POLICY).shape
    experts = None if shape is None or recipe.actor.router_replay == "off" else shape.experts
    return StepBatch(
        sequences=sequences or max(trained_sequences(recipe, role) for role in recipe.trained),
        prompt_tokens=rollout.max_prompt_tokens,
        response_tokens=response_tokens(recipe),
        has_reference=use.is_on,
        reference_in_loss=use.is_read_by_update,
        has_value_head=recipe.value_head is not None,
        token_experts=0 if experts is None else sum(experts.layers) * experts.per_token,
    )


def records_of(traced: Trace, recipe: Recipe, batch: StepBatch, *, most: bool = True) -> dict[str, int]:
    """Return stage -> bytes of the records that the stage writes into the run directory in one step, in all rounds:
    the most or, if `most` is false, the least. `batch` is that of the recipe, or one of more or fewer sequences.

    Each record is one file. The small records of the updates are left out.
    """
    rows, usual = stage_rows(traced, recipe, most=most), batch_of(recipe).sequences
    batches = {name: replace(batch, sequences=each.rows * batch.sequences // usual) for name, each in rows.items()}
    return {
        call.stage.name: rows[call.stage.name].rounds
        * record_bytes(call.stage.record(recipe), batches[call.stage.name])
        for call in traced.calls
        if call.entry.trains is None
    }


def record_bytes(fields: Iterable[RecordField], batch: StepBatch) -> int:
    """Return the bytes of a record with these fields, if all sequences have full length.

    A field `text` has one decoded response per row, counted as `TEXT_BYTES_PER_TOKEN` for each token; so has the
    field `episodes`. Other JSON values (ids, stamps, sums) count as 0: they are small next to the grids. Raises
    KeyError for other dtypes or axes.
    """
    elements = {
        "": 1,
        "B": batch.sequences,
        "B R": batch.cells,
        "T": batch.sequences * batch.prompt_tokens,
        "N E": batch.input_tokens * batch.token_experts,
    }
    total = 0
    for field in fields:
        if field.dtype == "text" or field.name == "episodes":
            total += batch.cells * TEXT_BYTES_PER_TOKEN
        elif field.dtype != "json":
            total += elements[field.axes] * ELEMENT_BYTES[field.dtype]
    return total


def driver_bytes(batch: StepBatch, records: Mapping[str, int]) -> DriverBytes:
    """Return the bytes that the driver holds during one step with these bytes of records by stage. `batch` has the
    sequences of one round."""
    samples = batch.cells * SAMPLE_TOKEN_BYTES + batch.cells * TEXT_BYTES_PER_TOKEN
    # The rollout record is created while the samples are still in memory.
    return DriverBytes(samples + next(iter(records.values())), 2 * sum(records.values()))


def sequences_bytes(batch: StepBatch) -> int:
    """Return the bytes of the token ids of a step, with two lengths per row. A process receives them once."""
    return batch.cells * ID_BYTES + batch.sequences * (ID_BYTES * batch.prompt_tokens + 2 * 8)


def update_input_bytes(batch: StepBatch, head: Head) -> int:
    """Return the bytes that each process of a role receives for an update: the sequences, the loss grids, and the
    experts of the policy's tokens if they are given.

    `head` is the head of the role's model.
    """
    cell = OBJECTIVE_CELL_BYTES[head]
    if head == "token" and batch.reference_in_loss:
        cell += REFERENCE_CELL_BYTES
    if head == "token" and batch.has_value_head:
        cell += VALUE_HEAD_CELL_BYTES
    experts = batch.input_tokens * batch.token_experts * EXPERT_BYTES if head == "token" else 0
    return sequences_bytes(batch) + batch.cells * cell + experts


def object_store_bytes(recipe: Recipe, shared_bytes: int | None = None) -> int:
    """Return the bytes of the object store of a Ray instance that the run starts.

    The store has space for twice the largest call, because the next call is stored while the last call is still read.
    If `cluster.weights` is `"store"`, the store also has space for two buckets of weights. The store takes at most
    half of the free shared memory (`shared_bytes`; None: that of this machine); Ray spills the rest to disk.
    """
    batch, cluster = batch_of(recipe), recipe.cluster
    calls = max(update_input_bytes(batch, head_of(role)) for role in recipe.trained)
    needed = 2 * calls + (2 * cluster.weights_bucket_mib * 2**20 if cluster.weights == "store" else 0)
    free = free_shared_memory() if shared_bytes is None else shared_bytes
    return max(OBJECT_STORE_BYTES, min(needed, free // 2))


def free_shared_memory(folder: Path = Path("/dev/shm")) -> int:
    """Return the free bytes of shared memory on this machine; 0: there is no shared memory."""
    try:
        stats = os.statvfs(folder)
    except OSError:
        return 0
    return stats.f_bavail * stats.f_frsize
