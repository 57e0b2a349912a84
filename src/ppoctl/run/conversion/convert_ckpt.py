"""The command `convert-ckpt`: find the source, write the other format to a temporary folder, check that folder and
rename it."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ppoctl.core.errors import RecipeError
from ppoctl.core.machine.versions import versions
from ppoctl.models.convert import verify
from ppoctl.models.convert.accounted_tensors import Accounted
from ppoctl.models.convert.destination import destination
from ppoctl.models.convert.hugging_face import Weights, open_weights
from ppoctl.models.convert.megatron_folder import open_megatron
from ppoctl.models.convert.model_files import Companions
from ppoctl.models.convert.parameters import MegatronWeights
from ppoctl.models.convert.torch_dist import TorchDist
from ppoctl.models.convert.verify import Check
from ppoctl.models.convert.writers import write_hugging_face, write_megatron
from ppoctl.models.head import VALUE_HEAD_PREFIX
from ppoctl.models.shape import ModelShape
from ppoctl.models.shape_reader import read_shape
from ppoctl.run.conversion.adapter import StateAdapter, open_adapter
from ppoctl.run.conversion.found_checkpoint import FoundCheckpoint, find_source

REPORT = "ppoctl-conversion.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ConvertRequest:
    """The conversion that the command line requests."""

    source: str
    to: Literal["hf", "megatron", "peft"]
    out: Path
    role: str | None = None
    """Role to convert; None: the policy of a run, otherwise the role of the source."""
    step: int | None = None
    like: str | None = None
    dtype: str | None = None
    shard_gib: float = 4.0
    verify: bool = True
    parity: bool = True
    allow_pickle: bool = False

    @property
    def skipped(self) -> tuple[str, ...]:
        """Options that disable checks."""
        return ("--no-verify",) if not self.verify else ("--no-parity",) if not self.parity else ()


@dataclass(frozen=True)
class Conversion:
    """One conversion of a checkpoint to the other format."""

    request: ConvertRequest
    source: FoundCheckpoint
    shape: ModelShape
    weights: Weights
    """Weights of the source, in the dtype of the output; for `--to peft`, its adapters."""
    notes: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first tensor, and of most of the model."""
        return next(iter(self.weights.specs.values())).dtype

    @property
    def has_parity(self) -> bool:
        """Whether outputs are compared: only between two formats of whole models."""
        return self.request.parity and self.request.to not in ("peft", self.source.kind)

    def write(self, folder: Path) -> None:
        """Write all files except the report."""
        if isinstance(self.weights, StateAdapter):
            self.weights.write(folder)
            return
        shard_bytes = int(self.request.shard_gib * 2**30)
        if self.request.to == "hf":
            write_hugging_face(self.weights, folder, shard_bytes)
        else:
            write_megatron(self.weights, self.shape, self.source.head, folder, shard_bytes)
        Companions(self.source.like, self.source.head, self.dtype).write(folder)

    def check(self, folder: Path) -> tuple[list[Check], dict[str, Any]]:
        """Return the checks that the files in `folder` passed, and the digest of every tensor. Raises
        ConversionError."""
        with verify.naming_the_output():
            if isinstance(self.weights, StateAdapter):
                return self.weights.check(folder)
            checks, digests = self._check_files(folder)
            record = self.source.folder / REPORT
            if self.request.dtype is None and record.is_file():
                checks.append(verify.check_record(record, digests))
            if self.has_parity:
                from ppoctl.run.conversion.parity import ModelPair, check_parity

                to_hf = self.request.to == "hf"
                hugging_face, megatron = (folder, self.source.folder) if to_hf else (self.source.folder, folder)
                rounded_to = DTYPES[self.request.dtype] if self.request.dtype else None
                like = self.source.completed_by if to_hf else None
                pair = ModelPair(hugging_face, megatron, self.shape, self.source.head, rounded_to, like)
                checks += check_parity(pair, self.weights)
        return checks, digests

    def _check_files(self, folder: Path) -> tuple[list[Check], dict[str, Any]]:
        configuration = verify.check_configuration(folder, self.shape)
        if self.request.to == "megatron":
            megatron = MegatronWeights(TorchDist(folder), self.shape, self.source.head)
            checks, digests = verify.check_tensors(self.weights, megatron)
            return [*checks, verify.check_padding(megatron, is_written=True), configuration], digests
        written = open_weights(folder, allow_pickle=False)
        checks, digests = verify.check_tensors(self.weights, written)
        megatron = _open_megatron(self.source, self.shape)
        checks.append(verify.check_round_trip(megatron, written, self.shape))
        return [*checks, verify.check_padding(megatron, is_written=False), configuration], digests


def convert(request: ConvertRequest, notify: Callable[[str], None]) -> dict[str, Any]:
    """Convert a checkpoint, and return the report. The destination exists only if every step succeeded."""
    source = find_source(request.source, like=request.like, role=request.role, step=request.step)
    if source.kind == request.to and source.is_complete:
        other = "megatron" if request.to == "hf" else "hf"
        raise RecipeError(f"`{request.source}` is already in that format (`--to {request.to}`)", hint=f"--to {other}")
    conversion = _open(request, source)
    for note in conversion.notes:
        notify(f"note: {note}")
    if request.verify and conversion.has_parity:
        from ppoctl.run.conversion.parity import require_memory

        require_memory(conversion.weights)
    with destination(request.out) as aside:
        started = time.monotonic()
        conversion.write(aside)
        size = sum(path.stat().st_size for path in aside.iterdir())
        count = len(conversion.weights.specs)
        notify(f"wrote {count} tensors, {size / 2**20:,.1f} MiB, in {time.monotonic() - started:.1f} s")
        checks, digests = conversion.check(aside) if request.verify else ([], {})
        report = _report(conversion, checks, digests)
        (aside / REPORT).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return report


def _open(request: ConvertRequest, source: FoundCheckpoint) -> Conversion:
    shape = read_shape(source.like)
    dtype = DTYPES[request.dtype] if request.dtype else None
    notes = source.notes
    if request.to == "peft":
        return Conversion(request, source, shape, open_adapter(source, shape, request.like, dtype), notes)
    if source.kind == "hf":
        source_weights: Weights = open_weights(source.folder, allow_pickle=request.allow_pickle)
    else:
        source_weights = _open_megatron(source, shape)
        if any(name.startswith(VALUE_HEAD_PREFIX) for name in source_weights.state.tensors):
            notes = (*notes, "the value head on the policy's model is not written: no Hugging Face class has it")
    weights = Accounted(source_weights, source.folder, shape, source.head, dtype)
    return Conversion(request, source, shape, weights, (*notes, *weights.notes))


def _open_megatron(source: FoundCheckpoint, shape: ModelShape) -> MegatronWeights:
    return open_megatron(source.folder, shape, source.head, like=source.completed_by)


def _report(conversion: Conversion, checks: list[Check], digests: dict[str, Any]) -> dict[str, Any]:
    request, source = conversion.request, conversion.source
    return {
        "source": {
            "kind": source.kind,
            "path": str(source.folder),
            "config": str(source.like),
            "says": source.description,
        },
        "to": request.to,
        "role": source.role,
        "family": conversion.shape.family,
        "parameters": sum(torch.Size(spec.shape).numel() for spec in conversion.weights.specs.values()),
        "dtype": str(conversion.dtype).removeprefix("torch."),
        "cast": request.dtype is not None,
        "verified": not request.skipped,
        "skipped": list(request.skipped),
        "checks": [asdict(check) for check in checks],
        "notes": list(conversion.notes),
        "versions": versions(),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "tensors": digests,
    }
