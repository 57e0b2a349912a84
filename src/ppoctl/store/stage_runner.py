"""`run_stage(stage, *inputs)`: return the committed result of a stage, or run the stage and commit its result.

A run resumes through this function; there is no other resume code. Timing (by `clock`), metrics, the journal and
observers are handled in this module, so that stages and the step function are independent of them. Observers receive
no events for a reused stage.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from ppoctl.core.batch import records
from ppoctl.core.batch.records import Record
from ppoctl.core.clock import WORK
from ppoctl.core.errors import StorageError, quoted
from ppoctl.core.measured import MEASUREMENTS, Measured
from ppoctl.core.ports import Gate, OnProgress
from ppoctl.store import artifact, record_file
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import Attempt
from ppoctl.store.journal import BEGAN_AT, Journal, JournalLine
from ppoctl.store.manifest import Manifest
from ppoctl.store.parallel_run import ParallelRun
from ppoctl.store.run_paths import RECORD, RunPaths

Result = TypeVar("Result", covariant=True)


@runtime_checkable
class Identified(Protocol):
    """An input of a stage: any object with a content digest or a lineage."""

    @property
    def identity(self) -> str: ...


@runtime_checkable
class Stage(Protocol[Result]):
    """One stage of a step."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Digest of the recipe keys that this stage reads and that affect results."""
        ...

    def run(self, *inputs: Any) -> Record[Result]: ...


@runtime_checkable
class ParallelStage(Stage[Result], Protocol[Result]):
    """A stage that can run while other stages of the step run."""

    def begin(self, *inputs: Any) -> Callable[[Gate, OnProgress], Record[Result]]:
        """Do everything that needs a trainer. Return the rest, which another thread runs; its gate raises when it
        must stop."""
        ...

    def dropped(self) -> None:
        """Cancel what the stage has started besides its record, which is not needed."""
        ...


@runtime_checkable
class Observer(Protocol):
    """Receiver of the events of a run. It never changes the run."""

    def on_stage(self, step: int, stage: str) -> None:
        """Handle the start of a stage."""
        ...

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        """Handle a moment of a commit: `writing`, `written` or `renamed`."""
        ...

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        """Handle the progress of generation: `done` of `total` samples have finished, with `tokens` tokens."""
        ...

    def on_committed(self, line: JournalLine) -> None:
        """Handle the commit of a stage; `line` is its line in the journal."""
        ...


@dataclass(frozen=True)
class StageRunner:
    """Source of the `run_stage` functions of a run, one for each step."""

    paths: RunPaths
    attempt: Attempt
    journal: Journal
    gate: Gate
    observers: Sequence[Observer] = ()
    versions: dict[str, str] = field(default_factory=dict)
    measure: Callable[[str, str, Measured], Mapping[str, float]] = lambda *_: {}
    """Returns the metrics of what was measured during a stage, by its name and the kind of its record."""

    def at(self, step: int) -> "StepRunner":
        """Return `run_stage` for the stages of one step."""
        return StepRunner(self, step)


