"""The forwarder uploads the parts of a run directory that an MLflow run does not have. It blocks, and uses no thread.

The marker of the target alone decides which journal lines are missing. It does not matter why they are missing: an
attempt was killed between two batches, or the server was unreachable for a day, or nothing was ever sent. If the
marker does not match a line of this journal, the journal was repaired after damage. The target is then deleted, and
everything is sent again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ppoctl.show.tracking import mlflow_payloads
from ppoctl.show.tracking.inputs import inputs
from ppoctl.show.tracking.mlflow_payloads import Ending, JournalBatch, MetricPoint
from ppoctl.show.tracking.mlflow_run import RUN_DIR_TAG, MirrorTarget
from ppoctl.store.journal import JournalLine, JournalTail, read_lines
from ppoctl.store.outline import EVAL
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stored_samples import ADVANTAGES

DONE = ("finished", "unmet")
"""Status of an attempt after which no round follows."""

SamplesOf = Callable[[int], Sequence[Mapping[str, Any]]]
"""Function that returns a few training samples of a step."""


@dataclass(frozen=True)
class Sent:
    """Counts of the items that were sent to MLflow, or written for TensorBoard."""

    lines: int = 0
    points: int = 0
    """Points, without markers."""
    params: int = 0
    tags: int = 0
    files: int = 0
    """Files: the recipe, tables of samples and a report. Each file replaces the file with the same name."""
    inputs: int = 0
    """Tables of data."""
    status: int = 0
    """1 if the run's status was changed."""
    tensorboard: int = 0
    """Values in the event file for TensorBoard."""

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(**{name: value + getattr(other, name) for name, value in vars(self).items()})


