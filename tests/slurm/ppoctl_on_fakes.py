"""`ppoctl` on the bigram model instead of real engines, for jobs of the lab: `python ppoctl_on_fakes.py WORDS`, as it
is typed.

Everything else is real: command line, start of a job, gate and signals, loop, store, exit codes. The folder in the
variable `DRILL` controls it. Its file `stage_s` has the seconds that each stage takes; a file `MOMENT.pause`
(`2-critic_update`, or `start-1`: before anything is ready, in the first restart) makes the run wait there, once,
until `MOMENT.go` exists. A waiting run has written `MOMENT.reached`, with its process id and node.
"""

import dataclasses
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from fakes.components import fake_components
from ppoctl.recipe.schema import Recipe
from ppoctl.run import session
from ppoctl.run.wire.components import Components
from ppoctl.show.report.expectations import RunResult
from ppoctl.store.journal import JournalLine
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths

GIVES_UP_S = 120.0


class Director:
    """Makes stages last, and wait."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lasting = folder / "stage_s"
        self.stage_s = float(lasting.read_text()) if lasting.exists() else 0.0

    def on_stage(self, step: int, stage: str) -> None:
        time.sleep(self.stage_s)
        self.wait_at(f"{step}-{stage}")

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        self.wait_at(f"{step}-{stage}-{moment}")

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        pass

    def on_committed(self, line: JournalLine) -> None:
        pass

    def wait_at(self, moment: str) -> None:
        if not (self.folder / f"{moment}.pause").exists() or (self.folder / f"{moment}.reached").exists():
            return
        announced = self.folder / f"{moment}.told"
        announced.write_text(f"{os.getpid()} {os.environ.get('SLURMD_NODENAME', '')}\n")
        announced.rename(self.folder / f"{moment}.reached")
        until = time.monotonic() + GIVES_UP_S
        while not (self.folder / f"{moment}.go").exists() and time.monotonic() < until:
            time.sleep(0.01)


def main() -> None:
    from ppoctl.cli.app import main as command

    runs = [Path(word) for word in sys.argv[1:] if (Path(word) / "run.json").is_file()]
    # A submitted run records its sources; for other runs they are not read.
    sources = RecordedRun(RunPaths(runs[0].resolve())).facts["sources"] if runs else {}
    director, attempt_run = Director(Path(os.environ["DRILL"])), session.attempt_run

    def prepared(recipe: Recipe, _clock: datetime) -> tuple[Components, dict[str, str]]:
        director.wait_at(f"start-{os.environ.get('SLURM_RESTART_COUNT', 0)}")
        return fake_components(recipe), sources

    def directed(opened: session.OpenedRun, *do: Any) -> RunResult:
        return attempt_run(dataclasses.replace(opened, observers=(director,)), *do)

    session.prepare, session.attempt_run = prepared, directed
    command()


if __name__ == "__main__":
    main()
