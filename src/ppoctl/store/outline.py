"""What the steps of a run consist of, as their story tells it. Written beside each recorded recipe, so that whoever
reads the directory knows its stages and roles from the directory itself. Light.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ppoctl.errors import CorruptArtifactError, quoted
from ppoctl.store import run_dir
from ppoctl.store.run_paths import RunPaths

EVAL = "eval"
"""The stage that follows a step of any story when the recipe asks for an evaluation."""


@dataclass(frozen=True)
class OutlineEntry:
    """One line of a story: a stage, what it is given, and which role comes out of it with new weights."""

    name: str
    reads: tuple[str, ...]
    """Roles, `prompts`, `carry`, and names of earlier stages, in the order in which the stage takes them."""
    trains: str | None = None


@dataclass(frozen=True)
class Outline:
    """The lines of one story."""

    story: str
    stages: tuple[OutlineEntry, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The stages in the order in which they are told."""
        return tuple(stage.name for stage in self.stages)

    @property
    def first(self) -> str:
        """The stage without which nothing of a step is there."""
        return self.names[0]

    @property
    def last(self) -> str:
        """The stage after which the step is over; an evaluation may follow."""
        return self.names[-1]

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that are read or trained, in the order in which they are met."""
        trained = {stage.trains for stage in self.stages}
        made = {"prompts", "carry", *self.names}
        read = [name for stage in self.stages for name in stage.reads if name not in made]
        return tuple(dict.fromkeys([*read, *sorted(role for role in trained if role is not None)]))

    def __getitem__(self, name: str) -> OutlineEntry:
        """The line of a stage. Raises KeyError when the story has no such stage."""
        return {stage.name: stage for stage in self.stages}[name]

    def training(self, role: str) -> OutlineEntry | None:
        """The line that trains the role; None where the story leaves it as it is."""
        return next((stage for stage in self.stages if stage.trains == role), None)

    def is_update(self, name: str) -> bool:
        """Whether the stage trains a role: what is recorded of it is run again rather than recalled."""
        return any(stage.name == name and stage.trains is not None for stage in self.stages)


@dataclass(frozen=True)
class Outlines:
    """The outlines of a run by the first step they hold for."""

    by_start: Mapping[int, Outline]

    def at(self, step: int) -> Outline:
        """The outline of a step; what comes before the first step counts as the first."""
        return self.by_start[max(start for start in self.by_start if start <= max(step, 1))]

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles of the run: those that have saved states."""
        return tuple(dict.fromkeys(role for outline in self.by_start.values() for role in outline.roles))

    def as_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return {str(start): asdict(outline) for start, outline in self.by_start.items()}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "Outlines":
        """What `as_json` gave. Raises KeyError, TypeError or ValueError when it is something else."""
        return Outlines({int(start): _outline(told) for start, told in found.items()})


def outlines_of(paths: RunPaths) -> Outlines:
    """What the steps of this run consist of: a recipe that was changed on the way tells its own stories from its
    first step on. Raises as `run_dir.facts` and `run_dir.asked` do."""
    run_dir.facts(paths)
    found: dict[int, Outline] = {}
    for start, asked in sorted(run_dir.read_recorded(paths).items()):
        told = _stories(paths, start, asked)
        found = {step: outline for step, outline in found.items() if step < start} | {start: told.at(start)}
        found |= {step: outline for step, outline in told.by_start.items() if step > start}
    return Outlines(found)


def _stories(paths: RunPaths, start: int, asked: Mapping[str, Any]) -> Outlines:
    try:
        return Outlines.from_json(asked[run_dir.STORIES])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptArtifactError(
            f"`{paths.recipe_from(start)}` does not say what the run's steps consist of",
            hint=f"bring it again from a copy of the run: ls {quoted(paths.root)}",
        ) from error


def _outline(told: Mapping[str, Any]) -> Outline:
    stages = (OutlineEntry(stage["name"], tuple(stage["reads"]), stage["trains"]) for stage in told["stages"])
    return Outline(told["story"], tuple(stages))
