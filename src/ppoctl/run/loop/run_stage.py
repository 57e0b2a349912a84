"""`run_stage` as a step function receives it: during a run, and during the replay of one update."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ppoctl.algorithms.stage_spec import UPDATE, Result, StageSpec
from ppoctl.algorithms.trace import Round, StepFunction, counted_rounds, placeholder_inputs
from ppoctl.core.batch.records import Selection, State, Update
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

    def __call__(self, stage: StageSpec[Result], *inputs: Any) -> Result:
        built = self.build(stage)
        if isinstance(built, ParallelStage):  # uses the engines
            self.parallel.finish()
        self.parallel.look()
        if stage.kind == UPDATE:
            self.parallel.before_update(inputs[0])
        result: Result = self.runner(built, *inputs)
        return result

    def rounds(self, *, at_most: int) -> Iterator[Round]:
        return counted_rounds(self, at_most)

    def meanwhile(self, stage: StageSpec[Any], *inputs: Any) -> None:
        built = self.build(stage)
        assert isinstance(built, ParallelStage), f"`{stage.name}` cannot run beside other stages"
        states = tuple(each for each in inputs if isinstance(each, State))
        self.parallel.begin(self.runner.step, states, partial(self.runner.begin, built, *inputs))

    def take(self, selection: Selection, rounds: Sequence[AnyRecord], *, among: Selection | None = None) -> AnyRecord:
        return take(selection if among is None else within(selection, among), rounds)


def recalled(paths: RunPaths, step: int, stage: StageSpec[Result], steps: int = 1) -> Result:
    """Return the committed result of a stage `steps` steps before a step. Raises the errors of `load_record`, or
    StorageError if the stage is not committed."""
    manifest = manifests.require(paths.stage(step - steps, stage.name))
    result: Result = load_record(paths, step - steps, stage.name, manifest).result
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
        return recalled(self.paths, self.step, stage, 0)

    def rounds(self, *, at_most: int) -> Iterator[Round]:
        return counted_rounds(self, at_most)

    def meanwhile(self, stage: StageSpec[Any], *inputs: Any) -> None:
        """Do nothing: no update of this step reads the record."""

    def take(self, selection: Selection, rounds: Sequence[AnyRecord], *, among: Selection | None = None) -> AnyRecord:
        return take(selection if among is None else within(selection, among), rounds)


def replay(step_function: StepFunction, run_stage: ReplayingStep, parent: State) -> Update:
    """Run the step function on its committed records up to the update, and return the record of the update. `parent`
    is the state of the role before the step."""
    previous = partial(recalled, run_stage.paths, run_stage.step)
    try:
        step_function.run(run_stage, placeholder_inputs({parent.role: parent}, previous))
    except _ReplayedUpdate as stop:
        return stop.record
    raise AssertionError(f"`{step_function.name}` has no stage `{run_stage.update}`")


class _ReplayedUpdate(Exception):  # noqa: N818 - it ends a step function and is not an error
    def __init__(self, record: Update) -> None:
        self.record = record
