"""Accounting of a checkpoint's tensors by name, shape and dtype: each is part of the model, left out for a known
reason, or rejected.

Imports no torch. Checks that need the values of tensors are recorded in `Account` for the code that reads the
tensors.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.models.convert.headers import TRAINABLE
from ppoctl.models.convert.tensors import EMBEDDING, LM_HEAD, ROPE_CONSTANTS, VALUE_HEAD, Placement, placements
from ppoctl.models.head import Head
from ppoctl.models.labels import has_head
from ppoctl.models.shape import ModelShape

VALUE_BIAS = "score.bias"
"""Bias of the head of a ...ForTokenClassification; the critic's head has none."""


class Described(Protocol):
    """A tensor of which only name, shape and dtype are known."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def kind(self) -> str:
        """Name of the dtype in a safetensors header."""
        ...


@dataclass
class Account:
    """Result of accounting for the tensors of a checkpoint."""

    parts: list[Placement] = field(default_factory=list)
    """Placements of the model's tensors, in layer order."""
    made_up: bool = False
    """Whether the checkpoint has no value head, so that the head starts at zero."""
    notes: list[str] = field(default_factory=list)
    """Notes for users about tensors that are left out or created as zeros."""
    must_be_tied: bool = False
    """Whether the output layer must be equal to the embedding."""
    must_be_zero: tuple[str, ...] = ()
    """Names of tensors that must be all zero, and so have no effect; otherwise they do not belong to the model."""


def account(found: Mapping[str, Described], folder: Path, shape: ModelShape, head: Head) -> Account:
    """Account for every tensor of a checkpoint. Raises EnvironmentProblemError that names the first tensor that is
    missing, unexpected, of another shape, or quantized."""
    result = Account(list(placements(shape, head)))
    missing = [part.name for part in result.parts if part.name not in found]
    if VALUE_HEAD in missing and not has_head(folder):
        missing.remove(VALUE_HEAD)
        result.made_up = True
        result.notes.append(f"`{VALUE_HEAD}` is not in `{folder}`: the value head is zero")
    for part in result.parts:
        if part.name in found:
            _require_fitting(part, found[part.name], folder)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = "fetch the model again" if missing != [LM_HEAD] else "a critic has none: add --role critic"
        raise EnvironmentProblemError(f"tensor `{missing[0]}`{more} missing from `{folder}`", hint=hint)
    others = sorted(found.keys() - {part.name for part in result.parts})
    constants = [name for name in others if name.endswith(ROPE_CONSTANTS)]
    if constants:
        more = f" and {len(constants) - 1} more" if len(constants) > 1 else ""
        result.notes.append(f"`{constants[0]}`{more} left out: computed from config.json")
    _leave_out(result, (name for name in others if name not in constants), folder, shape, head)
    return result


def not_part_of(name: str, folder: Path, head: Head) -> EnvironmentProblemError:
    """Return the error for a tensor that belongs to another model or another head."""
    model, hint = "the critic", "name the configuration of this checkpoint, or another role"
    if head == "token":
        model = "the actor"
        hint = "it is a critic's: add --role critic" if name in (VALUE_HEAD, VALUE_BIAS) else hint
    return EnvironmentProblemError(f"tensor `{name}` in `{folder}` is not part of {model}", hint=hint)


def not_tied(folder: Path) -> EnvironmentProblemError:
    """Return the error for an output layer that differs from the embedding although the configuration ties them."""
    return EnvironmentProblemError(
        f"`{LM_HEAD}` in `{folder}` differs from `{EMBEDDING}`, although config.json ties them",
        hint='if the output layer is separate, write `"tie_word_embeddings": false` into config.json',
    )


def _leave_out(result: Account, names: Iterable[str], folder: Path, shape: ModelShape, head: Head) -> None:
    for name in names:
        if name == LM_HEAD and head == "value":
            result.notes.append(f"`{name}` is left out: a critic has a value head instead")
        elif name == LM_HEAD and shape.tied_embeddings:
            result.must_be_tied = True
            result.notes.append(f"`{name}` is left out: it is equal to `{EMBEDDING}`")
        elif name == VALUE_BIAS and head == "value":
            result.must_be_zero = (name,)
            result.notes.append(f"`{name}` is left out: it is zero")
        else:
            raise not_part_of(name, folder, head)


def _require_fitting(part: Placement, tensor: Described, folder: Path) -> None:
    if tensor.shape != part.shape:
        mismatch = f"has shape {list(tensor.shape)}; config.json implies {list(part.shape)}"
        raise EnvironmentProblemError(
            f"tensor `{part.name}` in `{folder}` {mismatch}", hint="fetch weights and config.json of one model again"
        )
    if tensor.kind not in TRAINABLE:
        raise EnvironmentProblemError(
            f"tensor `{part.name}` in `{folder}` is {tensor.kind}; quantized models cannot be trained",
            hint="name the model before quantization",
        )
