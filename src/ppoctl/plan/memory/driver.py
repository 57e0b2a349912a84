"""Bytes of the driver, the process that runs the loop: it holds all rollouts of a step, commits them, and hands them
to ranks.

Letters: B sequences, R response positions of the longest response. Grids are [B, R] whatever the lengths.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from ppoctl.plan.memory.assumptions import TEXT_BYTES_PER_TOKEN
from ppoctl.recipe.parallel import OBJECT_STORE_BYTES
from ppoctl.recipe.schema import KlInLoss, NoKl, Recipe
from ppoctl.recipe.sizes import sequences_per_step

SAMPLE_TOKEN_BYTES = 8 + 32 + 8 + 24
"""Bytes of one drawn token as Python objects: an id (a pointer, an int) and a log-prob (a pointer, a float)."""
ID_BYTES = 4
OBJECTIVE_CELL_BYTES = {"actor": 4 + 4 + 1, "critic": 4 + 4 + 1}
"""Bytes per cell of the grids that travel with an update: old log-probs and advantages, or old values and returns;
the mask."""
REFERENCE_CELL_BYTES = 4


@dataclass(frozen=True)
class StepBatch:
    """The sequences of one PPO step, all of full length."""

    sequences: int
    prompt_tokens: int
    """Tokens of one prompt."""
    response_tokens: int
    """Tokens of one response, R."""
    has_reference: bool
    reference_in_loss: bool

    @property
    def cells(self) -> int:
        """Cells of a response grid."""
        return self.sequences * self.response_tokens


@dataclass(frozen=True)
class DriverBytes:
    """Bytes that the driver holds at one time: samples while they are drawn, later all records."""

    samples: int
    """Python objects of the samples of a step, until they are a record."""
    records: int
    """All records of a step, each twice: tensors, and the bytes that were committed, which a record keeps."""

    @property
    def peak(self) -> int:
        return max(self.samples, self.records)


def batch_of(recipe: Recipe, *, sequences: int | None = None) -> StepBatch:
    """The sequences of a step; `sequences` replaces their number."""
    rollout, kl = recipe.rollout, recipe.ppo.kl
    return StepBatch(
        sequences=sequences or sequences_per_step(recipe),
        prompt_tokens=rollout.max_prompt_tokens,
        response_tokens=rollout.max_new_tokens,
        has_reference=not isinstance(kl, NoKl),
        reference_in_loss=isinstance(kl, KlInLoss),
    )


def records_of(batch: StepBatch) -> dict[str, int]:
    """Bytes that a step writes into the run directory, by stage, but for two small records of updates. Each record is
    one file."""
    rows, cells = batch.sequences, batch.cells
    mask, number = 1, 4
    texts = rows * batch.response_tokens * TEXT_BYTES_PER_TOKEN
    return {
        "rollout": sequences_bytes(batch) + cells * (mask + number) + rows * 2 * 8 + texts,
        "reward": rows * (2 * number + 8),
        "values": cells * number,
        "logprobs": cells * (2 + batch.has_reference) * number,
        "advantages": cells * (3 * number + mask),
    }


def driver_bytes(batch: StepBatch) -> DriverBytes:
    """Bytes that the driver holds during one step."""
    records = records_of(batch)
    samples = batch.cells * SAMPLE_TOKEN_BYTES + batch.cells * TEXT_BYTES_PER_TOKEN
    # The record is made while the samples are still there.
    return DriverBytes(samples + records["rollout"], 2 * sum(records.values()))


def sequences_bytes(batch: StepBatch) -> int:
    """Bytes of a step's token ids, with two lengths for each row: what all processes of trained roles read once."""
    return batch.cells * ID_BYTES + batch.sequences * (ID_BYTES * batch.prompt_tokens + 2 * 8)


def update_input_bytes(batch: StepBatch, role: str) -> int:
    """Bytes that every process of a role reads for an update: the sequences, and the grids of the loss."""
    cell = OBJECTIVE_CELL_BYTES[role]
    if role == "actor" and batch.reference_in_loss:
        cell += REFERENCE_CELL_BYTES
    return sequences_bytes(batch) + batch.cells * cell


def object_store_bytes(recipe: Recipe) -> int:
    """Bytes of the object store of a Ray of the run's own: twice the largest call, as the next one is put in while
    the last one is still read, and two buckets of weights where they go through it. It is at most half of the shared
    memory that this machine has free; Ray spills the rest to disk."""
    batch, cluster = batch_of(recipe), recipe.cluster
    calls = max(update_input_bytes(batch, role) for role in OBJECTIVE_CELL_BYTES)
    needed = 2 * calls + (2 * cluster.weights_bucket_mib * 2**20 if cluster.weights == "store" else 0)
    return max(OBJECT_STORE_BYTES, min(needed, free_shared_memory() // 2))


def free_shared_memory(folder: Path = Path("/dev/shm")) -> int:
    """Bytes of shared memory that may still be taken on this machine."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
