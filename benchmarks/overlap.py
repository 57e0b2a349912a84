"""Wall time of a step with `rollout.ahead = 1` next to `ahead = 0`, and next to the ideal.

    PYTHONPATH=src python benchmarks/overlap.py [--recipe recipes/quickstart.toml] [--steps 10] [--set KEY=VALUE ...]

Both runs are real, one after the other, with one CPU thread for each process. The ideal is what two processes reach
of which one only generates and the other only trains: the longer of both parts of `ahead = 0`, measured in the same
run, and the transfer, which neither can avoid. The first two steps of each run do not count. Prints medians over the
steps, and exits with 1 below 0.85 of the ideal speed. The machine must be quiet.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

SKIPPED = 2
"""Number of first steps that do not count."""
TARGET = 0.85
GENERATION = ("rollout", "next_rollout")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.toml"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        alone, ahead = (_steps_of(args, Path(name) / str(number), number) for number in (0, 1))
    generation, training, transfer = (
        statistics.median(part(step) for step in alone) for part in (_generation_s, _training_s, _transfer_s)
    )
    ideal = max(generation - transfer, training) + transfer
    wall = {
        number: statistics.median(step["wall_s"] for step in steps) for number, steps in enumerate((alone, ahead))
    }
    print(f"ahead = 0: {wall[0]:.2f} s, of which generation {generation:.2f} (transfer {transfer:.2f}), "
          f"rest {training:.2f}")  # fmt: skip
    print(f"ahead = 1: {wall[1]:.2f} s, of which waiting {statistics.median(map(_generation_s, ahead)):.2f}")
    print(f"ideal:     {ideal:.2f} s; speed of ahead = 1: {ideal / wall[1]:.2f} of it, "
          f"{wall[0] / wall[1]:.2f} times that of ahead = 0")  # fmt: skip
    if ideal / wall[1] < TARGET:
        sys.exit(f"below {TARGET} of the ideal")


def _steps_of(args: argparse.Namespace, folder: Path, ahead: int) -> list[dict[str, Any]]:
    """Run the recipe. Return the seconds of each step that counts, by stage, and its wall time."""
    settings = [
        f"rollout.ahead={ahead}",
        "ppo.rollout_correction.kind=tis",
        "cluster.threads=1",
        "eval.every_steps=0",
    ]
    settings += [f"steps={args.steps}", f"checkpoint.every_steps={args.steps}", "name=timed", "expect={}", *args.set]
    command = [sys.executable, "-m", "ppoctl", "train", str(args.recipe.resolve()), "--runs", str(folder)]
    command += [word for setting in settings for word in ("--set", setting)]
    ended = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(ended.stderr)
    steps: dict[int, dict[str, Any]] = defaultdict(dict)
    for line in map(json.loads, (folder / "timed" / "journal.jsonl").read_text("utf-8").splitlines()):
        if "stage" in line and line["step"] > 0:
            steps[line["step"]][line["stage"]] = line["seconds"]
            steps[line["step"]]["at"] = line["at"]
            steps[line["step"]]["transfer_s"] = line["clocked"].get("time/transfer_s", 0.0) + steps[line["step"]].get(
                "transfer_s", 0.0
            )
    for step in range(2, args.steps + 1):
        steps[step]["wall_s"] = steps[step]["at"] - steps[step - 1]["at"]
    return [steps[step] for step in range(SKIPPED + 1, args.steps + 1)]


def _transfer_s(step: dict[str, Any]) -> float:
    return float(step["transfer_s"])


def _generation_s(step: dict[str, Any]) -> float:
    return sum(float(step.get(stage, 0.0)) for stage in GENERATION)


def _training_s(step: dict[str, Any]) -> float:
    return float(step["wall_s"]) - _generation_s(step)


if __name__ == "__main__":
    main()
