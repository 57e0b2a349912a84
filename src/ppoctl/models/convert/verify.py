"""Checks of a written checkpoint, which is read back from disk and compared with its source, tensor by tensor.

    names, shapes, dtypes      equal on both sides
    digests                    SHA-256 of every tensor's bytes, on both sides under Hugging Face names
    round trip                 Megatron's parameters, assembled again from the output, equal to the source's
    padding                    of the vocabulary: zero in Megatron's format; left out in Hugging Face's
    record of the source       if a conversion wrote the source: every tensor equal to the recorded digest
    configuration              describes the same model

One mapping is used in both directions, so a wrong mapping passes all of these checks. Only the comparison of model
outputs (`run.conversion.parity`) detects it.
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

from ppoctl.core.errors import ConversionError, EnvironmentProblemError, RecipeError, StorageError, quoted
from ppoctl.models.convert.hugging_face import Spec, Weights
from ppoctl.models.convert.parameters import MegatronWeights, assembled
from ppoctl.models.shape import ModelShape
from ppoctl.models.shape_reader import read_shape


@dataclass(frozen=True)
class Check:
    """One check that passed."""

    name: str
    count: int
    """Number of compared tensors, fields or values."""
    says: str = ""
    largest_gap: float | None = None
    """Largest difference, for numbers that need not be equal."""
    allowed: float | None = None


@contextmanager
def naming_the_output() -> Iterator[None]:
    """Context for reading the output: a read error becomes a failed check, not an error of the source."""
    try:
        yield
    except (EnvironmentProblemError, RecipeError, StorageError) as error:
        raise failed(error.message) from error


def failed(reason: str) -> ConversionError:
    """Return the error of a failed check."""
    return ConversionError(
        f"verification failed: {reason}",
        hint="the output was deleted; try again, and if it fails again, report this line",
    )


def check_tensors(source: Weights, written: Weights) -> tuple[list[Check], dict[str, dict[str, Any]]]:
    """Compare names, shapes, dtypes and digests; return the checks and the digests. Raises ConversionError that names
    the tensor that differs."""
    for name in [*source.specs, *written.specs]:
        if name not in written.specs:
            raise failed(f"tensor `{name}` was not written")
        if name not in source.specs:
            raise failed(f"tensor `{name}` was written but is not part of the model")
        _require_same_spec(name, source.specs[name], written.specs[name])
    digests: dict[str, dict[str, Any]] = {}
    for name, spec in source.specs.items():
        expected, actual = digest(source.tensor(name)), digest(written.tensor(name))
        if expected != actual:
            raise failed(f"tensor `{name}` differs from the source (SHA-256 {actual[:12]}, not {expected[:12]})")
        shape, dtype = list(spec.shape), str(spec.dtype).removeprefix("torch.")
        digests[name] = {"sha256": expected, "shape": shape, "dtype": dtype}
    count = len(digests)
    return [Check("names, shapes, dtypes", count), Check("digests", count, "bit for bit")], digests


def check_record(report: Path, digests: dict[str, dict[str, Any]]) -> Check:
    """Compare the source with the record of the conversion that wrote it, because the weight files of the source have
    no checksums. Raises ConversionError that names the tensor that has changed since that conversion."""
    try:
        recorded = json.loads(report.read_text("utf-8"))["tensors"]
    except (ValueError, KeyError, TypeError) as error:
        message = f"`{report}` is not a record of a conversion: {error}"
        raise ConversionError(message, hint=f"rm {quoted(report)}") from error
    for name, entry in recorded.items():
        if digests.get(name) != entry:
            raise ConversionError(
                f"tensor `{name}` of `{report.parent}` differs from the record in its `{report.name}`",
                hint=f"the folder was changed or damaged: convert it again, or remove {report} if you changed it",
            )
    return Check("record of the source", len(recorded))


def check_round_trip(source: MegatronWeights, written: Weights, shape: ModelShape) -> Check:
    """Compare parameters after Megatron -> Hugging Face -> Megatron. Raises ConversionError that names the parameter
    that differs."""
    for parameter in source.parameters:
        rebuilt = assembled(parameter, written, shape)
        actual, dtype = digest(rebuilt[: parameter.rows]), rebuilt.dtype
        del rebuilt  # so that only one copy of the largest tensors is in memory
        if actual != digest(source.parameter(parameter)[: parameter.rows].to(dtype)):
            raise failed(f"Megatron's `{parameter.name}`, assembled again from the output, differs from the source")
    return Check("round trip", len(source.parameters), "Megatron's parameters assembled again, bitwise equal")


def check_padding(weights: MegatronWeights, *, is_written: bool) -> Check:
    """Check the rows of the vocabulary's padding. Raises ConversionError if a written row is not zero."""
    rows = used = 0
    for parameter in weights.parameters:
        if padding := parameter.shape[0] - parameter.rows:
            rows += padding
            used += int(weights.parameter(parameter)[parameter.rows :].any(dim=1).sum())
            if used and is_written:
                raise failed(f"padding rows of Megatron's `{parameter.name}` are not zero")
    if not rows:
        return Check("padding rows", 0, "no padding")
    if is_written:
        return Check("padding rows", rows, "zero")
    return Check("padding rows", rows, f"left out; {used} were not zero" if used else "left out; all zero")


def check_configuration(folder: Path, shape: ModelShape) -> Check:
    """Compare the model that the written configuration describes with the model of the source. Raises ConversionError
    that names the field that differs."""
    expected, actual = asdict(shape), asdict(read_shape(folder))
    for name, value in expected.items():
        if actual[name] != value:
            raise failed(f"`{name}` of the written config.json is `{actual[name]}`, the source's is `{value}`")
    return Check("configuration", len(expected))


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 (hex) of a tensor's bytes in logical order."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def _require_same_spec(name: str, expected: Spec, actual: Spec) -> None:
    if actual.shape != expected.shape:
        raise failed(f"tensor `{name}` has shape {list(actual.shape)}, not {list(expected.shape)}")
    if actual.dtype != expected.dtype:
        raise failed(f"tensor `{name}` is {actual.dtype}, not {expected.dtype}")
