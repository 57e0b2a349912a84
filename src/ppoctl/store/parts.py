"""Finished samples of an unfinished rollout, kept over a crash: the `SampleParts` port on a run directory.

Groups of samples are committed as small JSON files with a digest in the name; a torn or altered one is dropped and
its samples are drawn again, which gives the same tokens.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ppoctl.ports import Sample
from ppoctl.store.artifact import write_atomically
from ppoctl.store.attempt import Attempt
from ppoctl.store.disk import storage_error
from ppoctl.store.layout import RunLayout


class RolloutParts:
    """Parts under `steps/N/10-rollout.parts/`."""

    def __init__(self, layout: RunLayout, attempt: Attempt, *, every_s: float) -> None:
        self._layout = layout
        self._attempt = attempt
        self._every_s = every_s

    def recall(self, *, step: int, stage: str, fingerprint: str) -> dict[str, Sample]:
        found: dict[str, Sample] = {}
        folder = self._layout.parts(step, stage)
        for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
            data = path.read_bytes()
            if not path.stem.endswith(_digest(data)):
                continue
            body = json.loads(data)
            if body["fingerprint"] == fingerprint:
                samples = (_sample(raw) for raw in body["samples"])
                found.update({sample.key: sample for sample in samples})
        return found

    @contextmanager
    def keep(self, *, step: int, stage: str, fingerprint: str) -> Iterator[Callable[[Sample], None]]:
        folder = self._layout.parts(step, stage)
        pending: list[Sample] = []
        written_at = time.monotonic()

        def take(sample: Sample) -> None:
            nonlocal written_at
            pending.append(sample)
            if time.monotonic() - written_at >= self._every_s:
                self._write(folder, fingerprint, pending)
                pending.clear()
                written_at = time.monotonic()

        try:
            yield take
        except BaseException:
            if pending:
                self._write(folder, fingerprint, pending)
            raise

    def drop(self, *, step: int) -> None:
        for folder in self._layout.all_parts(step):
            shutil.rmtree(folder, ignore_errors=True)

    def _write(self, folder: Path, fingerprint: str, samples: list[Sample]) -> None:
        self._attempt.require_newest()
        body = {"fingerprint": fingerprint, "samples": [asdict(sample) for sample in samples]}
        data = json.dumps(body, sort_keys=True).encode("ascii")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(folder, error) from error
        count = len(list(folder.glob("*.json")))
        write_atomically(folder / f"{self._attempt.number}-{count:05d}-{_digest(data)}.json", data)


def _sample(raw: dict[str, object]) -> Sample:
    return Sample(**{**raw, "tokens": tuple(raw["tokens"]), "logprobs": tuple(raw["logprobs"])})  # type: ignore[arg-type]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
