"""Base of all records."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor

from ppoctl.core.batch import codec

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Record(Generic[Result]):
    """Base of all records: tensors and JSON metadata, encoded as one safetensors file."""

    kind: ClassVar[str]
    measured: ClassVar[tuple[str, ...]] = ()
    """Fields that are measurements, equal only up to rounding when measured again. They are not part of the
    identity."""
    unsaved: ClassVar[tuple[str, ...]] = ()
    """Fields that exist only in this process: neither written nor part of the identity."""
    dropped: ClassVar[tuple[str, ...]] = ()
    """Fields of records of earlier versions that are no longer read."""

    @cached_property
    def encoded(self) -> bytes:
        """Canonical bytes of this record; equal content gives equal bytes."""
        return self._encode(without=())

    @cached_property
    def identity(self) -> str:
        """Digest (hex) of the content, by which manifests of other stages refer to this record."""
        return codec.digest(self._encode(without=self.measured))

    def __getstate__(self) -> dict[str, Any]:
        """Return only the fields: the cached encoding would double the bytes that are sent to another process."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _encode(self, *, without: tuple[str, ...]) -> bytes:
        left_out = (*without, *self.unsaved)
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        # A default value is not encoded, so that records of versions before the field keep their digests.
        defaults = {f.name: f.default for f in fields(self)}
        meta = {name: value for name, value in values.items() if name not in tensors and value != defaults[name]}
        return codec.encode(self.kind, tensors, meta)

    @property
    def result(self) -> Result:
        """Value that a step function receives: the record, or the state that an update leads to."""
        return cast(Result, self)

    def metrics(self) -> dict[str, float]:
        """Return the metrics for the journal: metric name -> value. The default is the `summary` of the record."""
        summary: dict[str, float] = getattr(self, "summary", {})
        return dict(sorted(summary.items()))

    def timing_metrics(self) -> dict[str, float]:
        """Return the metrics that depend on a clock: metric name -> value. They are not part of the record."""
        return {}

    def manifest_fields(self) -> dict[str, Any]:
        """Return fields for the `extra` of the manifest, which readers of a run use without reading the record."""
        return {}

    def readable_files(self) -> dict[str, bytes]:
        """Return additional files of the artifact, for people: file name -> content."""
        return {}
