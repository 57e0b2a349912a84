"""`run_stage` as a step function receives it: during a run, and during the replay of one update."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from ppoctl.algorithms.stage_spec import Result, StageSpec
from ppoctl.algorithms.trace import Round, StepFunction, counted_rounds, placeholder_inputs
from ppoctl.core.batch.records import Record, Selection, State, Update
from ppoctl.core.batch.selection import AnyRecord, take, within
from ppoctl.store import manifest as manifests
from ppoctl.store.parallel_run import ParallelRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import ParallelStage, Stage, StepRunner, load_record


@dataclass(frozen=True)
class _EarlyStage:
    """A stage of the next round."""

    stage: ParallelStage[Any]
    running: ParallelRun | None
    """The stage as it runs; None: it did not begin."""


@dataclass(frozen=True)
class RunningStep:
    """`run_stage` of a run: each stage is built, and its committed record is returned or the stage runs."""

    runner: StepRunner
    build: Callable[[StageSpec[Any]], Stage[Any]]
    _parallel: list[ParallelRun] = field(default_factory=list)
    """Stages that run beside others."""
    _early: dict[str, _EarlyStage] = field(default_factory=dict)
    """Stage of the next round, by its name."""

    def __call__(self, stage: StageSpec[Result], *inputs: Any) -> Result:
        for running in self._parallel:
            running.raise_error()
        early = self._early.get(stage.name)
        if early is not None and early.running is not None:
            record = early.running.finish()
            del self._early[stage.name]  # only now: after a stop in the wait, `completed` cancels it
            return cast(Result, record.result)
        self._early.pop(stage.name, None)
        built = self.build(stage)
        result: Result = self.runner(_EndsLoop(built, self) if self._early else built, *inputs)
        return result

    def rounds(self, *, at_most: int) -> Iterator[Round]:
        yield from counted_rounds(self, at_most)
        self.drop_early()  # of a loop that something else than a selection ends

    def begin_early(self, stage: StageSpec[Any], *inputs: Any, beside: StageSpec[Any]) -> None:
        built, running = self.build(stage), None
        assert isinstance(built, ParallelStage), f"`{stage.name}` cannot run beside other stages"
        if not self.runner.is_committed(beside.name):
            running = self.runner.begin(built, *inputs)
        self._early[stage.name] = _EarlyStage(built, running)
        if running is not None:
            running.start()

    def drop_early(self) -> tuple[int, float]:
        """Cancel the stage of the next round, if it has begun, and delete its finished samples. Return the number of
        tokens that were generated, and the seconds that this took."""
        tokens, seconds = 0, 0.0
        for name, early in list(self._early.items()):
            if early.running is not None:
                tokens, seconds = early.running.drop(self.runner.runner.gate)
                early.stage.dropped()
            self.runner.remove_parts(name)
            del self._early[name]
        return tokens, seconds

    def meanwhile(self, stage: StageSpec[Any], *inputs: Any) -> None:
        built = self.build(stage)
        assert isinstance(built, ParallelStage), f"`{stage.name}` cannot run beside other stages"
        if (running := self.runner.begin(built, *inputs)) is not None:
            self._parallel.append(running)
            running.start()

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Context of the step function: at its end, the stages that run beside others are waited for. After an error
        they are cancelled, and what they finished is kept."""
        try:
            yield
            for running in self._parallel:
                running.finish()
        except BaseException:
            early = (each.running for each in self._early.values() if each.running is not None)
            for running in (*self._parallel, *early):
                running.cancel()
            raise

    def take(self, selection: Selection, rounds: Sequence[AnyRecord], *, among: Selection | None = None) -> AnyRecord:
        return take(selection if among is None else within(selection, among), rounds)


@dataclass(frozen=True)
class _EndsLoop:
    """Stage that may end a loop over rounds by a full selection. The stage of the next round is then cancelled before
    the selection is committed, so that the metrics of the selection include it."""

    stage: Stage[Any]
    step: RunningStep

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def fingerprint(self) -> str:
        return self.stage.fingerprint

    def run(self, *inputs: Any) -> Record[Any]:
        record = self.stage.run(*inputs)
        if not (isinstance(record, Selection) and record.is_full):
            return record
        return replace(record, cancelled=self.step.drop_early())


def recalled(paths: RunPaths, step: int, stage: StageSpec[Result]) -> Result:
    """Return the committed result of a stage. Raises the errors of `load_record`, or StorageError if the stage is not
    committed."""
    manifest = manifests.require(paths.stage(step, stage.name))
    result: Result = load_record(paths, step, stage.name, manifest).result
    return result


@dataclass(frozen=True)
class ReplayingStep:
    """`run_stage` of a replay: it returns committed results, until the update that is replayed has run."""

    paths: RunPaths
    step: int
    update: str
    """Name of the update to run again."""
    build: Callable[[StageSpec[Any]], Stage[Any]]

    def __call__(self, stage: StageSpec[Result], *inputs: Any) -> Result:
        if stage.name == self.update:
            record = self.build(stage).run(*inputs)
            assert isinstance(record, Update), "only updates are replayed"
            raise _ReplayedUpdate(record)
        return recalled(self.paths, self.step, stage)

    def rounds(self, *, at_most: int) -> Iterator[Round]:
        return counted_rounds(self, at_most)

    def meanwhile(self, stage: StageSpec[Any], *inputs: Any) -> None:
        """Do nothing: no update of this step reads the record."""

    def begin_early(self, stage: StageSpec[Any], *inputs: Any, beside: StageSpec[Any]) -> None:
        """Do nothing: a stage that the step needs is committed."""

    def take(self, selection: Selection, rounds: Sequence[AnyRecord], *, among: Selection | None = None) -> AnyRecord:
        return take(selection if among is None else within(selection, among), rounds)


def replay(step_function: StepFunction, run_stage: ReplayingStep, parent: State) -> Update:
    """Run the step function on its committed records up to the update, and return the record of the update. `parent`
    is the state of the role before the step."""
    previous = partial(recalled, run_stage.paths, run_stage.step - 1)
    try:
        step_function.run(run_stage, placeholder_inputs({parent.role: parent}, previous))
    except _ReplayedUpdate as stop:
        return stop.record
    raise AssertionError(f"`{step_function.name}` has no stage `{run_stage.update}`")


class _ReplayedUpdate(Exception):  # noqa: N818 - it ends a step function and is not an error
    def __init__(self, record: Update) -> None:
        self.record = record
