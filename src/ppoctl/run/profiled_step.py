"""One step of a run, run again under torch's profiler, in a copy of the run.

    RUN -> copy with links to the states before the step -> load states -> record -> run the step -> write traces

Only the folder of the traces is written: the copy is below it, and is deleted at the end. The copy has no record of
the step, so every stage runs: generation, scoring and updates, but neither an evaluation nor a save.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppoctl.core.errors import PpoctlError, RecipeError, quoted
from ppoctl.core.machine.torch_profile import ProcessProfile, ProfiledProcess
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.tracking_table import NoTracking
from ppoctl.run import session
from ppoctl.run.loop.steps import RunContext, inputs_of, running_step, start_point
from ppoctl.run.run_recipe import recorded_recipes
from ppoctl.run.shutdown.signals import SignalGate
from ppoctl.run.wire import engines
from ppoctl.run.wire.components import Components
from ppoctl.run.wire.sources import clock_of, require_same_sources
from ppoctl.show.tracking.screen import Screen
from ppoctl.store.disk_errors import storage_error
from ppoctl.store.parallel_run import ParallelRuns
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths


def steps_to_profile(run: RecordedRun) -> list[int]:
    """Return the steps that can run again: those whose states before the step are saved, or are the model source."""
    return [step + 1 for step in (0, *run.saved_steps) if step < run.recipe["steps"]]


def profile_step(run: RecordedRun, step: int, out: Path, gate: SignalGate, screen: Screen) -> list[ProcessProfile]:
    """Run a step again, write a trace of each process into the new folder `out`, and return the profiles.

    Raises RecipeError if the step cannot run again, and the errors of a resume.
    """
    if step not in (possible := steps_to_profile(run)):
        nearest = min(possible, key=lambda other: abs(other - step))
        raise RecipeError(
            f"step {step} of `{run.paths.root}` cannot run again: the states before it are not saved, or the run has "
            f"no such step; possible: {', '.join(map(str, possible))}",
            hint=f"ppoctl profile {quoted(run.paths.root)} --step {nearest}",
        )
    with _copied(run, step, out) as paths:
        copy = RecordedRun(paths)
        recipes = {start: _without_tracking(recipe) for start, recipe in recorded_recipes(copy).items()}
        plan = plan_resume(copy)
        plan.require_intact(paths)
        components, digests = session.prepare(recipes[max(recipes)], clock_of(run), is_profiled=True)
        with engines.closed_if_it_fails(components):
            require_same_sources(run, digests)
        work = _ProfiledStep(step, out, components)
        session.attempt_run(session.OpenedRun(paths, recipes, components, plan), work, gate, screen)
    return work.profiles


@contextmanager
def _copied(run: RecordedRun, step: int, out: Path) -> Iterator[RunPaths]:
    """Context with a copy of the run that ends before the step, in the new folder `out`. A failure leaves no
    folder."""
    paths = RunPaths(out / "run")
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise storage_error(out, error) from error
    try:
        _copy(run, step, paths)
        yield paths
    except BaseException as error:
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, PpoctlError) and str(paths.root) in (error.hint or ""):  # the copy is gone
            error.hint = f"ppoctl profile {quoted(run.paths.root)} --step {step}"
        raise
    shutil.rmtree(paths.root, ignore_errors=True)


def _copy(run: RecordedRun, step: int, paths: RunPaths) -> None:
    """Copy the files of a run. The states before the step, and the records that it may read, are links."""
    try:
        paths.recipes.mkdir(parents=True)
        for file in (run.paths.run_json, run.paths.recipe_resolved, run.paths.journal, run.paths.ledger):
            shutil.copyfile(file, paths.root / file.name)
        for start in (start for start in run.recipes if start <= step):
            shutil.copyfile(run.paths.recipe_from(start), paths.recipe_from(start))
        folders = [run.paths.step(before) for before in range(step - max(1, run.outlines.reaches_back), step)]
        folders += [run.paths.state(role, step - 1) for role in run.outlines.roles]
        for folder in (folder for folder in folders if folder.is_dir()):
            link = paths.root / run.paths.inside(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder.absolute(), target_is_directory=True)
    except OSError as error:
        raise storage_error(paths.root, error) from error


def _without_tracking(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"tracking": NoTracking(kind="none")})


class _ProfiledStep:
    """The work of the attempt on the copy."""

    def __init__(self, step: int, folder: Path, components: Components) -> None:
        self.profiles: list[ProcessProfile] = []
        self._step = step
        self._folder = folder.absolute()
        self._components = components

    def __call__(self, job: RunContext) -> None:
        _, states, carry = start_point(job)
        for state in states.values():
            job.states.stamped(state)  # loads it, so that the load is not recorded
        driver, others = ProfiledProcess(), self._components.processes()
        for role in others.keys() & self._components.trainers.keys():
            others[role].begin("begin_profile").answers()
        driver.begin_profile()
        parallel = ParallelRuns()
        with parallel.cancelled_if_it_fails():
            running = running_step(job, self._step, parallel)
            job.step_function(self._step).run(running, inputs_of(job, self._step, states, carry))
            parallel.finish()
        found = [driver.end_profile(self._folder, "driver")]
        for name, processes in others.items():
            found += processes.begin("end_profile", self._folder, name).answers()
        self.profiles = [profile for profile in found if profile is not None]
