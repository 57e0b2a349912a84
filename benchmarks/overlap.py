"""Wall time of a step with `rollout.ahead` 1 and 2 next to `ahead = 0`, and next to the ideal.

    PYTHONPATH=src python benchmarks/overlap.py [--recipe RECIPE | --size 4m] [--steps 10] [--set KEY=VALUE ...]

All runs are real, one after the other, with one CPU thread for each process:

1. `ahead = 0`.
2. `ahead = 1`, and `ahead = 2`.
3. The ideal: two independent processes at the same time, one of which only generates and the other only trains. Each
   begins a step when both have ended theirs, so both do the same number of steps and share the machine as in 2, but
   neither reads anything of the other.

- The generator sends weights before each step, as a run does, but always those of the model.
- The trainer has the responses of 1, and does everything else of a step. Scores take longer than in a run, which
  computes them during the generation (`reward` in the output).

A recipe must generate in one round, without `rollout.tokens_per_step`. The ideal is the longer median of both sides.
The transfer is part of the generator's time, although a run's trainer waits for it: two independent processes would
not. The first two steps of each run do not count. Prints medians over the steps, and exits with 1 if the speed with
`ahead = 1` is below 0.85 of the ideal. The machine must be quiet: the last line has the cores on which other programs
worked during each run.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from cpu_time import PROC, cpu_seconds_with_children
from vs_trl import LETTERS, RECIPE, SHAPES, make_model, make_prompts

from ppoctl.algorithms.generation_specs import REWARD, ROLLOUT
from ppoctl.recipe.loading.load import load
from ppoctl.run import new_run, session
from ppoctl.run.loop import steps as loop
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stage_runner import Observer

SKIPPED = 2
"""Number of first steps that do not count."""
TARGET = 0.85
GENERATION = ("rollout", "next_rollout")
NAME = "timed"
WAIT_S = 600.0
"""Seconds that a side of the ideal waits for the other at most: longer than a start or a step."""
Step = dict[str, float]
"""Seconds of a step: of each stage by its name, `wall`, and `transfer`, which is part of a stage."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.toml"))
    parser.add_argument("--size", choices=sorted(SHAPES), help="model and prompts of vs_trl.py instead of a recipe")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name)
        if args.size is not None:
            args.recipe = _recipe_of(args.size, args.steps, runs / "model")
        at, runs_ahead = [_other_work()], list[list[Step]]()
        for ahead in (0, 1, 2):
            runs_ahead.append(_run(args, runs / str(ahead), ahead))
            at.append(_other_work())
        generator, trainer = _ideal(args, runs)
        at.append(_other_work())
    ideal = max(_median(generator, "wall"), _median(trainer, "wall"))
    alone, wall = runs_ahead[0], [_median(steps, "wall") for steps in runs_ahead]
    generation = _median(alone, *GENERATION)
    print(f"ahead = 0: {wall[0]:.2f} s, of which generation {generation:.2f} "
          f"(transfer {_median(alone, 'transfer'):.2f}), rest {wall[0] - generation:.2f}")  # fmt: skip
    for number in (1, 2):
        print(f"ahead = {number}: {wall[number]:.2f} s, of which transfer and waiting "
              f"{_median(runs_ahead[number], *GENERATION):.2f}")  # fmt: skip
    print(f"ideal:     {ideal:.2f} s; only generates {_median(generator, 'wall'):.2f} "
          f"(transfer {_median(generator, 'transfer'):.2f}), only trains {_median(trainer, 'wall'):.2f} "
          f"(reward {_median(trainer, 'reward'):.2f})")  # fmt: skip
    for number in (1, 2):
        print(f"speed of ahead = {number}: {ideal / wall[number]:.2f} of the ideal, "
              f"{wall[0] / wall[number]:.2f} times that of ahead = 0")  # fmt: skip
    other = [f"{(work - before) / (end - begin):.2f}" for (before, begin), (work, end) in pairwise(at)]
    print(f"cores on which other programs worked: {', '.join(other)}")
    if ideal / wall[1] < TARGET:
        sys.exit(f"below {TARGET} of the ideal")


def _median(steps: list[Step], *parts: str) -> float:
    return statistics.median(sum(step.get(part, 0.0) for part in parts) for step in steps)


def _other_work() -> tuple[float, float]:
    """Return the CPU seconds of other programs, and the time in seconds, both since a fixed moment."""
    user, nice, system = map(int, (PROC / "stat").read_text("utf-8").split()[1:4])
    busy_s = (user + nice + system) / os.sysconf("SC_CLK_TCK")
    return busy_s - cpu_seconds_with_children(), time.monotonic()


def _recipe_of(size: str, steps: int, folder: Path) -> Path:
    """Write a model and prompts as `vs_trl.py` has them by default, and return a recipe for them."""
    make_model(size, folder, vocabulary=len(LETTERS), ragged=True)
    make_prompts(folder / "prompts.jsonl", 64 * (steps + 1), 16, 64)
    values = {"model": folder, "prompts": folder / "prompts.jsonl", "dtype": "bfloat16", "threads": 1}
    values |= {"steps": steps, "save_every": steps, "batch": 64, "microbatch": 16, "epochs": 1, "lr": 1e-6}
    values |= {"prompt_tokens": 64, "response_tokens": 256, "old_logprobs": "trainer", "gae_lambda": 0.95}
    values |= {"value_clip": 0.2, "kl_coef": 0.02, "kl_place": "reward", "kl_estimator": "k1"}
    file = folder / "recipe.toml"
    file.write_text(RECIPE.format(**values), encoding="utf-8")
    return file


