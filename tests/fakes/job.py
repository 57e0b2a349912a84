"""A complete run on fake engines, in a directory."""

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import pytest

from fakes.components import fake_components, fake_recipe
from fakes.fingerprints import SPECS
from fakes.turns import TURNS
from ppoctl.algorithms.choose import StepFunctionAt, step_function_at
from ppoctl.algorithms.ppo import PPO
from ppoctl.algorithms.trace import trace
from ppoctl.core.errors import PreemptedError
from ppoctl.core.ports import Gate, Generator
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.steps import RunContext, run
from ppoctl.run.run_recipe import as_recorded
from ppoctl.run.wire.components import Components
from ppoctl.run.wire.run_context import RunHooks, assemble
from ppoctl.show.tracking.health import HealthMonitor
from ppoctl.store import artifact, run_dir
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.journal import JournalLine, read_lines
from ppoctl.store.outline import Outlines
from ppoctl.store.recorded_run import STORIES, RecordedRun
from ppoctl.store.run_paths import RunPaths

BESIDE_OTHERS = re.compile("[0-9]+ (next_rollout|rollout[.][0-9]+) starts")
"""The moment at which the step begins to wait for a stage beside others. It is also the moment at which the stage
begins, if no thread runs yet."""


@dataclass
class Witness:
    """Records every moment of a run; calls `act` with the number and name of each moment."""

    act: Callable[[int, str], None] = lambda number, name: None
    looks: float | Mapping[str, float] = 1
    """Number of polls of a background save until half a file more is written. Infinite: nothing is written before the
    save is waited for. One number, or one per role, so that either role can be published first."""
    moments: list[str] = field(default_factory=list)
    turns: bool = False
    """Whether each turn of an episode, each observation, and each call of an environment is a moment."""
    stage: str = ""
    """The stage that runs, or that ran last."""
    waits_to_its_end: bool = True
    """Whether a stage beside others ends at the moment when the step begins to wait for it."""
    committed: list[JournalLine] = field(default_factory=list)

    def record(self, name: str) -> None:
        if self.waits_to_its_end and BESIDE_OTHERS.fullmatch(name):
            TURNS.give(inf)
        else:
            TURNS.give_at(len(self.moments))
        self.moments.append(name)
        with TURNS.free_after_an_error():
            self.act(len(self.moments) - 1, name)

    def on_stage(self, step: int, stage: str) -> None:
        self.stage = stage
        self.record(f"{step} {stage} starts")

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        self.record(f"{step} {stage} {moment}")

    def on_committed(self, line: JournalLine) -> None:
        self.committed.append(line)

    def on_minibatch(self, role: str, number: int) -> None:
        if number == 1:
            self.record(f"inside {role}_update after a minibatch")

    def on_file(self, role: str, number: int) -> None:
        self.record(f"inside state/{role} after {number} half files")

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        if done == total // 2 or self.turns:
            self.record(f"inside {self.stage} after {done} samples")

    def on_environment(self, call: str) -> None:
        if self.turns:
            self.record(f"inside {self.stage} at environment {call}")


class StopError(Exception):
    """Raised to end a run at the point that a test chose."""


def stopping_at(moment: str, *, looks: float = 1) -> Witness:
    """Return a witness that ends the run at this moment."""

    def act(number: int, name: str) -> None:
        if name == moment:
            raise StopError

    return Witness(act=act, looks=looks)


PPO_STEP_FUNCTIONS = {STORIES: Outlines({1: trace(PPO).outline}).as_json()}
"""The recorded outlines of a recipe with one step function, as `resolved` of `run_dir.create` expects them."""


def new_run_dir(root: Path, resolved: Mapping[str, Any] | None = None, **facts: Any) -> RunPaths:
    """Create a run directory with this recorded recipe; without it, of one step of PPO."""
    paths = RunPaths(root)
    run_dir.create(paths, recipe_toml="", resolved=resolved or {"steps": 1, **PPO_STEP_FUNCTIONS}, facts=facts)
    return paths


def saved_checkpoints(paths: RunPaths) -> list[int]:
    """Return the steps with saved states of all roles of the run; empty before the run exists."""
    return RecordedRun(paths).saved_steps if paths.run_json.exists() else []


@dataclass
class Stops:
    """A gate that passes until `when` is true, and counts its calls."""

    when: Callable[["Stops"], bool] = lambda gate: False
    at: tuple[int, str] | None = None
    """Step and stage that are about to run, or are running."""
    between_calls: int = 0
    """Number of calls inside that stage."""
    saves: bool = True
    """Whether there is time to save when it stops."""

    def before(self, step: int, stage: str) -> None:
        self.at, self.between_calls = (step, stage), 0
        self._stop_if_due()

    def between(self) -> None:
        self.between_calls += 1
        if self.at is not None and self.at[1].startswith("keep_groups"):
            TURNS.give(1)  # the step waits until a cancelled thread has ended
        self._stop_if_due()

    def may_save(self) -> bool:
        return self.saves

    def _stop_if_due(self) -> None:
        if self.when(self):
            raise PreemptedError("stopped by SIGTERM")


