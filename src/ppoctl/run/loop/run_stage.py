"""`run_stage` as a step function receives it: during a run, and during the replay of one update."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ppoctl.algorithms.stage_spec import UPDATE, Result, StageSpec
from ppoctl.algorithms.trace import Previous, Round, StepFunction, counted_rounds, placeholder_inputs
from ppoctl.core.batch.records import Record, Selection, State, Update
from ppoctl.core.batch.selection import AnyRecord, take, within
from ppoctl.store import manifest as manifests
from ppoctl.store.parallel_run import ParallelRuns
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import ParallelStage, Stage, StepRunner, load_record


@dataclass(frozen=True)
class RunningStep:
    """`run_stage` of a run: each stage is built, and its committed record is returned or the stage runs."""

    runner: StepRunner
    build: Callable[[StageSpec[Any]], Stage[Any]]
    parallel: ParallelRuns = field(default_factory=ParallelRuns)
    """Stages that run beside others, also of the step before."""
    _early: dict[str, ParallelStage[Any]] = field(default_factory=dict)
    """Stage of the next round, by its name. It may not have begun."""

    def __call__(self, stage: StageSpec[Result], *inputs: Any) -> Result:
        built = self.build(stage)
        if isinstance(built, ParallelStage):  # uses the engines
            self.parallel.finish()
        self._early.pop(stage.name, None)
        self.parallel.look()
        if stage.kind == UPDATE:
            self.parallel.before_update(inputs[0])
        result: Result = self.runner(_EndsLoop(built, self) if self._early else built, *inputs)
        return result

    def rounds(self, *, at_most: int) -> Iterator[Round]:
        yield from counted_rounds(self, at_most)
        self.drop_early()  # of a loop that something else than a selection ends

    def begin_early(self, stage: StageSpec[Any], *inputs: Any, beside: StageSpec[Any]) -> None:
        self._early[stage.name] = self._parallel_stage(stage)
        if not self.runner.is_committed(beside.name):
            self.meanwhile(stage, *inputs)

    def drop_early(self) -> tuple[int, float]:
        """Cancel the stage of the next round, if it has begun, and delete its finished samples. Return the number of
        tokens that were generated, and the seconds that this took."""
        tokens, seconds = 0, 0.0
        for name, early in list(self._early.items()):
            tokens, seconds = self.parallel.drop(self.runner.runner.gate)
            early.dropped()
            self.runner.remove_parts(name)
            del self._early[name]
        return tokens, seconds

    def meanwhile(self, stage: StageSpec[Any], *inputs: Any) -> None:
        states = tuple(each for each in inputs if isinstance(each, State))
        begin = partial(self.runner.begin, self._parallel_stage(stage), *inputs)
        self.parallel.begin(self.runner.step, states, begin)

    def _parallel_stage(self, stage: StageSpec[Any]) -> ParallelStage[Any]:
        built = self.build(stage)
        assert isinstance(built, ParallelStage), f"`{stage.name}` cannot run beside other stages"
        return built

    def take(self, selection: Selection, rounds: Sequence[AnyRecord], *, among: Selection | None = None) -> AnyRecord:
        return take(selection if among is None else within(selection, among), rounds)


@dataclass(frozen=True)
class StageAround:
    """Stage that runs another one, and does something before or after it. It has the name and the fingerprint of the
    other stage."""

    stage: Stage[Any]

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def fingerprint(self) -> str:
        return self.stage.fingerprint


@dataclass(frozen=True)
class _EndsLoop(StageAround):
    """Stage that may end a loop over rounds by a full selection. The stage of the next round is then cancelled before
    the selection is committed, so that the metrics of the selection include it."""

    step: RunningStep

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


def records_before(paths: RunPaths, step: int) -> Previous:
    """Return the reader of the steps before a step, which raises the errors of `recalled`."""

    def previous(stage: StageSpec[Result], steps: int = 1) -> Result:
        return recalled(paths, step - steps, stage)

    return previous


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
    previous = records_before(run_stage.paths, run_stage.step)
    try:
        step_function.run(run_stage, placeholder_inputs({parent.role: parent}, previous))
    except _ReplayedUpdate as stop:
        return stop.record
    raise AssertionError(f"`{step_function.name}` has no stage `{run_stage.update}`")


class _ReplayedUpdate(Exception):  # noqa: N818 - it ends a step function and is not an error
    def __init__(self, record: Update) -> None:
        self.record = record
