"""Outlines of the steps of a run: the recorded stage lists of its step functions. Imports no torch.

The outlines are written into each recorded recipe, so that a reader of the run directory finds its stages and roles.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

EVAL = "eval"
"""Name of the stage that follows a step of any step function if the recipe sets an evaluation."""

PREVIOUS = "@-1"
"""Suffix of an input that is the record of the step before."""


@dataclass(frozen=True)
class OutlineEntry:
    """One stage of a step function: its name, its inputs, and the role that it trains."""

    name: str
    reads: tuple[str, ...]
    """Inputs in the order of the stage's arguments: roles, `prompts`, `carry`, and names of earlier stages. `NAME@-1`
    is the record of the stage NAME of the step before."""
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
        read = [name for name in reads if name not in made and not name.endswith(PREVIOUS)]
        return tuple(dict.fromkeys([*read, *sorted(role for role in trained if role is not None)]))

    @property
    def reads_before(self) -> frozenset[str]:
        """Stages of the step before whose records the step reads."""
        reads = (name for stage in self.stages for name in stage.reads)
        return frozenset(name.removesuffix(PREVIOUS) for name in reads if name.endswith(PREVIOUS))

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
        """Number of steps before its own whose records a step reads: 0 or 1."""
        return max((int(bool(outline.reads_before)) for outline in self.by_start.values()), default=0)

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
