"""What `--on slurm` does, of every command that has it: submit, and say how to follow, stop and go on."""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppoctl.cli import preflight, render
from ppoctl.errors import RecipeError, quoted

if TYPE_CHECKING:
    from ppoctl.loading.load import Loaded
    from ppoctl.recipe.schema import Recipe
    from ppoctl.runs.submission import Submitted
    from ppoctl.slurm.request import Request
    from ppoctl.slurm.script import Work
    from ppoctl.store.run_paths import RunPaths


class Submission:
    """How something is to be submitted."""

    def __init__(self, *, test_only: bool, chain: int, as_json: bool, force: bool = False) -> None:
        self.test_only = test_only
        self.chain = chain
        self.as_json = as_json
        self.force = force

    def new_run(
        self, files: Sequence[Path], sets: Sequence[str], runs: Path, command: str, *, or_resume: bool = False
    ) -> None:
        """Submit the run of a recipe."""
        loaded = preflight.submittable(files, sets, runs, force=self.force)
        from ppoctl.runs import submission
        from ppoctl.store.run_paths import RunPaths

        paths = RunPaths((runs / loaded.recipe.name).absolute())
        if or_resume and paths.run_json.is_file():
            _require_unchanged(paths, loaded.recipe)
            self.run_again(paths, ())
            return
        submission.require_accepted(loaded, force=self.force)
        options = self._options(rollout_only=command == "rollout")
        if self.test_only:
            self._ask(loaded.recipe, submission.work_of_run(paths, options))
        else:
            progress = preflight.Reading().notify
            found = submission.submit_new(loaded, paths, command, options, links=self.chain, progress=progress)
            render.passing()
            self._tell_of_run(found, paths)

    def run_again(
        self, paths: "RunPaths", sets: Sequence[str], *, rollout_only: bool = False, save_only: bool = False
    ) -> None:
        """Submit a run that is there."""
        from ppoctl.runs import submission
        from ppoctl.runs.run_recipe import loaded_of

        loaded = loaded_of(paths, sets)
        submission.require_accepted(loaded, force=self.force)
        options = self._options(rollout_only=rollout_only, save_only=save_only)
        options += submission.as_options(loaded, sets)
        if self.test_only:
            self._ask(loaded.recipe, submission.work_of_run(paths, options))
            return
        command = "rollout" if rollout_only else "resume"
        found = submission.submit_again(paths, loaded.recipe, command, options, links=self.chain)
        self._tell_of_run(found, paths)

    def _options(self, *, rollout_only: bool = False, save_only: bool = False) -> list[str]:
        """Options of this command that the job's command has, too."""
        asked = {"--force": self.force, "--rollout-only": rollout_only, "--save-only": save_only}
        return [option for option, is_asked in asked.items() if is_asked]

    def other(self, loaded: "Loaded", work: "Work") -> None:
        """Submit what works on no run."""
        from ppoctl.runs import submission

        recipe = loaded.recipe
        submission.require_accepted(loaded, force=self.force)
        if self.test_only:
            self._ask(recipe, work)
            return
        found = submission.submit_other(recipe, work)
        (id,) = found.ids
        log = found.folder / found.log.replace("%j", id)
        if self.as_json:
            render.json({"jobs": [id], "log": str(log)})
            return
        render.line(f"submitted: job {id} ({_words(found.request)})")
        render.table([("follow:", f"tail -F {quoted(log)}"), ("stop:", f"scancel {id}")])

    def _ask(self, recipe: "Recipe", work: "Work") -> None:
        from ppoctl.runs import submission

        says = submission.would_accept(recipe, work)
        if self.as_json:
            render.json({"accepted": True, "says": says})
        else:
            render.line(f"Slurm would take it: {_with_a_date(says)}")

    def _tell_of_run(self, found: "Submitted", paths: "RunPaths") -> None:
        run = _short(paths.root)
        if self.as_json:
            script = str(paths.job_script(found.ids[0]))
            render.json({"run": str(paths.root), "jobs": list(found.ids), "script": script})
            return
        jobs = f"job {found.ids[0]}" if len(found.ids) == 1 else f"jobs {', '.join(found.ids)}, one after the other"
        render.line(f"submitted: {jobs} ({_words(found.request)})")
        render.table(
            [
                ("run:", str(run)),
                ("state:", f"ppoctl status {quoted(run)}"),
                ("follow:", f"ppoctl logs {quoted(run)} -f"),
                ("stop:", f"ppoctl stop {quoted(run)}"),
                ("go on:", f"ppoctl resume {quoted(run)} --on slurm"),
            ]
        )


def print_script(recipe: "Recipe", runs: Path) -> None:
    """Print the batch script as `train --on slurm` submits it, and nothing else."""
    from ppoctl.runs import submission
    from ppoctl.store.run_paths import RunPaths

    work = submission.work_of_run(RunPaths((runs / recipe.name).absolute()))
    render.line(submission.script_of(recipe, work).removesuffix("\n"))


def _require_unchanged(paths: "RunPaths", recipe: "Recipe") -> None:
    from ppoctl.loading.explain import as_toml
    from ppoctl.recipe.fingerprint import differences
    from ppoctl.runs.run_recipe import recorded_recipes

    recipes = recorded_recipes(paths)
    if changed := differences(recipes[max(recipes)], recipe):
        key, _, value = changed[0]
        raise RecipeError(
            f"run `{paths.root}` was recorded with another `{key}`; a job goes on with what is recorded",
            hint=f"ppoctl resume {quoted(paths.root)} --on slurm --set {quoted(f'{key}={as_toml(value)}')}",
        )


def _with_a_date(says: str) -> str:
    """What Slurm says, with a date for the seconds since 1970 in which our other questions want all times."""
    start = re.search(r"(?<= to start at )\d+", says)
    if start is None:
        return says
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(int(start[0])))
    return f"{says[: start.start()]}{date}{says[start.end() :]}"


def _short(path: Path) -> Path:
    """The path as it would be typed here."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _words(request: "Request") -> str:
    nodes = "1 node" if request.nodes == 1 else f"{request.nodes} nodes"
    return nodes if request.gpus_per_node is None else f"{nodes} of {request.gpus_per_node} GPUs"
