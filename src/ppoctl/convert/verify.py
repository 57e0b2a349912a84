"""Checks of a written checkpoint, read again from disk and held against its source, tensor by tensor.

    names, shapes, dtypes      the same on both sides
    digests                    SHA-256 of every tensor's bytes, on both sides under Hugging Face names
    round trip                 Megatron's parameters made again from what was written, against the source's
    padding                    the vocabulary's: zero where it was written; where it was read, left out
    record of the source       where a conversion made it: every tensor as that left it
    configuration              describes the same model

The table that converts also says how to go back, so a wrong table passes all of these: what the model computes (see
`conversion`) is the check of the table.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppoctl.convert.hugging_face import Spec, Weights
from ppoctl.convert.parameters import MegatronWeights, assembled
from ppoctl.errors import ConversionError, EnvironmentProblemError, RecipeError, StorageError, quoted
from ppoctl.model.shape import ModelShape
from ppoctl.model.shape_reader import read_shape


@dataclass(frozen=True)
class Check:
    """One check that passed."""

    name: str
    count: int
    """Number of things compared."""
    says: str = ""
    largest_gap: float | None = None
    """Largest difference, where numbers need not be equal."""
    allowed: float | None = None


@contextmanager
def naming_the_output() -> Iterator[None]:
    """Context in which an error of reading what was just written is a failed check, not a bad source."""
    try:
        yield
    except (EnvironmentProblemError, RecipeError, StorageError) as error:
        raise failed(error.message) from error


def failed(what: str) -> ConversionError:
    """The error of a check that did not hold."""
    return ConversionError(
        f"verification failed: {what}",
        hint="nothing was left at the destination; try again, and if it fails again, report it with this line",
    )


def check_tensors(source: Weights, written: Weights) -> tuple[list[Check], dict[str, dict[str, Any]]]:
    """Compare names, shapes, dtypes and digests; returns the checks and the digests. Raises ConversionError naming
    the tensor that differs."""
    for name in [*source.specs, *written.specs]:
        if name not in written.specs:
            raise failed(f"tensor `{name}` was not written")
        if name not in source.specs:
            raise failed(f"tensor `{name}` was written and is not the model's")
        _require_same_spec(name, source.specs[name], written.specs[name])
    digests: dict[str, dict[str, Any]] = {}
    for name, spec in source.specs.items():
        wanted, found = digest(source.tensor(name)), digest(written.tensor(name))
        if wanted != found:
            raise failed(f"tensor `{name}` is not what it was made from (SHA-256 {found[:12]}, not {wanted[:12]})")
        shape, dtype = list(spec.shape), str(spec.dtype).removeprefix("torch.")
        digests[name] = {"sha256": wanted, "shape": shape, "dtype": dtype}
    count = len(digests)
    return [Check("names, shapes, dtypes", count), Check("digests", count, "bit for bit")], digests


def check_record(report: Path, digests: dict[str, dict[str, Any]]) -> Check:
    """Compare the source with the record of the conversion that made it: its weight files have no checksums of their
    own. Raises ConversionError naming the tensor that has changed since."""
    try:
        recorded = json.loads(report.read_text("utf-8"))["tensors"]
    except (ValueError, KeyError, TypeError) as error:
        says = f"`{report}` is no record of a conversion: {error}"
        raise ConversionError(says, hint=f"rm {quoted(report)}") from error
    for name, entry in recorded.items():
        if digests.get(name) != entry:
            raise ConversionError(
                f"tensor `{name}` of `{report.parent}` is not the one that `{report.name}` beside it records",
                hint=f"it was changed or damaged: make it again; if it was meant to change, remove {report}",
            )
    return Check("record of the source", len(recorded))


def check_round_trip(source: MegatronWeights, written: Weights, shape: ModelShape) -> Check:
    """Compare parameters after Megatron -> Hugging Face -> Megatron. Raises ConversionError naming the one that
    differs."""
    for parameter in source.parameters:
        again = assembled(parameter, written, shape)
        found, dtype = digest(again[: parameter.rows]), again.dtype
        del again  # the largest tensors are not held twice
        if found != digest(source.parameter(parameter)[: parameter.rows].to(dtype)):
            raise failed(f"Megatron's `{parameter.name}` does not come back from what was written")
    return Check("round trip", len(source.parameters), "Megatron's parameters made again, bit for bit")


def check_padding(weights: MegatronWeights, *, is_written: bool) -> Check:
    """Look at the rows of the vocabulary's padding. Raises ConversionError when a written one is not zero."""
    rows = used = 0
    for parameter in weights.parameters:
        if padding := parameter.shape[0] - parameter.rows:
            rows += padding
            used += int(weights.parameter(parameter)[parameter.rows :].any(dim=1).sum())
            if used and is_written:
                raise failed(f"padding rows of Megatron's `{parameter.name}` are not zero")
    if not rows:
        return Check("padding rows", 0, "there are none")
    if is_written:
        return Check("padding rows", rows, "zero")
    return Check("padding rows", rows, f"left out; {used} were not zero" if used else "left out; all zero")


def check_configuration(folder: Path, shape: ModelShape) -> Check:
    """Compare the model that the written configuration describes. Raises ConversionError naming what differs."""
    wanted, found = asdict(shape), asdict(read_shape(folder))
    for name, value in wanted.items():
        if found[name] != value:
            raise failed(f"`{name}` of the written config.json is `{found[name]}`, the source's `{value}`")
    return Check("configuration", len(wanted))


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes in logical order."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def _require_same_spec(name: str, wanted: Spec, found: Spec) -> None:
    if found.shape != wanted.shape:
        raise failed(f"tensor `{name}` has shape {list(found.shape)}, not {list(wanted.shape)}")
    if found.dtype != wanted.dtype:
        raise failed(f"tensor `{name}` is {found.dtype}, not {wanted.dtype}")
