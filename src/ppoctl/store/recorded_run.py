"""A run directory as it was recorded: each part is read when it is first asked for, and then kept. Imports no torch.

A command opens the run once and passes it on. A running attempt writes through `Attempt`, `Journal` and `States`;
after a change, `refresh` makes the run read the directory again.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ppoctl.core.batch.sealed_json import unseal
from ppoctl.core.errors import CorruptArtifactError, RecipeError, quoted
from ppoctl.store import manifest as manifests
from ppoctl.store.disk_errors import require_format, storage_error
from ppoctl.store.journal import JournalLine, read_lines
from ppoctl.store.manifest import Manifest
from ppoctl.store.outline import EVAL, Outline, Outlines
from ppoctl.store.rounds import StageInRound, stages_present
from ppoctl.store.run_paths import RunPaths

STORIES = "stories"
"""Key that a recorded recipe has in addition to its own keys: the outlines of its steps (`store.outline`)."""

Json = dict[str, Any]


class RecordedRun:
    """The run in a run directory: facts, recipes, outlines, journal, manifests and saved steps.

    Every property raises StorageError if a file cannot be read, and CorruptArtifactError if a file was changed after
    it was written, or is missing.
    """

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._manifests: dict[Path, Manifest | None] = {}

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Return the run in a folder. Raises the errors of `facts`, such as that it is not a run."""
        run = cls(RunPaths(folder))
        run.facts  # noqa: B018 - it raises if the folder is not a run
        return run

    def refresh(self) -> None:
        """Forget what was read: the directory has changed, or may have changed."""
        self._manifests = {}
        for name in [name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)]:
            del vars(self)[name]

    @cached_property
    def facts(self) -> Json:
        """Content of `run.json`.

        Raises RecipeError if the folder is not a run directory; StorageError if another version of ppoctl created it.
        """
        path = self.paths.run_json
        if not path.exists():
            raise RecipeError(f"`{self.paths.root}` is not a run directory", hint="ppoctl runs")
        content = _load(path, hint=f"restore it from a copy of the run: ls {quoted(self.paths.root)}")
        require_format(path, content.get("format"))
        return content

    @cached_property
    def _recorded(self) -> dict[int, Json]:
        """Recipes with their outlines, by the first step that they apply to."""
        paths = self.paths
        newest = f"the newest recipe is: ppoctl validate {quoted(paths.recipe_toml)} --show"
        by_start = {
            int(path.stem): _load(path, hint=f"restore it from a copy of the run; {newest}")
            for path in _recipe_files(paths)
        }
        if 1 not in by_start:
            make_folder = f"mkdir -p {quoted(paths.recipes)}"
            copy = f"{make_folder} && cp {quoted(paths.recipe_resolved)} {quoted(paths.recipe_from(1))}"
            raise CorruptArtifactError(
                f"`{paths.recipe_from(1)}` is missing: the recipe that the run began with",
                hint=f"restore it from a copy of the run; if no key was ever changed: {copy}",
            )
        return by_start

    @cached_property
    def recipes(self) -> dict[int, Json]:
        """Resolved recipes by the first step that they apply to."""
        return {
            start: {key: recorded[key] for key in recorded if key != STORIES}
            for start, recorded in self._recorded.items()
        }

    @property
    def recipe(self) -> Json:
        """Resolved recipe of the newest steps."""
        return self.recipes[max(self.recipes)]

    @cached_property
    def outlines(self) -> Outlines:
        """Outlines of the steps. A recipe that was changed during the run has its own from its first step on."""
        self.facts  # noqa: B018 - its error is more exact than that of a missing recipe
        by_start: dict[int, Outline] = {}
        for start, recorded in sorted(self._recorded.items()):
            found = self._outlines_in(start, recorded)
            earlier = {step: outline for step, outline in by_start.items() if step < start}
            later = {step: outline for step, outline in found.by_start.items() if step > start}
            by_start = {**earlier, start: found.at(start), **later}
        return Outlines(by_start)

    def _outlines_in(self, start: int, recorded: Mapping[str, Any]) -> Outlines:
        try:
            return Outlines.from_json(recorded[STORIES])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptArtifactError(
                f"`{self.paths.recipe_from(start)}` does not contain the stages of the run's steps",
                hint=f"restore it from a copy of the run: ls {quoted(self.paths.root)}",
            ) from error

    @cached_property
    def lines(self) -> list[JournalLine]:
        """Lines of the journal, without a last line that a kill cut short."""
        return read_lines(self.paths.journal)

    @cached_property
    def saved_steps(self) -> list[int]:
        """Steps at which all roles of the run have a committed state, oldest first."""
        return self.paths.saved_steps(*self.outlines.roles)

    @property
    def last_saved(self) -> int:
        """Last step of `saved_steps`; 0: no step."""
        return max(self.saved_steps, default=0)

    def stages(self, step: int) -> tuple[StageInRound, ...]:
        """Return the stages of a step, in all rounds that the step's folder has or must have (`stages_present`)."""
        return stages_present(self.paths, step, self.outlines.at(step))

    def manifest(self, step: int, stage: str) -> Manifest | None:
        """Return the manifest of a stage; None: it is not committed."""
        return self._manifest(self.paths.stage(step, stage))

    def state_manifest(self, role: str, step: int) -> Manifest | None:
        """Return the manifest of a saved state; None: there is none."""
        return self._manifest(self.paths.state(role, step))

    def evaluated_steps(self) -> list[int]:
        """Return the steps after which an evaluation ran, oldest first; 0: before the first step."""
        return [step for step in self.paths.committed_steps() if self.manifest(step, EVAL) is not None]

    def is_done(self, step: int) -> bool:
        """Whether the last stage of a step is committed."""
        return self.manifest(step, self.outlines.at(step).last) is not None

    def has_begun(self) -> bool:
        """Whether the run ever committed a stage of a step."""
        steps = filter(None, self.paths.committed_steps())
        return bool(self.paths.saved_states()) or any(map(self.paths.has_committed, steps))

    def _manifest(self, folder: Path) -> Manifest | None:
        if folder not in self._manifests:
            self._manifests[folder] = manifests.read(folder)
        return self._manifests[folder]


def _recipe_files(paths: RunPaths) -> list[Path]:
    try:
        # Not `glob`, which returns nothing for a folder without read permission.
        return sorted(path for path in paths.recipes.iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error(paths.recipes, error, doing="read") from error


def _load(path: Path, *, hint: str) -> Json:
    try:
        return unseal(path.read_bytes().decode("ascii"))
    except FileNotFoundError as error:
        raise CorruptArtifactError(f"`{path}` is missing", hint=hint) from error
    except OSError as error:
        raise storage_error(path, error, doing="read") from error
    except ValueError as error:
        raise CorruptArtifactError(f"`{path}` is corrupt: {error}", hint=hint) from error
