"""`once(stage, *inputs)`: what is committed is recalled, what is not is run and committed. There is no resume code.

Timing (by `clock`), figures, journal and observers wrap here, so that stages and the story stay free of them. A
recalled stage emits nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from ppoctl.batch import records
from ppoctl.batch.records import Record
from ppoctl.clock import WORK
from ppoctl.errors import StorageError, quoted
from ppoctl.ports import Gate
from ppoctl.store import artifact, record_file
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import Attempt
from ppoctl.store.journal import Journal, JournalLine
from ppoctl.store.manifest import Manifest
from ppoctl.store.run_paths import RECORD, RunPaths

Result = TypeVar("Result", covariant=True)


@runtime_checkable
class Identified(Protocol):
    """What a stage may take: something with a content digest or a lineage."""

    @property
    def identity(self) -> str: ...


@runtime_checkable
class Stage(Protocol[Result]):
    """One stage of a step."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Digest of the result keys that this stage reads."""
        ...

    def run(self, *inputs: Any) -> Record[Result]: ...


@runtime_checkable
class Observer(Protocol):
    """Told what happens; never changes it."""

    def on_stage(self, step: int, stage: str) -> None:
        """A stage starts to run."""
        ...

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        """A commit is at `writing`, `written` or `renamed`."""
        ...

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        """A stage that draws has so many finished samples of all, with so many tokens."""
        ...

    def on_committed(self, line: JournalLine) -> None:
        """A stage is committed; `line` is its line in the journal."""
        ...


@dataclass(frozen=True)
class StageRunner:
    """The memory of a run."""

    paths: RunPaths
    attempt: Attempt
    journal: Journal
    gate: Gate
    observers: Sequence[Observer] = ()
    versions: dict[str, str] = field(default_factory=dict)

    def at(self, step: int) -> "StepRunner":
        """`once` for the stages of one step."""
        return StepRunner(self, step)


@dataclass(frozen=True)
class StepRunner:
    """`once` of one step."""

    runner: StageRunner
    step: int

    def __call__(self, stage: Stage[Result], *inputs: Identified) -> Result:
        """The stage's result: recalled when it is committed with the same inputs and settings, else run.

        Raises StorageError when a committed artifact was made from something else: nothing is overwritten.
        """
        folder = self.runner.paths.stage(self.step, stage.name)
        identities = tuple(item.identity for item in inputs)
        manifest = manifests.read(folder)
        if manifest is None:
            record = self._run(stage, inputs, identities)
        else:
            self._require_same(stage, manifest, identities)
            self.runner.journal.ensure(manifest)
            record = load_record(self.runner.paths, self.step, stage.name, manifest)
        # Where it is recalled, too: a kill may have come between the commit and this.
        self.runner.attempt.remove(self.runner.paths.parts(self.step, stage.name))
        return record.result

    def _run(self, stage: Stage[Result], inputs: Sequence[Identified], identities: tuple[str, ...]) -> Record[Result]:
        self.runner.gate.before(self.step, stage.name)
        for observer in self.runner.observers:
            observer.on_stage(self.step, stage.name)
        started = WORK.now()
        record = stage.run(*inputs)
        manifest = Manifest(
            stage=stage.name,
            step=self.step,
            identity=record.identity,
            inputs=identities,
            fingerprint=stage.fingerprint,
            files={},
            seconds=WORK.now() - started,
            committed_at=time.time(),
            attempt=self.runner.attempt.number,
            figures=record.metrics(),
            versions=self.runner.versions,
            extra={"clocked": record.timing_metrics()},
        )
        folder = self.runner.paths.stage(self.step, stage.name)
        files = {RECORD: record.encoded, **record.readable_files()}
        committed = artifact.commit(
            folder,
            artifact.write_bytes(files),
            manifest,
            self.runner.attempt,
            moments(self.runner.observers, self.step, stage.name),
        )
        line = self.runner.journal.ensure(committed)
        for observer in self.runner.observers:
            if line is not None:
                observer.on_committed(line)
        return record

    def _require_same(self, stage: Stage[Any], manifest: Manifest, identities: tuple[str, ...]) -> None:
        folder = self.runner.paths.stage(self.step, stage.name)
        if manifest.inputs != identities:
            changed = [old for old, new in zip(manifest.inputs, identities, strict=False) if old != new]
            what = f"from other inputs (it has `{(changed or ['another number of them'])[0][:24]}`)"
        elif manifest.fingerprint != stage.fingerprint:
            what = f"with other recipe keys than step {self.step} is recorded with"
        else:
            return
        raise StorageError(
            f"`{folder}` was made {what}",
            hint=f"remove this stage and those after it to make them again: rm -r {quoted(folder)}",
        )


def moments(observers: Sequence[Observer], step: int, stage: str) -> artifact.Moment:
    """A function that tells the observers where the commit of this stage is."""

    def tell(moment: str) -> None:
        for observer in observers:
            observer.on_moment(step, stage, moment)

    return tell


def load_record(paths: RunPaths, step: int, stage: str, manifest: Manifest) -> Record[Any]:
    """A committed record, verified against its manifest. Raises CorruptArtifactError naming the file, StorageError
    where another version of ppoctl wrote it."""
    data = record_file.verified(paths, step, stage, manifest)
    try:
        return records.decode(data)
    except ValueError as error:
        raise record_file.unknown(paths, step, stage, error) from error
