"""The forwarder brings one MLflow run up to date with one run directory. It blocks, and knows no thread, no clock, no
pauses.

What is missing is judged from the target's marker alone, so it does not matter who sent what before: an attempt that
was killed between two batches, a server that was away for a day, or nobody. A target whose marker is no line of this
journal cannot be continued, because the journal was damaged and made again: it is deleted, and all is sent anew.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ppoctl.batch.sealed import whole_lines
from ppoctl.store import run_dir
from ppoctl.store.journal import Line, read_lines
from ppoctl.store.layout import RunLayout
from ppoctl.tracking import outgoing
from ppoctl.tracking.mlflow_run import Target
from ppoctl.tracking.outgoing import Ending

SAMPLES_PER_TABLE = 64
"""Rows of an evaluation's samples that are shown in MLflow; all of them stay in the run directory."""


@dataclass(frozen=True)
class Sent:
    """Counts of everything that a target was sent."""

    lines: int = 0
    points: int = 0
    """Points sent, without markers."""
    params: int = 0
    tags: int = 0
    files: int = 0
    """Files sent, the recipe and tables of samples, which replace those under their names."""
    status: int = 0
    """1 when the run's status was changed."""

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(**{name: value + getattr(other, name) for name, value in vars(self).items()})


class Forwarder:
    """One opened target, and how far the journal has been read for it. After an error: throw it away, make a new
    one."""

    def __init__(self, layout: RunLayout, target: Target) -> None:
        self._layout = layout
        self._target = target
        self._offset = 0
        """Bytes of the journal that have been read."""
        self._files: dict[str, tuple[Path, int | None]] = {
            path.name: (path, None) for path in (layout.recipe_toml, layout.recipe_resolved)
        }
        """Files to send, by their name in MLflow, with how many lines of them."""
        self.seq = self._continued()
        """Number of the last journal line that the target has."""

    def describe(self, more_tags: Mapping[str, str]) -> Sent:
        """Send params and tags that the target lacks or has otherwise."""
        recorded, had = self._target.params(), self._target.tags()
        recipes = run_dir.recipes(self._layout)
        now = outgoing.params(recipes[max(recipes)])
        params = {key: value for key, value in now.items() if key not in recorded}
        changed = outgoing.changed_params(recorded, now, had)
        wanted = {**more_tags, "ppoctl.run_dir": str(self._layout.root), **changed}
        tags = {key: value for key, value in wanted.items() if had.get(key) != value}
        if params or tags:
            self._target.describe(params, tags)
        return Sent(params=len(params), tags=len(tags))

    def forward(self, *, stop: Callable[[], bool] = lambda: False) -> Sent:
        """Send the journal lines that the target lacks; `stop` is asked between batches."""
        total = Sent()
        for batch in outgoing.batches(self._new_lines(), after=self.seq):
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
        count = 0
        for name, (path, num_lines) in list(self._files.items()):
            if path.is_file():  # retention may have removed an old evaluation
                with path.open(encoding="utf-8") as file:
                    self._target.keep(name, "".join(islice(file, num_lines)))
                count += 1
            del self._files[name]
        return Sent(files=count)

    def end(self, ending: Ending) -> Sent:
        """Set the status unless the target has it, or the journal has no attempt that could have one."""
        if ending.attempt is None:
            return Sent()
        had = self._target.tags()
        if self._target.status() == ending.status and all(had.get(k) == v for k, v in ending.tags.items()):
            return Sent()
        self._target.end(ending)
        return Sent(status=1)

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

    def _new_lines(self) -> Iterator[Line]:
        """Whole journal lines that came since the last call, each given once. A last line that a kill left unfinished
        is not read. Raises CorruptArtifactError naming a damaged line."""
        path = self._layout.journal
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        for line in whole_lines(path, data, offset=self._offset):
            self._offset = line.end
            if line.body.get("stage") == "eval":
                step = int(line.body["step"])
                samples = self._layout.stage(step, "eval") / "samples.jsonl"
                self._files[f"samples/step-{step:06d}.jsonl"] = (samples, SAMPLES_PER_TABLE)
            yield line.body
