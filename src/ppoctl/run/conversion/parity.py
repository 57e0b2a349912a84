"""Comparison of the outputs of transformers and Megatron for the same prompts, in float32. It detects errors of the
mapping that cancel in a round trip."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.errors import OutOfMemoryError
from ppoctl.engines.megatron.checkpoint_scoring import CheckpointScorer
from ppoctl.models.convert.hugging_face import Weights
from ppoctl.models.convert.tensors import VALUE_HEAD
from ppoctl.models.convert.transformers_model import TransformersModel
from ppoctl.models.convert.verify import Check, failed
from ppoctl.models.head import Head
from ppoctl.models.shape import ModelShape

SHARE = 1e-4
"""Largest allowed difference, as a fraction of the largest expected number (or of 1, if all are smaller)."""
LENGTHS = (64, 33, 17, 2)
"""Number of tokens of each prompt, at most the number of the model's positions."""
_HEADROOM = 1.3
"""Memory of the comparison as a multiple of the float32 weights: activations and logits of a few hundred tokens."""


@dataclass(frozen=True)
class ModelPair:
    """One model in both formats."""

    hugging_face: Path
    megatron: Path
    shape: ModelShape
    head: Head
    rounded_to: torch.dtype | None
    """Dtype to which both models are rounded before the comparison, because a cast cannot be undone; None: not
    rounded."""
    like: Path | None = None
    """Folder of the model that completes the Megatron folder; None: at the path in `frozen.json`."""


def require_memory(weights: Weights) -> None:
    """Raise OutOfMemoryError unless the whole model fits in memory in float32: each side loads it, one after the
    other."""
    needed = int(sum(torch.Size(spec.shape).numel() for spec in weights.specs.values()) * 4 * _HEADROOM)
    free = psutil.virtual_memory().available
    if needed > free:
        gib = 2**30
        raise OutOfMemoryError(
            f"comparing model outputs needs {needed / gib:.3g} GiB of memory, but {free / gib:.3g} GiB are free",
            hint="convert on a machine with more memory, or compare only weights: --no-parity",
        )


def check_parity(pair: ModelPair, weights: Weights) -> list[Check]:
    """Compare log-probs and entropies, or the values of a value head. Raises ConversionError if they differ."""
    sequences = fixed_prompts(pair.shape)
    heads = dict(_heads(weights)) if pair.head == "value" else {}
    theirs = TransformersModel(pair.hugging_face, pair.shape, pair.head, pair.rounded_to)
    if pair.head == "value":
        expected = {name: theirs.values(sequences, head) for name, head in heads.items()}
    else:
        expected = dict(zip(("log-probs", "entropies"), theirs.score(sequences), strict=True))
    # Both models together may not fit into memory: `require_memory` counts one.
    del theirs
    ours = CheckpointScorer(pair.megatron, pair.shape, pair.head, pair.rounded_to, pair.like)
    actual = {}
    for name, head in heads.items():
        ours.use_head(head)
        actual[name] = ours.score(sequences).primary
    if pair.head == "token":
        scored = ours.score(sequences)
        assert scored.entropy is not None
        actual = {"log-probs": scored.primary, "entropies": scored.entropy}
    return [_compared(name, actual[name], expected[name], sequences, pair) for name in expected]


def fixed_prompts(shape: ModelShape) -> Sequences:
    """Return the same token ids for every model with this vocabulary size: one prompt token, the rest as the
    response."""
    lengths = torch.tensor([min(length, shape.max_positions) - 1 for length in LENGTHS])
    generator = torch.Generator().manual_seed(20)
    rows, columns = len(lengths), int(lengths.max())
    present = torch.arange(columns)[None] < lengths[:, None]
    return Sequences(
        prompt_tokens=torch.randint(shape.vocab_size, (rows,), generator=generator).int(),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        tokens=(torch.randint(shape.vocab_size, (rows, columns), generator=generator) * present).int(),
        lengths=lengths,
    )


def _heads(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield the value heads to compare: a random head, which depends on all hidden channels, and the model's own head
    unless it is zero."""
    shape = weights.specs[VALUE_HEAD].shape
    yield "values under a probe", torch.randn(shape, generator=torch.Generator().manual_seed(21))
    own = weights.tensor(VALUE_HEAD).float()
    if own.any():
        yield "values", own


def _compared(name: str, actual: Tensor, expected: Tensor, sequences: Sequences, pair: ModelPair) -> Check:
    actual, expected = actual[sequences.present].double(), expected[sequences.present].double()
    gap = float((actual - expected).abs().max())
    allowed = SHARE * max(1.0, float(expected.abs().max()))
    if not gap <= allowed:  # also true for NaN
        raise failed(
            f"{name} of fixed prompts differ by {gap:.3g} (allowed {allowed:.2g}) between transformers on "
            f"`{pair.hugging_face}` and Megatron on `{pair.megatron}`, although all tensors are equal: the model "
            f"code or the table of family `{pair.shape.family}` is wrong"
        )
    return Check(name, len(actual), "transformers and Megatron in float32", gap, allowed)
