"""The option `--on slurm` of several commands: submit a job, and print how to follow, stop and resume it."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppoctl.cli import render
from ppoctl.core import units
from ppoctl.core.errors import RecipeError, quoted

if TYPE_CHECKING:
    from ppoctl.recipe.loading.load import Loaded
    from ppoctl.recipe.schema import Recipe
    from ppoctl.run.submit_job import Submitted
    from ppoctl.start.slurm.script import Work
    from ppoctl.store.recorded_run import RecordedRun
    from ppoctl.store.run_paths import RunPaths


class Submission:
    """Options of a job submission."""

    def __init__(self, *, test_only: bool, chain: int, as_json: bool, force: bool = False) -> None:
        self.test_only = test_only
        self.chain = chain
        self.as_json = as_json
        self.force = force

    def new_run(
        self, files: Sequence[Path], sets: Sequence[str], runs: Path, command: str, *, or_resume: bool = False
    ) -> None:
        """Submit a job that starts the run of a recipe."""
        from ppoctl.run.startable import submittable

        loaded = submittable(files, sets, runs, render.messages(), force=self.force)
        from ppoctl.run import submit_job
        from ppoctl.store.recorded_run import RecordedRun
        from ppoctl.store.run_paths import RunPaths

        paths = RunPaths((runs / loaded.recipe.name).absolute())
        if or_resume and paths.run_json.is_file():
            recorded = RecordedRun(paths)
            _require_unchanged(recorded, loaded.recipe)
            self.run_again(recorded, ())
            return
        options = self._options(rollout_only=command == "rollout")
        work = submit_job.work_of_run(paths, options)
        submit_job.require_accepted(loaded, work, force=self.force)
        if self.test_only:
            self._test_only(loaded.recipe, work)
        else:
            progress = Reading().notify
            submitted = submit_job.submit_new(loaded, paths, command, options, links=self.chain, progress=progress)
            render.passing()
            self._print_run(submitted, paths)

    def run_again(
        self, run: "RecordedRun", sets: Sequence[str], *, rollout_only: bool = False, save_only: bool = False
    ) -> None:
        """Submit a job that resumes an existing run."""
        from ppoctl.run import submit_job
        from ppoctl.run.run_recipe import loaded_of

        paths, loaded = run.paths, loaded_of(run, sets)
        options = self._options(rollout_only=rollout_only, save_only=save_only)
        options += submit_job.as_options(loaded, sets)
        work = submit_job.work_of_run(paths, options)
        submit_job.require_accepted(loaded, work, force=self.force)
        if self.test_only:
            self._test_only(loaded.recipe, work)
            return
        command = "rollout" if rollout_only else "resume"
        submitted = submit_job.submit_again(paths, loaded.recipe, command, options, links=self.chain)
        self._print_run(submitted, paths)

    def _options(self, *, rollout_only: bool = False, save_only: bool = False) -> list[str]:
        """Return the options of this command that are passed on to the command in the job."""
        options = {"--force": self.force, "--rollout-only": rollout_only, "--save-only": save_only}
        return [option for option, is_set in options.items() if is_set]

    def other(self, loaded: "Loaded", work: "Work") -> None:
        """Submit a job that does not write to a run, such as an evaluation."""
        from ppoctl.run import submit_job

        recipe = loaded.recipe
        submit_job.require_accepted(loaded, work, force=self.force)
        if self.test_only:
            self._test_only(recipe, work)
            return
        submitted = submit_job.submit_other(recipe, work)
        (id,) = submitted.ids
        log = submitted.folder / submitted.log.replace("%j", id)
        if self.as_json:
            render.json({"jobs": [id], "log": str(log)})
            return
        render.line(f"submitted: job {id} ({submitted.nodes})")
        render.table([("follow:", f"tail -F {quoted(log)}"), ("stop:", f"scancel {id}")])

    def _test_only(self, recipe: "Recipe", work: "Work") -> None:
        from ppoctl.run import submit_job

        reply = submit_job.would_accept(recipe, work)
        if self.as_json:
            render.json({"accepted": True, "says": reply})
        else:
            render.line(f"Slurm would accept the job: {_with_date(reply)}")

    def _print_run(self, submitted: "Submitted", paths: "RunPaths") -> None:
        run = _short(paths.root)
        if self.as_json:
            script = str(paths.job_script(submitted.ids[0]))
            render.json({"run": str(paths.root), "jobs": list(submitted.ids), "script": script})
            return
        jobs = (
            f"job {submitted.ids[0]}"
            if len(submitted.ids) == 1
            else f"jobs {', '.join(submitted.ids)}, one after the other"
        )
        render.line(f"submitted: {jobs} ({submitted.nodes})")
        render.table(
            [
                ("run:", str(run)),
                ("state:", f"ppoctl status {quoted(run)}"),
                ("follow:", f"ppoctl logs {quoted(run)} -f"),
                ("stop:", f"ppoctl stop {quoted(run)}"),
                ("resume:", f"ppoctl resume {quoted(run)} --on slurm"),
            ]
        )


class Reading:
    """Progress of computing a file's digest: shown continuously on a terminal, otherwise every few seconds."""

    EVERY_S = 4.0

    def __init__(self) -> None:
        self._printed_at = time.monotonic()

    def notify(self, path: Path, done: int, total: int) -> None:
        text = f"digest of {path.name}: {units.size(done)} of {units.size(total)}"
        render.passing(text)
        if not render.on_terminal() and time.monotonic() - self._printed_at > self.EVERY_S:
            self._printed_at = time.monotonic()
            render.print_stderr(text)


def print_script(recipe: "Recipe", runs: Path, train: str) -> None:
    """Print only the batch script that `train` (a command) would submit, and a note on how to submit it."""
    from ppoctl.run import submit_job
    from ppoctl.store.run_paths import RunPaths

    paths = RunPaths((runs / recipe.name).absolute())
    render.line(submit_job.script_of(recipe, submit_job.work_of_run(paths)).removesuffix("\n"))
    if not paths.run_json.is_file():
        render.print_stderr(
            f"note: `sbatch` cannot run this script yet: it resumes `{_short(paths.root)}`, which does not exist; "
            f"this creates the run and submits the script: {train}"
        )


def _require_unchanged(run: "RecordedRun", recipe: "Recipe") -> None:
    from ppoctl.recipe.fingerprint import differences
    from ppoctl.recipe.loading.explain import as_toml
    from ppoctl.run.run_recipe import newest_recorded

    root = run.paths.root
    if changed := differences(newest_recorded(run), recipe):
        key, _, value = changed[0]
        raise RecipeError(
            f"run `{root}` was recorded with another `{key}`; a job continues with the recorded value",
            hint=f"ppoctl resume {quoted(root)} --on slurm --set {quoted(f'{key}={as_toml(value)}')}",
        )


def _with_date(reply: str) -> str:
    """Return Slurm's reply, with a date in place of the start time in Unix seconds.

    ppoctl sets Slurm's time format to Unix seconds, because other queries of ppoctl require them.
    """
    start = re.search(r"(?<= to start at )\d+", reply)
    if start is None:
        return reply
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(int(start[0])))
    return f"{reply[: start.start()]}{date}{reply[start.end() :]}"


def _short(path: Path) -> Path:
    """Return a path below the working directory as a relative path, and any other path as it is."""
    folder = Path.cwd()
    return path.relative_to(folder) if path.is_relative_to(folder) else path
