"""The forwarder brings one MLflow run up to date with one run directory. It blocks, and knows no thread, no clock, no
pauses.

What is missing is judged from the target's marker alone, so it does not matter who sent what before: an attempt that
was killed between two batches, a server that was away for a day, or nobody. A target whose marker is no line of this
journal cannot be continued, because the journal was damaged and made again: it is deleted, and all is sent anew.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ppoctl.batch.sealed_json import whole_lines
from ppoctl.store import run_dir
from ppoctl.store.journal import JournalLine, read_lines
from ppoctl.store.outline import EVAL
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.samples import ADVANTAGES
from ppoctl.tracking import mlflow_payloads
from ppoctl.tracking.inputs import inputs
from ppoctl.tracking.mlflow_payloads import Ending, JournalBatch, MetricPoint
from ppoctl.tracking.mlflow_run import RUN_DIR_TAG, MirrorTarget
from ppoctl.tracking.mlflow_tables import (
    MOST_OF_TRAINING,
    TAG,
    table,
    table_name,
    training_table,
    training_table_name,
    with_tables,
)

SamplesOf = Callable[[int], Sequence[Mapping[str, Any]]]
"""Function that gives a few samples that a step trained on."""


@dataclass(frozen=True)
class Sent:
    """Counts of everything that a target was sent."""

    lines: int = 0
    points: int = 0
    """Points sent, without markers."""
    params: int = 0
    tags: int = 0
    files: int = 0
    """Files sent, the recipe, tables of samples and a report, which replace those under their names."""
    inputs: int = 0
    """Tables of data sent."""
    status: int = 0
    """1 when the run's status was changed."""

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(**{name: value + getattr(other, name) for name, value in vars(self).items()})