def _settings(args: argparse.Namespace, ahead: int) -> list[str]:
    settings = ["ppo.rollout_correction.kind=tis", "cluster.threads=1", f"name={NAME}", "expect={}"]
    settings += ["tracking.kind=none"]  # each side of the ideal would have a mirror
    settings += ["eval.every_steps=0", "eval.at_start=false", "eval.at_end=false"]
    settings += ["checkpoint.keep_rollouts_every_steps=1", f"checkpoint.every_steps={args.steps}"]
    return [f"rollout.ahead={ahead}", f"steps={args.steps}", *settings, *args.set]


def _run(args: argparse.Namespace, folder: Path, ahead: int) -> list[Step]:
    """Run the recipe with the command line, and return the steps that count."""
    command = [sys.executable, "-m", "ppoctl", "train", str(args.recipe.resolve()), "--runs", str(folder)]
    command += [word for setting in _settings(args, ahead) for word in ("--set", setting)]
    ended = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(ended.stderr)
    return _steps_of(folder / NAME, defaultdict(float))


def _ideal(args: argparse.Namespace, runs: Path) -> list[list[Step]]:
    """Run both sides of the ideal at the same time, and return the steps that count of the generator and of the
    trainer. `runs` has the run with `ahead = 0`."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2, timeout=WAIT_S)
    sides = {runs / "generator": _only_generate, runs / "trainer": _only_train}
    processes = [context.Process(target=side, args=(args, folder, barrier)) for folder, side in sides.items()]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("\n".join(folder.with_suffix(".log").read_text("utf-8") for folder in sides))
    waited = {folder: json.loads(folder.with_suffix(".json").read_text("utf-8")) for folder in sides}
    return [_steps_of(folder, dict(enumerate(waited[folder], 1))) for folder in sides]


@dataclass
class StepsTogether(Observer):
    """Observer of a side: before the first stage of a step, it waits until the other side is there too."""

    first: str
    barrier: Barrier
    waited_s: list[float] = field(default_factory=list)
    """Seconds of the wait of each step."""

    def on_stage(self, step: int, stage: str) -> None:  # noqa: ARG002 - a port
        if stage == self.first:
            began = time.monotonic()
            self.barrier.wait()
            self.waited_s.append(time.monotonic() - began)


def _only_generate(args: argparse.Namespace, folder: Path, barrier: Barrier) -> None:
    def generate(job: loop.RunContext) -> None:
        _, states, carry = loop.start_point(job)
        actor = states[job.policy]
        for step in range(1, args.steps + 1):
            stage: Any = replace(job.build(step, ROLLOUT), on_sample=None)  # nothing is scored
            job.runner.at(step)(stage, actor, loop.inputs_of(job, step, states, carry).prompts)
            renamed = replace(actor, step=step, lineage=f"{step:064x}")
            with job.states.advancing(actor, to=renamed):  # as the state has another name, its weights are sent
                actor = renamed

    _run_side(args, folder, StepsTogether(ROLLOUT.name, barrier), generate)


def _only_train(args: argparse.Namespace, folder: Path, barrier: Barrier) -> None:
    recorded, own = RunPaths(folder.parent / "0" / NAME), RunPaths(folder)

    def train(job: loop.RunContext) -> None:
        for step in range(1, args.steps + 1):
            shutil.copytree(recorded.stage(step, ROLLOUT.name), own.stage(step, ROLLOUT.name))
        loop.run(job)

    _run_side(args, folder, StepsTogether(REWARD.name, barrier), train)


def _run_side(
    args: argparse.Namespace, folder: Path, together: StepsTogether, do: Callable[[loop.RunContext], None]
) -> None:
    """Run one side of the ideal in this process, and write how long it waited."""
    with folder.with_suffix(".log").open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    recipe, paths = load([args.recipe.resolve()], _settings(args, 0)).recipe, RunPaths(folder)
    try:
        components, digests = session.prepare(recipe, datetime.now())
        new_run.create(paths, recipe, digests, command="train")
        plan = plan_resume(RecordedRun(paths))
        session.attempt_run(session.OpenedRun(paths, {1: recipe}, components, plan, observers=(together,)), do)
    except BaseException:
        together.barrier.abort()  # the other side then ends too
        raise
    folder.with_suffix(".json").write_text(json.dumps(together.waited_s), encoding="utf-8")


def _steps_of(run: Path, waited_s: Mapping[int, float]) -> list[Step]:
    """Return the steps that count. `waited_s`: seconds of each step to leave out."""
    steps: dict[int, Step] = defaultdict(lambda: defaultdict(float))
    for line in map(json.loads, (run / "journal.jsonl").read_text("utf-8").splitlines()):
        if "stage" in line:
            step = steps[line["step"]]
            step[line["stage"]] = line["seconds"]
            step["transfer"] += line["clocked"].get("time/transfer_s", 0.0)
            if line["step"] == max(steps):  # a generation may be committed in the next step
                step["at"] = line["at"]
    for number in range(2, len(steps) + 1):
        steps[number]["wall"] = steps[number]["at"] - steps[number - 1]["at"] - waited_s[number]
    return [steps[number] for number in range(SKIPPED + 1, len(steps) + 1)]


if __name__ == "__main__":
    main()
