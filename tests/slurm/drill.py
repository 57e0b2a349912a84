"""One run that is submitted to a lab and struck there: what was typed, what it went through, what it ended as.

The command of its job is `on_fakes.py`, unless `command` names another one. A drill says where the run is to wait,
strikes it there, lets it go on, and holds its end against a run that nobody touched.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppoctl.store.journal import Line, read_lines
from ppoctl.store.layout import RunLayout
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
    """What the command prints, as it is typed on a login node; it must end with this code."""
    command = [sys.executable, "-m", "ppoctl", *words]
    done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


class Drill:
    """A run of the recipe in a folder of its own."""

    def __init__(self, lab: Lab, folder: Path, *, stage_s: float = 0.0) -> None:
        self.lab = lab
        self.folder = folder
        self.jobs: list[str] = []
        folder.mkdir(parents=True)
        (folder / "stage_s").write_text(str(stage_s))
        (folder / "recipe.toml").write_text(RECIPE)
        self.command = folder / "ppoctl"
        program = f"{sys.executable} {Path(__file__).with_name('on_fakes.py')}"
        self.command.write_text(f'#!/bin/sh\nexport DRILL="{folder}"\nexec {program} "$@"\n')
        self.command.chmod(0o755)

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.folder / "runs/drill")

    # -- what is typed

    def submit(self, *sets: str, command: Path | None = None) -> str:
        """`ppoctl train RECIPE --on slurm`; returns the job's id."""
        given = [word for text in (f"slurm.command='{command or self.command}'", *sets) for word in ("--set", text)]
        where = ("--runs", str(self.folder / "runs"))
        return self._job(self.type("train", str(self.folder / "recipe.toml"), *where, *given, "--on", "slurm", "--json"))

    def resume(self) -> str:
        """`ppoctl resume RUN --on slurm`; returns the job's id."""
        return self._job(self.type("resume", str(self.layout.root), "--on", "slurm", "--json"))

    def type(self, *words: str, code: int = 0) -> str:
        return ppoctl(self.lab.environ, *words, code=code)

    def _job(self, told: str) -> str:
        (id,) = json.loads(told)["jobs"]
        self.jobs.append(id)
        return str(id)

    # -- where it waits

    def pause(self, *moments: str) -> None:
        """The run is to wait at these moments, `2-values`, each once."""
        for moment in moments:
            (self.folder / f"{moment}.pause").touch()

    def reached(self, moment: str) -> str:
        """Wait until the run waits there; returns the node that it is on."""
        told = wait_for_text(self.folder / f"{moment}.reached", "\n", seconds=90)
        return told.split()[1]

    def let_go(self, moment: str) -> None:
        (self.folder / f"{moment}.go").touch()

    # -- what became of it

    def ended(self, *, seconds: float = 150) -> dict[str, str]:
        """Wait for the end of the newest job; returns what Slurm says of it."""
        return self.lab.wait_for(self.jobs[-1], *OVER, seconds=seconds)

    @property
    def lines(self) -> list[Line]:
        return read_lines(self.layout.journal)

    @property
    def log(self) -> str:
        """Slurm's own output of the jobs."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.layout.root.glob("logs/slurm-*")))

    def codes(self) -> list[int]:
        """Exit codes that the jobs' scripts wrote down, of each end."""
        found = [self.layout.root / f"jobs/{id}.ended" for id in self.jobs]
        return [int(line.split()[1]) for path in found if path.exists() for line in path.read_text().splitlines()]

    def attempts(self) -> list[Line]:
        return [line for line in self.lines if line.get("event") == "attempt_started"]

    def replayed(self) -> list[str]:
        """Stages that were committed more than once, or updates that were computed again."""
        seen: set[str] = set()
        twice = []
        for line in self.lines:
            if "stage" in line:
                name = f"{line['step']} {line['stage']}"
                if name in seen:
                    twice.append(name)
                seen.add(name)
        return twice


@dataclass(frozen=True)
class Row:
    """What a drill went through, for the table that is printed."""

    name: str
    attempts: int
    codes: Sequence[int]
    replayed: Sequence[str]
    lost_s: float

    def __str__(self) -> str:
        codes = " ".join(map(str, self.codes)) or "-"
        return f"{self.name:<44} {self.attempts:>2}  {codes:<12} {', '.join(self.replayed) or '-':<24} {self.lost_s:6.1f}"
