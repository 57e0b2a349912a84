"""Comparison of what transformers and Megatron compute for the same prompts, in float32. It finds a table that is
wrong both ways."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ppoctl.batch.sequences import Sequences
from ppoctl.convert.hugging_face import Weights
from ppoctl.convert.tensors import VALUE_HEAD, Role
from ppoctl.convert.transformers_model import TransformersModel
from ppoctl.convert.verify import Check, failed
from ppoctl.engines.megatron.checkpoint_scoring import CheckpointScorer
from ppoctl.errors import OutOfMemoryError
from ppoctl.model.shape import ModelShape

SHARE = 1e-4
"""Largest gap allowed, as a share of the largest number expected (or of 1, where all are smaller)."""
LENGTHS = (64, 33, 17, 2)
"""Tokens of each prompt, cut to the model's positions."""
_HEADROOM = 1.3
"""Memory of the comparison as a multiple of the float32 weights: activations and logits of a few hundred tokens."""


@dataclass(frozen=True)
class ModelPair:
    """One model in both formats."""

    hugging_face: Path
    megatron: Path
    shape: ModelShape
    role: Role
    rounded_to: torch.dtype | None
    """Dtype that both are rounded to before they are compared: what was cast is not expected back."""


def require_memory(weights: Weights) -> None:
    """Raise OutOfMemoryError unless the whole model fits in float32: both sides hold it, one after the other."""
    needed = int(sum(torch.Size(spec.shape).numel() for spec in weights.specs.values()) * 4 * _HEADROOM)
    free = psutil.virtual_memory().available
    if needed > free:
        gib = 2**30
        raise OutOfMemoryError(
            f"comparing what the models compute takes {needed / gib:.3g} GiB, {free / gib:.3g} GiB are free",
            hint="convert where there is more, or compare weights only: --no-parity",
        )


def check_parity(pair: ModelPair, weights: Weights) -> list[Check]:
    """Compare log-probs and entropies of an actor, values of a critic. Raises ConversionError when they differ."""
    sequences = fixed_prompts(pair.shape)
    heads = dict(_heads(weights)) if pair.role == "critic" else {}
    theirs = TransformersModel(pair.hugging_face, pair.shape, pair.role, pair.rounded_to)
    if pair.role == "critic":
        wanted = {name: theirs.values(sequences, head) for name, head in heads.items()}
    else:
        wanted = dict(zip(("log-probs", "entropies"), theirs.score(sequences), strict=True))
    del theirs
    ours = CheckpointScorer(pair.megatron, pair.shape, pair.role, pair.rounded_to)
    found = {}
    for name, head in heads.items():
        ours.use_head(head)
        found[name] = ours.score(sequences).primary
    if pair.role == "actor":
        scored = ours.score(sequences)
        assert scored.entropy is not None
        found = {"log-probs": scored.primary, "entropies": scored.entropy}
    return [_compared(name, found[name], wanted[name], sequences, pair) for name in wanted]


def fixed_prompts(shape: ModelShape) -> Sequences:
    """Fixed token ids for every model of this vocabulary: one token as the prompt, the rest as the response."""
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
    """Value heads to compare: one that reads all of what lies below it, and the model's own where that is not
    zero."""
    shape = weights.specs[VALUE_HEAD].shape
    yield "values under a probe", torch.randn(shape, generator=torch.Generator().manual_seed(21))
    own = weights.tensor(VALUE_HEAD).float()
    if own.any():
        yield "values", own


def _compared(name: str, found: Tensor, wanted: Tensor, sequences: Sequences, pair: ModelPair) -> Check:
    found, wanted = found[sequences.present].double(), wanted[sequences.present].double()
    gap = float((found - wanted).abs().max())
    allowed = SHARE * max(1.0, float(wanted.abs().max()))
    if not gap <= allowed:  # not a number is no agreement either
        raise failed(
            f"{name} of fixed prompts differ by {gap:.3g} (allowed {allowed:.2g}) between transformers on "
            f"`{pair.hugging_face}` and Megatron on `{pair.megatron}`, although every tensor is the same: what "
            f"family `{pair.shape.family}` computes, or its table, is wrong"
        )
    return Check(name, len(found), "transformers and Megatron in float32", gap, allowed)
