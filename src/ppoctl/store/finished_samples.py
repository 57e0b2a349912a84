"""Finished samples of an unfinished stage, kept after a crash: the `FinishedSamples` port on a run directory.

Groups of samples are written as small tensor files with a digest in the name. A file that does not match its digest
is ignored, and its samples are generated again with the same tokens. `store.stage_runner` removes the folder when the
stage is committed.
"""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

import torch

from ppoctl.core.batch import codec
from ppoctl.core.ports import Sample, SampleSetKey
from ppoctl.store.attempt import Attempt
from ppoctl.store.run_paths import RunPaths

KIND = "samples"
FILES = "*.safetensors"
PER_TOKEN = ("tokens", "logprobs")
EXPERTS = "experts"
OF_EPISODES = ("calls", "malformed", "episode", "prompt_tokens")
"""Fields that only a response of several turns uses. `episode_log` keeps those responses."""


@dataclass(frozen=True)
class FinishedSampleFiles:
    """Files of finished samples in `steps/N/10-rollout.parts/`, and in the same folder of other generating stages."""

    paths: RunPaths
    attempt: Attempt
    every_s: float

    def load(self, key: SampleSetKey) -> dict[str, Sample]:
        finished: dict[str, Sample] = {}
        folder = self.paths.parts(key.step, key.stage)
        for path in sorted(folder.glob(FILES)) if folder.is_dir() else []:
            data = path.read_bytes()
            if path.stem.endswith(_digest(data)):
                finished.update((sample.key, sample) for sample in decoded(data, key.fingerprint))
        return finished

    @contextmanager
    def writer(self, key: SampleSetKey, *, to_the_end: bool = False) -> Iterator[Callable[[Sample], None]]:
        folder = self.paths.parts(key.step, key.stage)
        pending: list[Sample] = []
        written_at = time.monotonic()

        def take(sample: Sample) -> None:
            nonlocal written_at
            pending.append(sample)
            if time.monotonic() - written_at >= self.every_s:
                self._write(folder, encoded(pending, key.fingerprint))
                pending.clear()
                written_at = time.monotonic()

        is_needed = True
        try:
            yield take
            is_needed = to_the_end  # otherwise the whole stage is committed now
        finally:
            if pending and is_needed:
                self._write(folder, encoded(pending, key.fingerprint))

    def _write(self, folder: Path, data: bytes) -> None:
        self.attempt.require_newest()
        count = len(list(folder.glob(FILES))) if folder.is_dir() else 0
        self.attempt.write(folder / f"{self.attempt.number}-{count:05d}-{_digest(data)}.safetensors", data)


def encoded(samples: Sequence[Sample], fingerprint: str) -> bytes:
    """Encode samples as one file: all samples concatenated, ids as int32 and log-probs as float32.

    A record has the same types, so nothing is lost.
    """
    columns = [f.name for f in fields(Sample) if f.name not in (*PER_TOKEN, EXPERTS, *OF_EPISODES)]
    tensors = {
        # Converted through an `array`: `torch.tensor` takes five times as long to convert a list of numbers.
        "tokens": torch.frombuffer(array("i", chain.from_iterable(s.tokens for s in samples)), dtype=torch.int32),
        "logprobs": torch.frombuffer(
            array("f", chain.from_iterable(s.logprobs for s in samples)), dtype=torch.float32
        ),
        "lengths": torch.tensor([len(sample.tokens) for sample in samples]),
    }
    if any(sample.experts for sample in samples):
        tensors[EXPERTS] = torch.frombuffer(bytearray(b"".join(s.experts for s in samples)), dtype=torch.uint8)
        tensors["expert_bytes"] = torch.tensor([len(sample.experts) for sample in samples])
    values = {name: [getattr(sample, name) for sample in samples] for name in columns}
    return codec.encode(KIND, tensors, {"fingerprint": fingerprint, "samples": values})


def decoded(data: bytes, fingerprint: str) -> list[Sample]:
    """Decode the samples of one file; an empty list if the file was written for another fingerprint."""
    _, tensors, meta = codec.decode(data)
    if meta["fingerprint"] != fingerprint:
        return []
    lengths = tensors["lengths"].tolist()
    tokens, logprobs = (torch.split(tensors[name], lengths) for name in PER_TOKEN)
    experts = [b""] * len(lengths)
    if EXPERTS in tensors:
        parts = torch.split(tensors[EXPERTS], tensors["expert_bytes"].tolist())
        experts = [part.numpy().tobytes() for part in parts]
    rows = [dict(zip(meta["samples"], row, strict=True)) for row in zip(*meta["samples"].values(), strict=True)]
    return [
        Sample(**row, tokens=tuple(ids.tolist()), logprobs=tuple(values.tolist()), experts=of_sample)
        for row, ids, values, of_sample in zip(rows, tokens, logprobs, experts, strict=True)
    ]


def _digest(data: bytes) -> str:
    return codec.digest(data)[:16]
