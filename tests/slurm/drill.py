"""One run that is submitted to a lab and disturbed there: its commands, what happened to it, and its end.

The command of its job is `ppoctl_on_fakes.py`, unless `command` names another one. A drill decides where the run
waits, disturbs it there, lets it continue, and compares its end with that of an undisturbed run.
"""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fakes.job import result
from ppoctl.store.journal import JournalLine, read_lines
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.time_use import attempt_times
from slurm.lab import Lab, wait_for_text

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes/quickstart"
RECIPE = f"""
name = "drill"
seed = 3
steps = 3
model = {{ path = "{QUICKSTART}/model", dtype = "float32" }}
rollout = {{ prompts_per_step = 4, samples_per_prompt = 2, max_prompt_tokens = 96, max_new_tokens = 6 }}
reward = {{ kind = "gsm8k" }}
ppo = {{ epochs = 2, minibatch_seqs = 4, kl = {{ place = "reward", coef = 0.05 }} }}
actor = {{ optimizer = {{ lr = 0.05 }} }}
critic = {{ optimizer = {{ lr = 0.1 }} }}
eval = {{ every_steps = 2 }}
tracking = {{ kind = "none" }}

[data.train]
format = "gsm8k"
path = "{QUICKSTART}/train.jsonl"

[data.eval.held]
format = "gsm8k"
path = "{QUICKSTART}/test.jsonl"
max_rows = 4
"""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def ppoctl(environ: Mapping[str, str], *words: str, code: int = 0) -> str:
    """Run the command as on a login node; require this exit code, and return its output."""
    command = [sys.executable, "-m", "ppoctl", *words]
    done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


class Drill:
    """A run of the recipe in a separate folder."""

    def __init__(self, lab: Lab, folder: Path, *, stage_s: float = 0.0) -> None:
        self.lab = lab
        self.folder = folder
        self.jobs: list[str] = []
        folder.mkdir(parents=True)
        (folder / "stage_s").write_text(str(stage_s))
        (folder / "recipe.toml").write_text(RECIPE)
        self.command = folder / "ppoctl"
        program = f"{sys.executable} {Path(__file__).with_name('ppoctl_on_fakes.py')}"
        self.command.write_text(f'#!/bin/sh\nexport DRILL="{folder}" PYTHONPATH="{ROOT}/src"\nexec {program} "$@"\n')
        self.command.chmod(0o755)

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.folder / "runs/drill")

    # -- commands

    def submit(self, *sets: str, engines: bool = False) -> str:
        """Run `ppoctl train RECIPE --on slurm`, with real `engines` or on fakes; return the job's id."""
        command = () if engines else (f"slurm.command='{self.command}'",)
        settings = [word for text in (*command, *sets) for word in ("--set", text)]
        where = ("--runs", str(self.folder / "runs"))
        return self._job(
            self.type("train", str(self.folder / "recipe.toml"), *where, *settings, "--on", "slurm", "--json")
        )

    def train_locally(self, *words: str) -> None:
        """Run `ppoctl train RECIPE` in a child process, outside Slurm."""
        done = subprocess.run(
            [self.command, "train", self.folder / "recipe.toml", "--runs", self.folder / "runs", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def resume(self) -> str:
        """Run `ppoctl resume RUN --on slurm`; return the job's id."""
        return self._job(self.type("resume", str(self.paths.root), "--on", "slurm", "--json"))

    def type(self, *words: str, code: int = 0) -> str:
        return ppoctl(self.lab.environ, *words, code=code)

    def _job(self, printed: str) -> str:
        (id,) = json.loads(printed)["jobs"]
        self.jobs.append(id)
        return str(id)

    # -- pauses

    def pause(self, *moments: str) -> None:
        """Make the run wait at these moments, `2-values`, each once."""
        for moment in moments:
            (self.folder / f"{moment}.pause").touch()

    def reached(self, moment: str) -> str:
        """Wait until the run waits there; return the node that it is on."""
        text = wait_for_text(self.folder / f"{moment}.reached", "\n", seconds=90)
        return text.split()[1]

    def waited(self, moment: str) -> int:
        """Return the id of the process that waited, or waits, there."""
        return int((self.folder / f"{moment}.reached").read_text().split()[0])

    def let_go(self, moment: str) -> None:
        (self.folder / f"{moment}.go").touch()

    # -- results

    def ended(self, *, seconds: float = 150) -> dict[str, str]:
        """Wait for the end of the newest job; return what Slurm reports about it."""
        return self.lab.wait_for(self.jobs[-1], *OVER, seconds=seconds)

    @property
    def lines(self) -> list[JournalLine]:
        return read_lines(self.paths.journal)

    @property
    def log(self) -> str:
        """Return Slurm's own output of the jobs."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.paths.root.glob("logs/slurm-*")))

    def codes(self) -> list[int]:
        """Return the exit codes that the jobs' scripts recorded, one for each end."""
        found = [self.paths.root / f"jobs/{id}.ended" for id in self.jobs]
        return [int(line.split()[1]) for path in found if path.exists() for line in path.read_text().splitlines()]

    def attempts(self) -> list[JournalLine]:
        return [line for line in self.lines if line.get("event") == "attempt_started"]


@dataclass(frozen=True)
class Row:
    """A line of the table that the drills print."""

    name: str
    attempts: int
    codes: Sequence[int]
    """Exit codes of the job's script, one for each end that it recorded."""
    replayed: Sequence[str]
    """Updates that were replayed, to reach a state that had not been saved."""
    lost_s: float
    """Seconds that all attempts ran, beyond those of the undisturbed run."""

    def __str__(self) -> str:
        codes, replayed = " ".join(map(str, self.codes)) or "-", ", ".join(self.replayed) or "-"
        return f"{self.name:<46} {self.attempts:>8} {codes:>12} {replayed:>20} {self.lost_s:>8.1f}"


HEAD = f"{'what came':<46} {'attempts':>8} {'codes':>12} {'replayed':>20} {'s lost':>8}"
TABLE: list[Row] = []
"""Rows of the drills of this session."""


def require_same(drill: Drill, whole: Drill) -> None:
    """Require that the run ended as the undisturbed one, to the byte, and left no draft."""
    ours, theirs = result(drill.paths.root), result(whole.paths.root)
    for part in theirs:
        assert ours[part] == theirs[part], f"{part} differ in {drill.paths.root}\n{drill.log[-3000:]}"
    assert [path.name for path in drill.paths.root.rglob("*.attempt-*")] == []


def row_of(name: str, drill: Drill, whole: RunPaths) -> Row:
    """Return the table row of a drill."""
    replayed = re.findall(r"steps/0*(\d+)/\d+-(\S+) +replayed", drill.log)
    at_work_s = [sum(each.wall_s for each in attempt_times(read_lines(run.journal))) for run in (drill.paths, whole)]
    words = [f"{step} {stage}" for step, stage in replayed]
    return Row(name, len(drill.attempts()), drill.codes(), words, at_work_s[0] - at_work_s[1])
