"""`train`, `rollout`, `resume` and `evaluate` from Python: the same checks, the same run directory and the same work
as on the command line. What ends a command with an exit code is raised: every error is a `PpoctlError` with a
message, a hint and that code."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.api.run import Run

if TYPE_CHECKING:
    import pyarrow

    from ppoctl.loop.expectations import RunResult
    from ppoctl.shutdown.signals import SignalGate
    from ppoctl.tracking.screen import Screen

RUNS = "runs"
"""Default folder of run directories, below the working directory."""

RecipeArgument = str | Path | Iterable[str | Path]
"""A recipe file, or several of which later ones overlay earlier ones."""
Keys = Mapping[str, Any] | None
"""Recipe keys with dots and their values, as `--set` takes them: `{"ppo.kl.coef": 0.01}`."""


def train(
    recipe: RecipeArgument,
    keys: Keys = None,
    *,
    runs: str | Path = RUNS,
    or_resume: bool = False,
    force: bool = False,
) -> Run:
    """Create the run RUNS/NAME and train it; the run, for its figures and samples. One that exists is refused, or
    with `or_resume` continued. With `force` memory and disk may be judged too small.

    Raises ExpectationError where the recipe expects what the run does not reach, and what `ppoctl train` ends with.
    """
    from ppoctl.cli import preflight
    from ppoctl.wire.prestart import prestarted_engine

    with _talking("train") as (screen, gate):
        loaded = preflight.startable(_files(recipe), _sets(keys), Path(runs), force=force)
        with prestarted_engine(loaded.recipe):
            from ppoctl.runs import commands

            ended = commands.train(loaded, gate, runs=Path(runs), or_resume=or_resume, screen=screen)
    return _run_of(ended)


def rollout(recipe: RecipeArgument, keys: Keys = None, *, runs: str | Path = RUNS, force: bool = False) -> Run:
    """Draw and score the responses of the first step, and stop; `train` with the same recipe goes on from them.

    Raises what `ppoctl rollout` ends with.
    """
    from ppoctl.cli import preflight
    from ppoctl.wire.prestart import prestarted_engine

    with _talking("rollout") as (screen, gate):
        loaded = preflight.startable(_files(recipe), _sets(keys), Path(runs), force=force)
        with prestarted_engine(loaded.recipe):
            from ppoctl.runs import commands

            ended = commands.rollout(loaded, gate, runs=Path(runs), screen=screen)
    return Run(ended.paths.root)


def resume(run: str | Path | Run, keys: Keys = None, *, force: bool = False) -> Run:
    """Continue a run from wherever it stopped. Changed keys hold from the first step that has no rollout yet.

    Raises StorageError where something that it needs is missing or corrupt, and what `ppoctl resume` ends with.
    """
    from ppoctl.cli import preflight
    from ppoctl.slurm.run_status import require_idle
    from ppoctl.store.resume_plan import plan_resume
    from ppoctl.wire.prestart import prestarted_engine

    layout = (run if isinstance(run, Run) else Run(run)).layout
    with _talking("resume") as (screen, gate):
        require_idle(layout)
        plan = plan_resume(layout)
        plan.require_intact(layout)
        with prestarted_engine(preflight.require_space_to_resume(layout, _sets(keys), force=force)):
            from ppoctl.runs import commands

            ended = commands.resume(layout, plan, _sets(keys), gate, only=None, screen=screen)
    return _run_of(ended)


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found."""

    state: str
    """Stamp of the actor state that was evaluated."""
    figures: Mapping[str, float]
    """Figures by their names in a run's journal: `eval/heldout/pass_at_1`."""
    rows: list[dict[str, Any]]
    """What was drawn and scored, one row per sample."""

    def samples(self) -> "pyarrow.Table":
        """One row per sample; `.to_pandas()` makes a data frame of it."""
        from ppoctl.store.arrow_tables import as_table

        return as_table(self.rows)


def evaluate(checkpoint: str | Path | Run, recipe: RecipeArgument = (), keys: Keys = None) -> Evaluated:
    """Measure a run, one of its `states/actor/STEP` folders, or a model folder (with a recipe) on the recipe's
    evaluation sets, the same way `train` evaluates.

    Raises RecipeError where the checkpoint is none of these, and what `ppoctl eval` ends with.
    """
    from ppoctl.runs.eval_target import find_checkpoint
    from ppoctl.wire.prestart import prestarted_engine

    path = checkpoint.path if isinstance(checkpoint, Run) else Path(checkpoint)
    with _talking("eval"):
        asked = find_checkpoint(path, _files(recipe), _sets(keys))
        with prestarted_engine(asked.recipe):
            from ppoctl.runs import commands

            found = commands.evaluate(asked, _say)
    return Evaluated(found.stamp, found.metrics(), found.rows)


@contextmanager
def _talking(command: str) -> "Iterator[tuple[Screen, SignalGate]]":
    """A screen on stderr, and a gate that signals shut; signals reach the main thread only, so that elsewhere nobody
    shuts it."""
    from ppoctl.shutdown.signals import SignalGate, signal_gate
    from ppoctl.tracking.screen import open_screen

    goes_on = f"call ppoctl.{command} again"
    with open_screen() as screen:
        if threading.current_thread() is threading.main_thread():
            with signal_gate(goes_on, screen.line) as gate:
                yield screen, gate
        else:
            yield screen, SignalGate(goes_on)


def _run_of(ended: "RunResult") -> Run:
    from ppoctl.loop.expectations import require_met

    require_met(ended.verdicts)
    return Run(ended.paths.root)


def _files(recipe: RecipeArgument) -> list[Path]:
    return [Path(recipe)] if isinstance(recipe, str | Path) else [Path(file) for file in recipe]


def _sets(keys: Keys) -> list[str]:
    from ppoctl.loading.explain import as_toml

    return [f"{key}={as_toml(value)}" for key, value in (keys or {}).items()]


def _say(text: str) -> None:
    from ppoctl.cli import render

    render.print_stderr(text)
