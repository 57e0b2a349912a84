"""Step functions, and traces of step functions.

A *step function* is a Python function that calls `run_stage(SPEC, *inputs)` once for each stage, in order. During
training, `run_stage` returns the committed record of the stage if there is one; otherwise it runs the stage and
commits the record (`loop.run_stage`). A replay returns every committed record and runs one update again.

A *trace* calls the step function with placeholders and a `run_stage` that only records the calls, as
`jax.make_jaxpr` does. It gives the order of the stages, their inputs, the roles, the trained roles, the loops over
rounds, and the rows of each record, without a second declaration. A step function therefore must not branch on a
value that a stage computes. The only exception is `Round.end_if`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from ppoctl.algorithms.stage_spec import UPDATE, Result, StageSpec
from ppoctl.store.outline import Outline, OutlineEntry, of_step_before, stage_and_steps

if TYPE_CHECKING:
    from ppoctl.core.batch.prompts import Prompts
    from ppoctl.core.batch.records import Carry, Rewards, Rollouts, Selection, State
    from ppoctl.core.batch.selection import AnyRecord


class Previous(Protocol):
    """Reader of steps before."""

    def __call__(self, stage: StageSpec[Result], steps: int = 1) -> Result:
        """Return the result of a stage `steps` steps before."""
        ...


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step."""

    states: "Mapping[str, State]"
    """Role -> its state at the beginning of the step."""
    carry: "Carry"
    prompts_of: "Callable[[int], Prompts]"
    """Round of generation, from 1 -> its prompts."""
    prompts_of_last: "Callable[[int], Prompts]"
    """Number of steps -> the prompts of the last steps, of which this step is one."""
    previous: Previous

    @property
    def prompts(self) -> "Prompts":
        """Prompts of a step with one round."""
        return self.prompts_of(1)


@dataclass(frozen=True)
class StepOutputs:
    """Outputs of a step, and the samples that the ledger records."""

    states: "Mapping[str, State]"
    """States of the roles that were trained. The other roles are unchanged."""
    carry: "Carry"
    samples: "tuple[tuple[Rollouts, Rewards], ...]"
    """Rollouts and rewards of each round of generation."""

    @property
    def rounds(self) -> int:
        """Number of batches of prompts that the step used."""
        return len(self.samples)


class RunStage(Protocol):
    """Runner of stages that a step function receives: of a run, of a replay, or of a trace."""

    def __call__(self, stage: StageSpec[Result], *inputs: Any) -> Result:
        """Return the result of the stage. An input is None if the algorithm does not have it."""
        ...

    def rounds(self, *, at_most: int) -> "Iterator[Round]":
        """Yield rounds until a round calls `end_if` with a true value, or until there were `at_most` rounds."""
        ...

    def meanwhile(self, stage: StageSpec[Any], *inputs: Any) -> None:
        """Run the stage while the stages after it run. Its record is committed after the last of them, or in the next
        step if it `may_end_later`. Only later steps read it (`StepInputs.previous`)."""
        ...

    def begin_early(self, stage: StageSpec[Any], *inputs: Any, beside: StageSpec[Any]) -> None:
        """Begin a stage of the next round, to run while the stage `beside` runs; if that one is committed, begin
        nothing. The call of the stage then waits for it. If the loop ends before this call, the stage is cancelled,
        and nothing of it remains."""
        ...

    def take(
        self, selection: "Selection", rounds: "Sequence[AnyRecord]", *, among: "Selection | None" = None
    ) -> "AnyRecord":
        """Return the selected rows of records of one kind, one record of each round. The result is not committed.

        With `among`, there is one record, whose rows are those of that selection.
        """
        ...


@dataclass
class Round:
    """`run_stage` of one round. From the second round on, the number of the round is added to the stage names."""

    number: int
    """Number of the round, from 1."""
    run_stage: RunStage
    is_last: bool = False

    def __call__(self, stage: StageSpec[Result], *inputs: Any) -> Result:
        """Return the result of the stage in this round."""
        return self.run_stage(_in_round(stage, self.number), *inputs)

    def begin_next(self, stage: StageSpec[Any], *inputs: Any, beside: StageSpec[Any]) -> None:
        """Begin a stage of the next round, while the stage `beside` of this round runs (`RunStage.begin_early`)."""
        self.run_stage.begin_early(_in_round(stage, self.number + 1), *inputs, beside=_in_round(beside, self.number))

    def end_if(self, when: Any) -> None:
        """End the loop after this round if `when` is true. It must come from a committed record, so that a resume
        and a replay end the loop after the same round."""
        self.is_last = isinstance(when, Placeholder) or bool(when)


