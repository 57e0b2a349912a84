"""`train`, `rollout`, `resume` and `evaluate` from Python.

The functions run the same checks as the commands and write the same run directory. If an error would end the command,
the function raises a `PpoctlError` with the message, the hint and the exit code of the command.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppoctl.api.run import Run

if TYPE_CHECKING:
    import pyarrow

    from ppoctl.run.shutdown.signals import SignalGate
    from ppoctl.show.report.expectations import RunResult
    from ppoctl.show.tracking.screen import Screen

RUNS = "runs"
"""Default folder of run directories, relative to the working directory."""

RecipeArgument = str | Path | Iterable[str | Path]
"""A recipe file, or several recipe files. Later files override earlier files."""
Keys = Mapping[str, Any] | None
"""Recipe keys with dots, and their values, as in `--set`: `{"ppo.kl.coef": 0.01}`."""


def train(
    recipe: RecipeArgument,
    keys: Keys = None,
    *,
    runs: str | Path = RUNS,
    or_resume: bool = False,
    force: bool = False,
) -> Run:
    """Create the run RUNS/NAME, train it, and return it.

    `or_resume`: continue the run if it exists; otherwise this is an error. `force`: start even if memory or disk seem
    too small.

    Raises ExpectationError if the run does not meet its recipe's expectations, and every error of `ppoctl train`.
    """
    from ppoctl.run.startable import Messages, startable
    from ppoctl.run.wire.prestart import prestarted_engines

    with _screen_and_gate("train") as (screen, gate):
        loaded = startable(_files(recipe), _sets(keys), Path(runs), Messages(screen.line), force=force)
        with prestarted_engines(loaded.recipe):
            from ppoctl.run import run_commands

            ended = run_commands.train(loaded, gate, runs=Path(runs), or_resume=or_resume, screen=screen)
    return _run_of(ended)


def rollout(recipe: RecipeArgument, keys: Keys = None, *, runs: str | Path = RUNS, force: bool = False) -> Run:
    """Generate and score the responses of the first step, and return the run.

    `train` with the same recipe continues from these responses. Raises every error of `ppoctl rollout`.
    """
    from ppoctl.run.startable import Messages, startable
    from ppoctl.run.wire.prestart import prestarted_engines

    with _screen_and_gate("rollout") as (screen, gate):
        loaded = startable(_files(recipe), _sets(keys), Path(runs), Messages(screen.line), force=force)
        with prestarted_engines(loaded.recipe):
            from ppoctl.run import run_commands

            ended = run_commands.rollout(loaded, gate, runs=Path(runs), screen=screen)
    return Run(ended.paths.root)


def resume(run: str | Path | Run, keys: Keys = None, *, force: bool = False) -> Run:
    """Resume a run from the point where it stopped, and return the run.

    Changed keys apply from the first step without a rollout.

    Raises StorageError if artifacts of the run are missing or corrupt, and every error of `ppoctl resume`.
    """
    from ppoctl.run.startable import Messages, resumable
    from ppoctl.run.wire.prestart import prestarted_engines
    from ppoctl.start.slurm.run_status import require_idle
    from ppoctl.store.recorded_run import RecordedRun
    from ppoctl.store.resume_plan import plan_resume

    paths = (run if isinstance(run, Run) else Run(run)).layout
    with _screen_and_gate("resume") as (screen, gate):
        require_idle(paths)
        recorded = RecordedRun(paths)
        plan = plan_resume(recorded)
        plan.require_intact(paths)
        with prestarted_engines(resumable(recorded, _sets(keys), Messages(screen.line), force=force)):
            from ppoctl.run import run_commands

            ended = run_commands.resume(recorded, plan, _sets(keys), gate, only=None, screen=screen)
    return _run_of(ended)


@dataclass(frozen=True)
class Evaluated:
    """Results of an evaluation."""

    state: str
    """Id of the actor state that was evaluated."""
    figures: Mapping[str, float]
    """Metric name, as in the journal of a run -> value. Example of a name: `eval/heldout/pass_at_1`."""
    rows: list[dict[str, Any]]
    """Generated and scored samples, one row per sample."""

    def samples(self) -> "pyarrow.Table":
        """Return one row per sample; `.to_pandas()` converts the table to a data frame."""
        from ppoctl.store.arrow_tables import as_table

        return as_table(self.rows)


def evaluate(checkpoint: str | Path | Run, recipe: RecipeArgument = (), keys: Keys = None) -> Evaluated:
    """Evaluate a checkpoint on the evaluation sets of the recipe, as `train` does.

    `checkpoint` is a run, a `states/actor/STEP` folder of a run, or a model folder. A model folder requires a recipe.

    Raises RecipeError if `checkpoint` is none of these, and every error of `ppoctl eval`.
    """
    from ppoctl.run.eval_target import find_checkpoint
    from ppoctl.run.wire.prestart import prestarted_engines

    path = checkpoint.path if isinstance(checkpoint, Run) else Path(checkpoint)
    with _screen_and_gate("eval") as (screen, _):
        target = find_checkpoint(path, _files(recipe), _sets(keys))
        with prestarted_engines(target.recipe):
            from ppoctl.run import run_commands

            evaluation = run_commands.evaluate(target, screen.line)
    return Evaluated(evaluation.stamp, evaluation.metrics(), evaluation.rows)


@contextmanager
def _screen_and_gate(command: str) -> "Iterator[tuple[Screen, SignalGate]]":
    """Open a screen on stderr, and a gate that stops the work after a signal.

    Python delivers signals to the main thread only. In any other thread, a signal does not stop the work.
    """
    from ppoctl.run.shutdown.signals import SignalGate, signal_gate
    from ppoctl.show.tracking.screen import open_screen

    how_to_continue = f"call ppoctl.{command} again"
    with open_screen() as screen:
        if threading.current_thread() is threading.main_thread():
            with signal_gate(how_to_continue, screen.line) as gate:
                yield screen, gate
        else:
            yield screen, SignalGate(how_to_continue)


def _run_of(ended: "RunResult") -> Run:
    from ppoctl.show.report.expectations import require_met

    require_met(ended.results)
    return Run(ended.paths.root)


def _files(recipe: RecipeArgument) -> list[Path]:
    return [Path(recipe)] if isinstance(recipe, str | Path) else [Path(file) for file in recipe]


def _sets(keys: Keys) -> list[str]:
    from ppoctl.recipe.loading.explain import as_toml

    return [f"{key}={as_toml(value)}" for key, value in (keys or {}).items()]
