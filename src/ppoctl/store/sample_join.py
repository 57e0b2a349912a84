"""Join of the records of a step by sample. A sample is identified by its round, its prompt and its number.

Records do not contain the samples of their rows. The outline names, for each record, the stage that defines its rows:
rollouts, or a selection of rows of the rollouts of all rounds. Imports numpy but not torch.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ppoctl.store import record_file
from ppoctl.store.outline import stage_and_steps
from ppoctl.store.record_file import PlainRecord
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.rounds import StageInRound
from ppoctl.store.run_paths import RunPaths

ROLLOUT = "rollout"
"""Stage that defines the rows of the records of a round, unless the outline names another stage."""
REWARD = "reward"
"""Stage whose rows are the samples of a step."""

SampleKey = tuple[str, int]
"""Stage that generated a sample, such as `rollout.2`, and the row of its record."""


@dataclass(frozen=True)
class JoinedRecords:
    """The records of one stage in all rounds, joined with the samples of the step."""

    places: tuple[tuple[PlainRecord, int] | None, ...]
    """Record and row of each sample; None: no record has the sample."""

    def value(self, name: str, sample: int) -> Any:
        """Return the value of a field for a sample; None if it is not recorded."""
        place = self.places[sample]
        column = None if place is None else place[0].get(name)
        return None if place is None or column is None else column[place[1]]


@dataclass(frozen=True)
class StepJoin:
    """Reader of the records of one step, which joins them by sample."""

    paths: RunPaths
    step: int
    stages: tuple[StageInRound, ...]
    _records: dict[str, PlainRecord | None] = field(default_factory=dict)

    @staticmethod
    def of(run: RecordedRun, step: int) -> "StepJoin":
        """Return the join of a step of a run."""
        return StepJoin(run.paths, step, run.stages(step))

    @property
    def generated(self) -> tuple[str, ...]:
        """Stages that define the rows of the rewards, round by round; `NAME@-1` is a stage of the step before."""
        scored = self._named(REWARD)
        return tuple(dict.fromkeys(map(self._defining, scored))) or (ROLLOUT,)

    @cached_property
    def samples(self) -> tuple[SampleKey, ...]:
        """The samples of the step, in the order of generation.

        Raises the errors of `record_file.read`.
        """
        return tuple(dict.fromkeys(key for name in self.generated for key in self._keys(name)))

    @property
    def rounds(self) -> tuple[int, ...]:
        """Round of each sample."""
        return tuple(int(stage.partition(".")[2] or 1) for stage, _ in self.samples)

    def rollouts(self) -> JoinedRecords:
        """Return the rollouts of all samples."""
        return JoinedRecords(tuple(self._rollouts(key) for key in self.samples))

    def joined(self, stage: str) -> JoinedRecords:
        """Return the records of a stage.

        If several rows are of the same sample, the last row of the last round counts. Raises the errors of
        `record_file.read`.
        """
        places: dict[SampleKey, tuple[PlainRecord, int]] = {}
        for each in self._named(stage):
            record = self._record(each.name)
            if record is not None:
                places |= {key: (record, row) for row, key in enumerate(self._keys(self._defining(each)))}
        return JoinedRecords(tuple(places.get(key) for key in self.samples))

    def _named(self, stage: str) -> list[StageInRound]:
        """Return a stage in all of its rounds."""
        return [each for each in self.stages if each.name.partition(".")[0] == stage]

    def _defining(self, stage: StageInRound) -> str:
        """Return the stage that defines the rows of a stage's record."""
        rows = stage.entry.rows
        if rows is None:  # the rollouts of the same round
            _, dot, number = stage.entry.name.partition(".")
            rows = f"{ROLLOUT}{dot}{number}"
        return self._read_by(stage, rows)

    def _read_by(self, reader: StageInRound, name: str) -> str:
        """Return the stage, with its round, that the outline calls `name` where `reader` reads its record.

        A stage reads the records of its own round. After a loop, it reads the record of the last round.
        """
        rounds = [each for each in self.stages if each.entry.name == name]
        for each in rounds:
            if (each.entry.loop, each.round) == (reader.entry.loop, reader.round):
                return each.name
        return next((each.name for each in reversed(rounds) if self._record(each.name) is not None), name)

    def _keys(self, name: str) -> list[SampleKey]:
        """Return the sample of each row that a stage defines; an empty list if the stage is not committed."""
        record = self._record(name)
        if record is None:
            return []
        if record.kind != "selection":
            return [(name, row) for row in range(len(record["prompt_ids"]))]
        source = self._source(name)
        rounds, rows = record["rounds"].tolist(), record["rows"].tolist()
        keys = [(source if n == 1 else f"{source}.{n}", row) for n, row in zip(rounds, rows, strict=True)]
        for key, prompt, sample in zip(keys, record["prompt_ids"], record["sample_indices"], strict=True):
            self._require_sample(name, key, prompt, sample)
        return keys

    def _source(self, selection: str) -> str:
        """Return the stage of round 1 whose samples a selection selects from: its first input that has samples."""
        stage = next(each for each in self.stages if each.name == selection)
        found = (read for read in stage.entry.reads if _is_generated(self._record(read)))
        return next(found, ROLLOUT)

    def _require_sample(self, selection: str, key: SampleKey, prompt: str, sample: int) -> None:
        """Raise StorageError unless the row that a selection names has the sample that the selection names."""
        record, row = self._record(key[0]), key[1]
        ids = [] if record is None else list(zip(record["prompt_ids"], record["sample_indices"], strict=True))
        if not row < len(ids) or ids[row] != (prompt, sample):
            problem = f"row {row} of `{key[0]}` is not sample {sample} of prompt `{prompt}`"
            raise record_file.unknown(self.paths, *self.place(selection), ValueError(problem))

    def _rollouts(self, key: SampleKey) -> tuple[PlainRecord, int] | None:
        record = self._record(key[0])
        return None if record is None else (record, key[1])

    def _record(self, name: str) -> PlainRecord | None:
        """Return the record of a stage, which is read once; None if the stage is not committed."""
        if name not in self._records:
            self._records[name] = record_file.read(self.paths, *self.place(name))
        return self._records[name]

    def place(self, name: str) -> tuple[int, str]:
        """Return step and stage of a name."""
        stage, steps = stage_and_steps(name)
        return self.step - steps, stage


def _is_generated(record: PlainRecord | None) -> bool:
    return record is not None and record.kind == "rollouts"