def _in_round(stage: StageSpec[Result], number: int) -> StageSpec[Result]:
    """Return the stage with its name in a round."""
    return stage if number == 1 else replace(stage, name=f"{stage.name}.{number}")


def counted_rounds(run_stage: RunStage, at_most: int) -> Iterator[Round]:
    """Yield the rounds of a step that runs or that is replayed."""
    for number in range(1, at_most + 1):
        current = Round(number, run_stage)
        yield current
        if current.is_last:
            return


StepBody = Callable[[RunStage, StepInputs], StepOutputs]


@dataclass(frozen=True)
class StepFunction:
    """Named definition of a step. The name is written to the outline."""

    name: str
    run: StepBody


@dataclass(frozen=True)
class StageCall:
    """One call of a stage in a trace."""

    stage: StageSpec[Any]
    entry: OutlineEntry
    """Inputs, trained role, rows and rounds, as the outline records them."""
    rows: str = ""
    """Stage that defines the rows of the record or, for an update, of its inputs; empty: there are no rows."""
    is_parallel: bool = False
    """Whether the stage runs while other stages run (`RunStage.meanwhile`)."""


@dataclass(frozen=True)
class Trace:
    """The calls of a step function, in order."""

    step_function: str
    calls: tuple[StageCall, ...]

    @cached_property
    def outline(self) -> Outline:
        """The part of the trace that a run directory records."""
        return Outline(self.step_function, tuple(call.entry for call in self.calls))

    @property
    def stages(self) -> tuple[StageSpec[Any], ...]:
        """Specs of the stages, in order. A loop contains the stages of one round."""
        return tuple(call.stage for call in self.calls)

    def __getitem__(self, name: str) -> StageSpec[Any]:
        """Return the spec of a stage, in any of its rounds. Raises KeyError if the step function has no such
        stage."""
        return self._by_name[name] if name in self._by_name else self._by_name[name.partition(".")[0]]

    def __contains__(self, name: str) -> bool:
        """Return whether the step function runs a stage of this name in one of its rounds."""
        return name in self._by_name or name.partition(".")[0] in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, StageSpec[Any]]:
        return {stage.name: stage for stage in self.stages}

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are read or trained."""
        return self.outline.roles


def trace(step_function: StepFunction) -> Trace:
    """Return the calls of the step function on placeholders.

    Raises TypeError if the step function branches on a value that a stage computes, if a stage receives records with
    different rows and does not join them, if two stages have the same name, or if a loop over rounds is inside
    another one or ends by `break`.
    """
    tracer = _Tracer()
    outputs = step_function.run(tracer, placeholder_inputs({}))
    parallel = {stage.name for stage, _ in tracer.parallel}
    for stage, inputs in tracer.parallel:
        if not stage.may_end_later:
            tracer(stage, *inputs)
    if tracer.is_in_loop:
        raise TypeError(f"`{step_function.name}` leaves a loop over rounds; only `Round.end_if` may end it")
    trained = {str(state): role for role, state in outputs.states.items()}
    calls = (
        replace(
            call,
            entry=replace(call.entry, trains=trained.get(call.stage.name), rows=tracer.rows_of(call.stage)),
            rows=tracer.defining_rows_of(call.stage),
            is_parallel=call.stage.name in parallel,
        )
        for call in tracer.calls
    )
    return Trace(step_function.name, tuple(calls))


def placeholder_inputs(states: "Mapping[str, State]", previous: Previous | None = None) -> StepInputs:
    """Return inputs of a trace or a replay: the given states and previous records, and placeholders for the rest."""
    prompts: Any = Placeholder("prompts")
    carry: Any = Placeholder("carry")
    any_prompts = (lambda _: prompts), (lambda _: prompts)
    return StepInputs(_PlaceholderStates(states), carry, *any_prompts, previous or _previous_placeholder)


def _previous_placeholder(stage: StageSpec[Any], steps: int = 1) -> Any:
    """Return a placeholder for the record of a stage in a step before."""
    name = of_step_before(stage.name, steps)
    return Placeholder(name, name)


@dataclass(frozen=True, eq=False)
class Placeholder:
    """Placeholder for a record in a trace, with the name of the stage or input that produced the record."""

    name: str
    rows: str = ""
    """Stage that defines the rows of the record, or a record of an earlier step that has the same rows; empty: no
    rows."""

    def __str__(self) -> str:
        return self.name

    def __getattr__(self, part: str) -> "Placeholder":
        if part.startswith("__"):
            raise AttributeError(part)
        return Placeholder(self.name)  # a part of a record, such as its carry, has no rows

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(f"a step function reads a value that `{self.name}` computes; only `Round.end_if` may read it")

    __bool__ = __len__ = __iter__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __int__ = __float__ = _refuse
    __hash__ = object.__hash__


class _PlaceholderStates(dict[str, Any]):
    """Role states for a trace: every role can be looked up."""

    def __missing__(self, role: str) -> Placeholder:
        return Placeholder(role)


@dataclass
class _Tracer:
    """`run_stage` that records the calls. It runs one round of each loop."""

    calls: list[StageCall] = field(default_factory=list)
    loops: int = 0
    """Number of loops so far."""
    at_most: int = 1
    """Maximum number of rounds of the current loop; 1 outside loops."""
    is_in_loop: bool = False
    parallel: list[tuple[StageSpec[Any], tuple[Any, ...]]] = field(default_factory=list)
    """Stages that run beside others, with their inputs."""
    row_sets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Stage -> the rows of its inputs, or its own name if it defines its rows."""

    def __call__(self, stage: StageSpec[Any], *inputs: Any) -> Any:
        if stage.name in (call.stage.name for call in self.calls):
            raise TypeError(f"two stages of a step function are called `{stage.name}`")
        given = [each for each in inputs if each is not None]
        of_inputs = tuple(dict.fromkeys(each.rows for each in given if each.rows))
        if stage.joins_by_prompt:
            of_inputs = of_inputs[:1]
        self.row_sets[stage.name] = (stage.name,) if stage.defines_rows else of_inputs
        reads, loop = tuple(map(str, given)), self.loops if self.at_most > 1 else 0
        self.calls.append(StageCall(stage, OutlineEntry(stage.name, reads, at_most=self.at_most, loop=loop)))
        return Placeholder(stage.name, "" if stage.kind == UPDATE else next(iter(self.row_sets[stage.name]), ""))

    def defining_rows_of(self, stage: StageSpec[Any]) -> str:
        """Return the stage that defines the rows of a stage's inputs, or of its record; empty: there are no rows.
        Raises TypeError if the inputs have different rows."""
        rows = list(dict.fromkeys(map(self._defining, self.row_sets[stage.name])))
        if len(rows) > 1:
            raise TypeError(f"stage `{stage.name}` receives records with different rows: those of {sorted(rows)}")
        return rows[0] if rows else ""

    def rows_of(self, stage: StageSpec[Any]) -> str | None:
        """Return the rows of the stage's record as the outline records them."""
        rows = self.defining_rows_of(stage)
        _, dot, number = stage.name.partition(".")
        return None if stage.kind == UPDATE or rows in ("", f"{ROLLOUT_NAME}{dot}{number}") else rows

    def _defining(self, rows: str) -> str:
        """Return the stage that defines these rows. Steps before are assumed to have the stages of this step."""
        name, steps = stage_and_steps(rows)
        return of_step_before(next(iter(self.row_sets.get(name, ())), name), steps) if steps else rows

    def rounds(self, *, at_most: int) -> Iterator[Round]:
        if self.is_in_loop:
            raise TypeError("a step function has a loop over rounds inside another one")
        self.is_in_loop, self.at_most = True, at_most
        self.loops += 1
        yield Round(1, self)
        self.is_in_loop, self.at_most = False, 1

    def meanwhile(self, stage: StageSpec[Any], *inputs: Any) -> None:
        if stage.may_end_later:  # the last stage of a step is committed when the step ends
            self(stage, *inputs)
        self.parallel.append((stage, inputs))

    def begin_early(self, stage: StageSpec[Any], *inputs: Any, beside: StageSpec[Any]) -> None:
        """Do nothing: the next round has the stages of this one."""

    def take(self, selection: Any, rounds: Sequence[Any], *, among: Any = None) -> Any:
        return Placeholder(rounds[0].name, selection.name)


ROLLOUT_NAME = "rollout"
"""Stage that defines the rows of the records of a round, unless another stage defines them."""