class Forwarder:
    """An open target, and the position in the journal up to which it was read. It cannot be used after an error."""

    def __init__(self, paths: RunPaths, target: MirrorTarget, samples: SamplesOf = lambda _: ()) -> None:
        """Open the journal for a target. `samples` returns the rows of the tables of training samples."""
        self._paths = paths
        self._samples = samples
        self._target = target
        run = RecordedRun(paths)
        self._created = float(run.facts["created"])
        self._journal = JournalTail(paths.journal)
        self._outlines = run.outlines
        self._rounds: list[JournalLine] = []
        """Lines of a loop over rounds of which the journal may get further rounds, and of events among them. They are
        sent when the loop has ended: MLflow cannot replace a point."""
        self._files: dict[str, partial[str | None]] = {
            path.name: partial(_text, path, _whole) for path in (paths.recipe_toml, paths.recipe_resolved)
        }
        """Files to send: name in MLflow -> function that returns the text, or None if the file does not exist."""
        self._tables: dict[str, partial[str | None]] = {}
        """Tables to send, in the same form."""
        self.seq = self._continued()
        """Number of the last journal line that the target has."""

    def describe(self, more_tags: Mapping[str, str]) -> Sent:
        """Send the params, tags and data inputs that the target does not have, and the tags whose value differs."""
        recorded, tags_before = self._target.params(), self._target.tags()
        run = RecordedRun(self._paths)
        by_start = {start: mlflow_payloads.params(recipe) for start, recipe in run.recipes.items()}
        now = by_start[max(by_start)]
        params = {key: value for key, value in now.items() if key not in recorded}
        ours = {key: value for key, value in recorded.items() if any(key in recipe for recipe in by_start.values())}
        changed = mlflow_payloads.changed_params(ours, now, tags_before)
        wanted = {**more_tags, RUN_DIR_TAG: str(self._paths.root), **changed}
        tags = {key: value for key, value in wanted.items() if tags_before.get(key) != value}
        if params or tags:
            self._target.describe(params, tags)
        known = self._target.inputs()
        tables = inputs(run.facts, run.recipe)
        if lacking := [table for table in tables if table.name not in known]:
            self._target.add_inputs(lacking)
        return Sent(params=len(params), tags=len(tags), inputs=len(lacking))

    def forward(self, *, stop: Callable[[], bool] = lambda: False) -> Sent:
        """Send the journal lines that the target does not have; `stop` is called between batches."""
        total = Sent()
        for batch in mlflow_payloads.batches(self._parts(), after=self.seq):
            self._target.send(batch)
            total += Sent(lines=batch.num_lines, points=len(batch.points) - 1)
            self.seq = batch.last_seq
            if stop():
                break
        return total

    def keep_files(self) -> Sent:
        """Send the recipe and the sample tables that this object has not sent yet; MLflow may have them already.

        This must be called after `forward`, so that the metrics arrive even if the client cannot write to the
        artifact store, which is a common mistake.
        """
        files, tables = self._kept(self._files), self._kept(self._tables)
        return Sent(files=len(files) + len(tables), tags=self._show(tables))

    def _kept(self, waiting: dict[str, partial[str | None]]) -> list[str]:
        """Send the waiting files, and return the names of those that exist. Afterwards `waiting` is empty."""
        sent = []
        for name, text_of in list(waiting.items()):
            if (text := text_of()) is not None:
                self._target.keep(name, text)
                sent.append(name)
            del waiting[name]
        return sent

    def keep(self, texts: Mapping[str, str]) -> Sent:
        """Send text files under their names."""
        for name, text in texts.items():
            self._target.keep(name, text)
        return Sent(files=len(texts))

    def measure(self, metrics: Mapping[str, float], at: float) -> None:
        """Send metrics of the machine, which are not in the journal. They have no marker and are lost after an error.

        Their step is the number of seconds since the run was created, so that later attempts have later steps.
        """
        step = int(at - self._created)
        points = tuple(MetricPoint(name, value, int(at * 1000), step) for name, value in metrics.items())
        self._target.send(JournalBatch(points, tags={}, num_lines=0, last_seq=self.seq))

    def end(self, ending: Ending) -> Sent:
        """Set the status unless the target has it or the journal has no attempt."""
        if ending.attempt is None:
            return Sent()
        tags = self._target.tags()
        if self._target.status() == ending.status and all(tags.get(k) == v for k, v in ending.tags.items()):
            return Sent()
        self._target.end(ending)
        return Sent(status=1)

    def _show(self, tables: list[str]) -> int:
        """Add these tables to the tag that MLflow's pages read; return the number of changed tags."""
        if not tables:
            return 0
        before = self._target.tags().get(mlflow_payloads.TABLES_TAG)
        if (now := mlflow_payloads.with_tables(before, tables)) == before:
            return 0
        self._target.describe({}, {mlflow_payloads.TABLES_TAG: now})
        return 1

    def _continued(self) -> int:
        """Return the number of the last journal line that the target has.

        If the target's marker does not match that line of the journal, empty the target and return 0.
        """
        marker = self._target.marker()
        if marker is None:
            return 0
        for line in read_lines(self._paths.journal):
            if line["seq"] == marker.seq and int(line["at"] * 1000) == marker.at_ms:
                return marker.seq
        self._target.restart()
        return 0

    def _parts(self) -> Iterator[list[JournalLine]]:
        """Yield each new line, and the lines of a loop over rounds together, after the loop has ended."""
        for line in self._new_lines():
            if self._rounds and not self._may_continue(line):
                yield self._rounds
                self._rounds = []
            if self._rounds or self._is_in_loop(line):
                self._rounds.append(line)
            else:
                yield [line]

    def _may_continue(self, line: JournalLine) -> bool:
        """Whether further rounds of the waiting lines may follow this line."""
        if "stage" not in line:
            return line.get("status") not in DONE
        return self._is_in_loop(line) and line["step"] == self._rounds[0]["step"]

    def _is_in_loop(self, line: JournalLine) -> bool:
        if "stage" not in line:
            return False
        name = line["stage"].partition(".")[0]
        return any(entry.name == name and entry.loop for entry in self._outlines.at(line["step"]).stages)

    def _new_lines(self) -> Iterator[JournalLine]:
        """Yield the journal lines that were added since the last call, and note their samples."""
        for line in self._journal.new_lines():
            self._note_samples(line)
            yield line

    def _note_samples(self, line: JournalLine) -> None:
        """Add the samples of this line's stage to the tables to send.

        Only the newest training steps are sent, because reading a step's samples takes longer than sending all of
        its metrics.
        """
        if line.get("stage") == EVAL:
            file = self._paths.stage(line["step"], EVAL) / "samples.jsonl"
            name = mlflow_payloads.table_name(line["step"])
            self._tables[name] = partial(_text, file, mlflow_payloads.table)
        if line.get("stage") == ADVANTAGES:
            name = mlflow_payloads.training_table_name(line["step"])
            self._tables[name] = partial(self._training_table, line["step"])
            waiting = [name for name, text_of in self._tables.items() if text_of.func == self._training_table]
            for name in waiting[: -mlflow_payloads.MOST_OF_TRAINING]:
                del self._tables[name]

    def _training_table(self, step: int) -> str | None:
        return mlflow_payloads.training_table(self._samples(step))


def _text(path: Path, read: Callable[[TextIO], str]) -> str | None:
    """Return the text that `read` makes of a file; None if the file does not exist (retention removes old ones)."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        return read(file)


def _whole(file: TextIO) -> str:
    return file.read()
