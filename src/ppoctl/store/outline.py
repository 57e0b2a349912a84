"""Outlines of the steps of a run: the recorded stage lists of its step functions. Imports no torch.

The outlines are written into each recorded recipe, so that a reader of the run directory finds its stages and roles.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

EVAL = "eval"
"""Name of the stage that follows a step of any step function if the recipe sets an evaluation."""

_BACK = "@-"
"""Sign between a stage and the number of steps before in which its record was made."""


def of_step_before(stage: str, steps: int = 1) -> str:
    """Return the name of an input that is a record of an earlier step: `NAME@-1` is of the step before."""
    return f"{stage}{_BACK}{steps}"


def stage_and_steps(name: str) -> tuple[str, int]:
    """Return the stage of an input, and how many steps before the record was made; 0: in the same step."""
    stage, sign, steps = name.partition(_BACK)
    return stage, int(steps) if sign else 0


@dataclass(frozen=True)
class OutlineEntry:
    """One stage of a step function: its name, its inputs, and the role that it trains."""

    name: str
    reads: tuple[str, ...]
    """Inputs in the order of the stage's arguments: roles, `prompts`, `carry`, and names of earlier stages. `NAME@-1`
    is the record of the stage NAME of the step before, `NAME@-2` that of two steps before."""
    trains: str | None = None
    """Role whose weights the stage changes; None: the stage trains no role."""
    rows: str | None = None
    """Stage that defines the rows of the record; None: the stage `rollout` of the same round, or the record has no
    rows."""
    at_most: int = 1
    """Maximum number of rounds in which the stage runs. Round 2 has the stage name `NAME.2`."""
    loop: int = 0
    """Number of the loop over rounds that contains the stage, from 1; 0: no loop."""


@dataclass(frozen=True)
class Outline:
    """The stages of one step function, in order."""

    story: str
    stages: tuple[OutlineEntry, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stages in the order in which they run."""
        return tuple(stage.name for stage in self.stages)

    @property
    def first(self) -> str:
        """First stage of the step. If its record is missing, the step has no records."""
        return self.names[0]

    @property
    def last(self) -> str:
        """Last stage of the step; an evaluation may follow."""
        return self.names[-1]

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are read, in the order of their first use, then roles that are only trained."""
        trained = {stage.trains for stage in self.stages}
        made = {"prompts", "carry", *self.names}
        reads = (name for stage in self.stages for name in stage.reads)
        read = [name for name in reads if name not in made and not stage_and_steps(name)[1]]
        return tuple(dict.fromkeys([*read, *sorted(role for role in trained if role is not None)]))

    def reads_before(self, steps: int = 1) -> frozenset[str]:
        """Return the stages whose records of `steps` steps before it the step reads."""
        reads = (stage_and_steps(name) for stage in self.stages for name in stage.reads)
        return frozenset(stage for stage, before in reads if before == steps)

    @property
    def reaches_back(self) -> int:
        """Number of steps before this one of which it reads records; 0: it reads none."""
        return max((stage_and_steps(name)[1] for stage in self.stages for name in stage.reads), default=0)

    def __getitem__(self, name: str) -> OutlineEntry:
        """Return the entry of a stage. Raises KeyError if the step function has no such stage."""
        return {stage.name: stage for stage in self.stages}[name]

    def training(self, role: str) -> OutlineEntry | None:
        """Return the entry that trains the role; None if no stage trains it."""
        return next((stage for stage in self.stages if stage.trains == role), None)


@dataclass(frozen=True)
class Outlines:
    """The outlines of a run by the first step that they apply to."""

    by_start: Mapping[int, Outline]

    def at(self, step: int) -> Outline:
        """Return the outline of a step; step 0 has the outline of step 1."""
        return self.by_start[max(start for start in self.by_start if start <= max(step, 1))]

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles of the run; each has saved states."""
        return tuple(dict.fromkeys(role for outline in self.by_start.values() for role in outline.roles))

    @property
    def reaches_back(self) -> int:
        """Highest number of steps before its own of which a step reads records."""
        return max((outline.reaches_back for outline in self.by_start.values()), default=0)

    def readers(self, step: int, stage: str) -> list[int]:
        """Return the later steps that read the stage's record of a step, in order."""
        after = range(step + 1, step + self.reaches_back + 1)
        return [later for later in after if stage in self.at(later).reads_before(later - step)]

    def read_after(self, step: int) -> frozenset[tuple[int, str]]:
        """Return step and stage of each record up to a step that later steps read."""
        farthest = self.reaches_back
        return frozenset(
            (later - back, stage)
            for later in range(step + 1, step + farthest + 1)
            for back in range(later - step, min(farthest, later - 1) + 1)
            for stage in self.at(later).reads_before(back)
        )

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form that `from_json` reads."""
        return {str(start): _as_json(outline) for start, outline in self.by_start.items()}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "Outlines":
        """Return the outlines from the result of `as_json`. Raises KeyError, TypeError or ValueError otherwise."""
        return Outlines({int(start): _outline(fields) for start, fields in found.items()})


_LATER_FIELDS = ("rows", "at_most", "loop")
"""Fields of an entry that are written only if they differ from their default: outlines of earlier versions stay equal
to the byte."""


def _as_json(outline: Outline) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(OutlineEntry)}
    entries = [
        {name: value for name, value in asdict(entry).items() if name not in _LATER_FIELDS or value != defaults[name]}
        for entry in outline.stages
    ]
    return {"story": outline.story, "stages": entries}


def _outline(found: Mapping[str, Any]) -> Outline:
    entries = ({**stage, "reads": tuple(stage["reads"])} for stage in found["stages"])
    return Outline(found["story"], tuple(OutlineEntry(**entry) for entry in entries))
