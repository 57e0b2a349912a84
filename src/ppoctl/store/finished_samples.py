"""Finished samples of a stage that is not finished, kept over a crash: the `SampleParts` port on a run directory.

Groups of samples are committed as small files of tensors with a digest in the name; a torn or altered one is dropped
and its samples are drawn again, which gives the same tokens. `once` removes the folder when the stage is committed.
"""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

import torch

from ppoctl.batch import codec
from ppoctl.ports import Sample, SampleSetKey
from ppoctl.store.attempt import Attempt
from ppoctl.store.run_paths import RunPaths

KIND = "samples"
FILES = "*.safetensors"
PER_TOKEN = ("tokens", "logprobs")


@dataclass(frozen=True)
class FinishedSampleFiles:
    """Parts under `steps/N/10-rollout.parts/`, and under that of any other stage that draws."""

    paths: RunPaths
    attempt: Attempt
    every_s: float

    def load(self, drawn_for: SampleSetKey) -> dict[str, Sample]:
        found: dict[str, Sample] = {}
        folder = self.paths.parts(drawn_for.step, drawn_for.stage)
        for path in sorted(folder.glob(FILES)) if folder.is_dir() else []:
            data = path.read_bytes()
            if path.stem.endswith(_digest(data)):
                found.update((sample.key, sample) for sample in decoded(data, drawn_for.fingerprint))
        return found

    @contextmanager
    def writer(self, drawn_for: SampleSetKey) -> Iterator[Callable[[Sample], None]]:
        folder = self.paths.parts(drawn_for.step, drawn_for.stage)
        pending: list[Sample] = []
        written_at = time.monotonic()

        def take(sample: Sample) -> None:
            nonlocal written_at
            pending.append(sample)
            if time.monotonic() - written_at >= self.every_s:
                self._write(folder, encoded(pending, drawn_for.fingerprint))
                pending.clear()
                written_at = time.monotonic()

        try:
            yield take
        except BaseException:
            if pending:
                self._write(folder, encoded(pending, drawn_for.fingerprint))
            raise

    def _write(self, folder: Path, data: bytes) -> None:
        self.attempt.require_newest()
        count = len(list(folder.glob(FILES))) if folder.is_dir() else 0
        self.attempt.write(folder / f"{self.attempt.number}-{count:05d}-{_digest(data)}.safetensors", data)


def encoded(samples: Sequence[Sample], fingerprint: str) -> bytes:
    """The bytes of a part: ids as int32, log-probs as float32 (which is what a record holds of them), all samples one
    after the other."""
    columns = [f.name for f in fields(Sample) if f.name not in PER_TOKEN]
    tensors = {
        # Through an array: `torch.tensor` takes five times as long for a list of numbers.
        "tokens": torch.frombuffer(array("i", chain.from_iterable(s.tokens for s in samples)), dtype=torch.int32),
        "logprobs": torch.frombuffer(
            array("f", chain.from_iterable(s.logprobs for s in samples)), dtype=torch.float32
        ),
        "lengths": torch.tensor([len(sample.tokens) for sample in samples]),
    }
    told = {name: [getattr(sample, name) for sample in samples] for name in columns}
    return codec.encode(KIND, tensors, {"fingerprint": fingerprint, "samples": told})


def decoded(data: bytes, fingerprint: str) -> list[Sample]:
    """The samples of a part; none where it was kept under another fingerprint."""
    _, tensors, meta = codec.decode(data)
    if meta["fingerprint"] != fingerprint:
        return []
    lengths = tensors["lengths"].tolist()
    tokens, logprobs = (torch.split(tensors[name], lengths) for name in PER_TOKEN)
    told = [dict(zip(meta["samples"], row, strict=True)) for row in zip(*meta["samples"].values(), strict=True)]
    return [
        Sample(**rest, tokens=tuple(ids.tolist()), logprobs=tuple(said.tolist()))
        for rest, ids, said in zip(told, tokens, logprobs, strict=True)
    ]


def _digest(data: bytes) -> str:
    return codec.digest(data)[:16]