@dataclass(frozen=True)
class Wiring:
    """The run context of a run on fakes, and its generator."""

    job: RunContext
    generator: Generator


@dataclass(frozen=True)
class BuiltStages:
    """The stages of one step of a run, as attributes by their names. `correction`, `resample` and `whitening` are
    None if the recipe does not have them."""

    job: RunContext
    step: int

    def __getattr__(self, name: str) -> Any:
        if name == "correction" and not self.job.recipe.ppo.corrects_rollouts:
            return None
        traced = trace(self.job.step_function(self.step))
        if name in ("resample", "whitening") and name not in traced:
            return None
        return self.job.build(self.step, traced[name] if name in traced else SPECS[name])


def open_run(
    root: Path,
    recipe: Recipe,
    witness: Witness,
    *,
    recipes: Mapping[int, Recipe] | None = None,
    gate: Gate | None = None,
    components: Components | None = None,
    choose: StepFunctionAt = step_function_at,
    claim: Callable[[RunPaths], Attempt] = claim,
) -> Wiring:
    """Open a run as `train --or-resume` does, on the bigram model or on `components`."""
    paths = RunPaths(root)
    if not root.exists():
        new_run_dir(root, as_recorded(recipe, choose))
    attempt = claim(paths)
    artifact.sweep(attempt)
    hooks = RunHooks(
        gate=gate or Stops(),
        notify=lambda text: None,
        log=lambda text: None,
        observers=(witness,),
        health=HealthMonitor(recipe.health),
        versions={},
    )
    components = components or fake_components(
        recipe,
        on_minibatch=witness.on_minibatch,
        on_file=witness.on_file,
        looks=witness.looks,
        on_environment=witness.on_environment,
    )
    return Wiring(*assemble(paths, attempt, recipes or {1: recipe}, components, hooks, choose))


def play(
    root: Path,
    recipe: Recipe | None = None,
    witness: Witness | None = None,
    choose: StepFunctionAt = step_function_at,
) -> Wiring:
    """Run to the end."""
    wiring = open_run(root, recipe or fake_recipe(), witness or Witness(), choose=choose)
    run(wiring.job)
    return wiring


def stop_at(root: Path, moment: str, *, choose: StepFunctionAt = step_function_at, **tables: Any) -> RunPaths:
    """Run until this moment, then stop. Equal runs are played once."""
    key = repr((moment, choose, tables))
    if key not in _PLAYED:
        folder = tempfile.TemporaryDirectory(prefix="ppoctl-stopped-", dir=MEMORY)
        with pytest.raises(StopError):
            play(Path(folder.name) / "run", fake_recipe(**tables), stopping_at(moment), choose)
        _PLAYED[key] = folder
    return RunPaths(shutil.copytree(Path(_PLAYED[key].name) / "run", root))


def finished(root: Path, **tables: Any) -> RunPaths:
    """Create a run of this recipe that nothing stopped. Equal runs are played once."""
    return RunPaths(shutil.copytree(_whole(tables), root))


def undisturbed(**tables: Any) -> dict[str, object]:
    """Return the result of a run of this recipe that nothing stops. Equal runs are played once."""
    return result(_whole(tables))


def _whole(tables: Mapping[str, Any]) -> Path:
    key = repr(tables)
    if key not in _WHOLE:
        folder = tempfile.TemporaryDirectory(prefix="ppoctl-whole-", dir=MEMORY)
        play(Path(folder.name) / "run", fake_recipe(**tables))
        _WHOLE[key] = folder
    return Path(_WHOLE[key].name) / "run"


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Folder for the files of a run, in which a flush takes no time; None: the usual one."""
_PLAYED: dict[str, "tempfile.TemporaryDirectory[str]"] = {}
_WHOLE: dict[str, "tempfile.TemporaryDirectory[str]"] = {}


def result(root: Path) -> dict[str, object]:
    """Return what two equal runs agree on: ledger and final states to the byte, and the metrics of every stage, each
    once."""
    paths = RunPaths(root)
    states = {
        f"{role}/{path.name}": path.read_bytes()
        for role in RecordedRun(paths).outlines.roles
        for path in sorted(paths.state(role, paths.saved_steps(role)[-1]).iterdir())
        if path.name != "manifest.json"
    }
    lines = [line for line in read_lines(paths.journal) if "stage" in line]
    metrics = sorted((line["step"], line["stage"], line["identity"], str(line["figures"])) for line in lines)
    return {"ledger": paths.ledger.read_bytes(), "states": states, "figures": metrics}