@dataclass(frozen=True)
class StepRunner:
    """The `run_stage` function of one step."""

    runner: StageRunner
    step: int

    def __call__(self, stage: Stage[Result], *inputs: Identified | None) -> Result:
        """Return the committed result if the stage has one for these inputs and settings; otherwise run the stage.

        An input is None if the algorithm does not have it; the stage receives None, and the manifest omits it.
        Raises StorageError if the committed artifact has other inputs or settings. Nothing is overwritten.
        """
        folder = self.runner.paths.stage(self.step, stage.name)
        identities = tuple(item.identity for item in inputs if item is not None)
        manifest = manifests.read(folder)
        if manifest is None:
            record = self._run(stage, inputs, identities)
        else:
            self._require_same(stage, manifest, identities)
            self.runner.journal.ensure(manifest)
            record = load_record(self.runner.paths, self.step, stage.name, manifest)
        # Also after a reuse: a kill may have come between the commit and this line.
        self.runner.attempt.remove(self.runner.paths.parts(self.step, stage.name))
        return record.result

    def begin(self, stage: ParallelStage[Result], *inputs: Identified | None) -> "ParallelRun | None":
        """Begin to run a stage in another thread; None: its result is committed for these inputs and settings.

        Raises the errors of a call.
        """
        manifest = manifests.read(self.runner.paths.stage(self.step, stage.name))
        if manifest is not None:
            self(stage, *inputs)
            return None
        self._enter(stage)
        started = WORK.now()
        work = stage.begin(*inputs)
        begun_s, during, began_at = WORK.now() - started, MEASUREMENTS.take(), time.time()

        def commit(record: Record[Any], in_thread: Measured, waited_s: float) -> None:
            identities = tuple(item.identity for item in inputs if item is not None)
            self._commit(stage, record, identities, begun_s + waited_s, during + in_thread, {BEGAN_AT: began_at})
            self.remove_parts(stage.name)

        return ParallelRun(work, commit, partial(self._wait_for, stage), self._on_progress)

    def is_committed(self, stage: str) -> bool:
        """Whether the stage of this name is committed."""
        return manifests.read(self.runner.paths.stage(self.step, stage)) is not None

    def remove_parts(self, stage: str) -> None:
        """Delete the finished samples of a stage that is not needed."""
        self.runner.attempt.remove(self.runner.paths.parts(self.step, stage))

    def _wait_for(self, stage: Stage[Any]) -> Gate:
        """Ask the gate, notify the observers that the step waits for the stage, and return the gate of the wait."""
        self.runner.gate.before(self.step, stage.name)
        for observer in self.runner.observers:
            observer.on_stage(self.step, stage.name)
        return self.runner.gate

    def _on_progress(self, done: int, total: int, tokens: int) -> None:
        for observer in self.runner.observers:
            observer.on_progress(done, total, tokens)

    def _enter(self, stage: Stage[Any]) -> None:
        """Ask the gate and notify the observers before the stage runs."""
        self.runner.gate.before(self.step, stage.name)
        for observer in self.runner.observers:
            observer.on_stage(self.step, stage.name)
        MEASUREMENTS.take()  # of a replay, or of a stage that failed

    def _run(
        self, stage: Stage[Result], inputs: Sequence[Identified | None], identities: tuple[str, ...]
    ) -> Record[Result]:
        self._enter(stage)
        started = WORK.now()
        record = stage.run(*inputs)
        self._commit(stage, record, identities, WORK.now() - started, MEASUREMENTS.take())
        return record

    def _commit(
        self,
        stage: Stage[Any],
        record: Record[Any],
        identities: tuple[str, ...],
        seconds: float,
        during: Measured,
        of_parallel: Mapping[str, float] | None = None,
    ) -> None:
        measured = self.runner.measure(stage.name, record.kind, during)
        manifest = Manifest(
            stage=stage.name,
            step=self.step,
            identity=record.identity,
            inputs=identities,
            fingerprint=stage.fingerprint,
            files={},
            seconds=seconds,
            committed_at=time.time(),
            attempt=self.runner.attempt.number,
            figures=record.metrics(),
            versions=self.runner.versions,
            extra={
                "clocked": {**record.timing_metrics(), **measured},
                **record.manifest_fields(),
                **(of_parallel or {}),
            },
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

    def _require_same(self, stage: Stage[Any], manifest: Manifest, identities: tuple[str, ...]) -> None:
        folder = self.runner.paths.stage(self.step, stage.name)
        if manifest.inputs != identities:
            changed = [old for old, new in zip(manifest.inputs, identities, strict=False) if old != new]
            origin = f"from other inputs (it has `{(changed or ['another number of inputs'])[0][:24]}`)"
        elif manifest.fingerprint != stage.fingerprint:
            origin = f"with other recipe keys than those recorded for step {self.step}"
        else:
            return
        raise StorageError(
            f"`{folder}` was created {origin}",
            hint=f"remove this stage and the stages after it to run them again: rm -r {quoted(folder)}",
        )


def moments(observers: Sequence[Observer], step: int, stage: str) -> artifact.Moment:
    """Return a function that reports the moments of this stage's commit to the observers."""

    def notify(moment: str) -> None:
        for observer in observers:
            observer.on_moment(step, stage, moment)

    return notify


def load_record(paths: RunPaths, step: int, stage: str, manifest: Manifest) -> Record[Any]:
    """Read a committed record and verify it against its manifest.

    Raises CorruptArtifactError naming the file; StorageError if another version of ppoctl wrote the record.
    """
    data = record_file.verified(paths, step, stage, manifest)
    try:
        return records.decode(data)
    except ValueError as error:
        raise record_file.unknown(paths, step, stage, error) from error
