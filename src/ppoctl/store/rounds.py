"""Stages of a step in all rounds of its loops. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ppoctl.core.errors import CorruptArtifactError
from ppoctl.store import manifest as manifests
from ppoctl.store.outline import Outline, OutlineEntry
from ppoctl.store.run_paths import RunPaths, folders

IS_FULL = "is_full"
"""Field in the `extra` of a selection's manifest: whether the selection ends the loop over rounds."""


@dataclass(frozen=True)
class StageInRound:
    """A stage of an outline in one round."""

    entry: OutlineEntry
    round: int = 1

    @property
    def name(self) -> str:
        """Name of the stage in this round: `rollout`, or `rollout.2` in round 2."""
        return self.entry.name if self.round == 1 else f"{self.entry.name}.{self.round}"


def stages_in_rounds(outline: Outline, rounds: Mapping[int, int]) -> tuple[StageInRound, ...]:
    """Return the stages in the order in which they run: all stages of a loop, round by round.

    `rounds` maps the number of a loop to its number of rounds.
    """
    return tuple(
        StageInRound(entry, number)
        for loop, entries in _parts(outline)
        for number in range(1, rounds.get(loop, 1) + 1)
        for entry in entries
    )


def stages_present(paths: RunPaths, step: int, outline: Outline) -> tuple[StageInRound, ...]:
    """Return the stages of a step in the order in which they run: those of the outline, and those of each further
    round that has a record, or that must follow because the selection of the round before is not full. Finished
    samples alone do not count: they may be those of a round that was generated early and is not needed.

    Raises StorageError if a manifest cannot be read.
    """
    return stages_in_rounds(outline, {loop: _rounds(paths, step, part) for loop, part in _parts(outline) if loop})


def is_after_the_last_round(paths: RunPaths, step: int, outline: Outline, stage: str) -> bool:
    """Whether the loop of a stage has ended before the round of the stage, so that its samples are not needed."""
    name, _, number = stage.partition(".")
    for loop, part in _parts(outline):
        if loop and name in (entry.name for entry in part):
            last = _rounds(paths, step, part)
            is_over = manifests.read(paths.stage(step, StageInRound(part[-1], last).name)) is not None
            return is_over and int(number or 1) > last
    return False


def _parts(outline: Outline) -> list[tuple[int, list[OutlineEntry]]]:
    """Return the stages of each loop, and those between loops, in order. The number 0 means no loop."""
    return [(loop, list(entries)) for loop, entries in groupby(outline.stages, key=lambda entry: entry.loop)]


def _rounds(paths: RunPaths, step: int, loop: Sequence[OutlineEntry]) -> int:
    """Return the number of rounds of a loop, as far as the step's folder shows."""
    at_most, on_disk = loop[0].at_most, set(folders(paths.step(step)))
    begun = [
        number
        for number in range(2, at_most + 1)
        for stage in (StageInRound(entry, number).name for entry in loop)
        if paths.stage(step, stage) in on_disk
    ]
    last = max(begun, default=1)
    return last + 1 if last < at_most and _is_followed(paths, step, loop, last) else last


def _is_followed(paths: RunPaths, step: int, loop: Sequence[OutlineEntry], number: int) -> bool:
    """Whether a committed selection of the round is not full."""
    for entry in loop:
        try:
            manifest = manifests.read(paths.stage(step, StageInRound(entry, number).name))
        except CorruptArtifactError:
            continue  # the resume plan reports the damage
        if manifest is not None and manifest.extra.get(IS_FULL) is False:
            return True
    return False