class Forwarder:
    """One opened target, and how far the journal has been read for it. After an error: throw it away, make a new
    one."""

    def __init__(self, paths: RunPaths, target: MirrorTarget, samples: SamplesOf = lambda _: ()) -> None:
        """`samples`: of which the tables of training are made."""
        self._layout = paths
        self._samples = samples
        self._target = target
        self._made = float(run_dir.facts(paths)["created"])
        self._offset = 0
        """Bytes of the journal that have been read."""
        self._files: dict[str, partial[str | None]] = {
            path.name: partial(_text, path, _whole) for path in (paths.recipe_toml, paths.recipe_resolved)
        }
        """Files to send, by their name in MLflow, with what gives their text; None: it is not there any more."""
        self._tables: dict[str, partial[str | None]] = {}
        """Tables to send, likewise."""
        self.seq = self._continued()
        """Number of the last journal line that the target has."""

    def describe(self, more_tags: Mapping[str, str]) -> Sent:
        """Send params, tags and data inputs that the target lacks or has otherwise."""
        recorded, had = self._target.params(), self._target.tags()
        recipes = run_dir.recipes(self._layout)
        asked = {start: mlflow_payloads.params(recipe) for start, recipe in recipes.items()}
        now = asked[max(asked)]
        params = {key: value for key, value in now.items() if key not in recorded}
        ours = {key: value for key, value in recorded.items() if any(key in each for each in asked.values())}
        changed = mlflow_payloads.changed_params(ours, now, had)
        wanted = {**more_tags, RUN_DIR_TAG: str(self._layout.root), **changed}
        tags = {key: value for key, value in wanted.items() if had.get(key) != value}
        if params or tags:
            self._target.describe(params, tags)
        known = self._target.inputs()
        found = inputs(run_dir.facts(self._layout), recipes[max(recipes)])
        if lacking := [each for each in found if each.name not in known]:
            self._target.add_inputs(lacking)
        return Sent(params=len(params), tags=len(tags), inputs=len(lacking))

    def forward(self, *, stop: Callable[[], bool] = lambda: False) -> Sent:
        """Send the journal lines that the target lacks; `stop` is asked between batches."""
        total = Sent()
        for batch in mlflow_payloads.batches(self._new_lines(), after=self.seq):
            self._target.send(batch)
            total += Sent(lines=batch.num_lines, points=len(batch.points) - 1)
            self.seq = batch.last_seq
            if stop():
                break
        return total

    def keep_files(self) -> Sent:
        """Send the recipe and the sample tables that were not sent by this object; they may be there already.

        Apart from `forward`, and to be called after it: a server whose artifact store the client cannot write to is a
        common mistake, and figures should arrive all the same.
        """
        files, tables = self._kept(self._files), self._kept(self._tables)
        return Sent(files=len(files) + len(tables), tags=self._show(tables))

    def _kept(self, waiting: dict[str, partial[str | None]]) -> list[str]:
        """Names of those of the files that could be sent; none waits any more."""
        sent = []
        for name, text_of in list(waiting.items()):
            if (text := text_of()) is not None:
                self._target.keep(name, text)
                sent.append(name)
            del waiting[name]
        return sent

    def keep(self, texts: Mapping[str, str]) -> Sent:
        """Send texts under their names."""
        for name, text in texts.items():
            self._target.keep(name, text)
        return Sent(files=len(texts))

    def measure(self, figures: Mapping[str, float], at: float) -> None:
        """Send figures of this moment, which no journal has: without a marker, and lost when they cannot be sent.
        Their step is the second since the run was made, so that those of a later attempt come behind."""
        step = int(at - self._made)
        points = tuple(MetricPoint(name, value, int(at * 1000), step) for name, value in figures.items())
        self._target.send(JournalBatch(points, tags={}, num_lines=0, last_seq=self.seq))

    def end(self, ending: Ending) -> Sent:
        """Set the status unless the target has it, or the journal has no attempt that could have one."""
        if ending.attempt is None:
            return Sent()
        had = self._target.tags()
        if self._target.status() == ending.status and all(had.get(k) == v for k, v in ending.tags.items()):
            return Sent()
        self._target.end(ending)
        return Sent(status=1)

    def _show(self, tables: list[str]) -> int:
        """Name these tables where MLflow's pages look for them; the number of tags that this changed."""
        if not tables:
            return 0
        had = self._target.tags().get(TAG)
        if (now := with_tables(had, tables)) == had:
            return 0
        self._target.describe({}, {TAG: now})
        return 1

    def _continued(self) -> int:
        """Number of the last journal line that the target has, where that line of the journal is the one it was made
        from; otherwise 0, and the target is empty."""
        marker = self._target.marker()
        if marker is None:
            return 0
        for line in read_lines(self._layout.journal):
            if line["seq"] == marker.seq and int(line["at"] * 1000) == marker.at_ms:
                return marker.seq
        self._target.restart()
        return 0

    def _new_lines(self) -> Iterator[JournalLine]:
        """Whole journal lines that came since the last call, each given once. A last line that a kill left unfinished
        is not read. Raises CorruptArtifactError naming a damaged line."""
        path = self._layout.journal
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        for line in whole_lines(path, data, offset=self._offset):
            self._offset = line.end
            self._note_samples(line.body)
            yield line.body

    def _note_samples(self, line: JournalLine) -> None:
        """Remember the samples of which this line says that they are there. Of training only the newest are sent:
        reading a step costs more than all of its figures."""
        if line.get("stage") == EVAL:
            file = self._layout.stage(line["step"], EVAL) / "samples.jsonl"
            self._tables[table_name(line["step"])] = partial(_text, file, table)
        if line.get("stage") == ADVANTAGES:
            self._tables[training_table_name(line["step"])] = partial(self._trained_on, line["step"])
            waiting = [name for name, text_of in self._tables.items() if text_of.func == self._trained_on]
            for name in waiting[:-MOST_OF_TRAINING]:
                del self._tables[name]

    def _trained_on(self, step: int) -> str | None:
        return training_table(self._samples(step))


def _text(path: Path, read: Callable[[TextIO], str]) -> str | None:
    """What is read of a file; None: it is gone, as retention may have removed an old evaluation."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8") as file:
        return read(file)


def _whole(file: TextIO) -> str:
    return file.read()
