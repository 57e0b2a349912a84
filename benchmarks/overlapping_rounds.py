"""Wall time of a step of dynamic sampling whose rounds overlap (`rollout.groups.overlap_rounds`), next to rounds one
after another.

    PYTHONPATH=src python benchmarks/overlapping_rounds.py [--seconds 0 0.5 2] [--steps 6] [--set KEY=VALUE ...]

Trains `quickstart-grpo.toml` with both, one after the other, for each number of seconds that the scorer waits for a
response. It scores up to 512 at a time, as a service does. Prints the seconds of a step (the mean over all steps but
the first), their ratio, and the tokens that were generated and not used, as a fraction of all. Exits with 1 if the
records of both runs differ. There is no target: the gain depends on the scorer. The machine must be quiet.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes/quickstart-grpo.toml"
SCORER = """
import asyncio
from ppoctl.rewards import gsm8k

async def score(sample, seconds):
    await asyncio.sleep(seconds)
    return gsm8k.score(sample)
"""
SETTINGS = (
    "rollout.groups.max_rounds=8",
    "rollout.groups.when_short=use_fewer",
    "eval={every_steps=0, at_start=false, at_end=false}",
    "expect={}",
    "tracking.kind=none",
    "cluster.threads=1",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.5, 2.0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    print("scorer   one by one   overlap   ratio   rounds   not used")
    for seconds in args.seconds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "scorer.py").write_text(SCORER)
            alone, overlapping = (_lines_of(args, folder, seconds, overlaps=overlaps) for overlaps in (False, True))
            if _identities(alone) != _identities(overlapping):
                sys.exit("the runs differ")
        walls = [_wall_s(lines, args.steps) for lines in (alone, overlapping)]
        kept = {line["step"]: line for line in overlapping if line.get("stage", "").startswith("keep_groups")}
        rounds = sum(line["figures"]["groups/rounds"] for line in kept.values()) / len(kept)
        unused = sum(line["clocked"]["groups/cancelled_tokens"] for line in kept.values())
        used = sum(line["figures"]["rollout/tokens"] for line in kept.values())
        print(f"{seconds:5.2f}s {walls[0]:11.2f}s {walls[1]:8.2f}s {walls[0] / walls[1]:7.2f} {rounds:8.1f} "
              f"{unused / (unused + used):10.2f}")  # fmt: skip


def _lines_of(args: argparse.Namespace, folder: Path, seconds: float, *, overlaps: bool) -> list[dict[str, Any]]:
    """Train, and return the lines of the journal."""
    name = "overlapping" if overlaps else "alone"
    scorer = f"{folder}/scorer.py:score"
    settings = [
        *SETTINGS,
        f"name={name}",
        f"steps={args.steps}",
        f"checkpoint.every_steps={args.steps}",
        f"rollout.groups.overlap_rounds={'true' if overlaps else 'false'}",
        f"reward={{kind='python', function='{scorer}', options={{seconds={seconds}}}, workers=8, batch_samples=64}}",
        *args.set,
    ]
    command = [sys.executable, "-m", "ppoctl", "train", str(RECIPE), "--runs", str(folder)]
    command += [word for setting in settings for word in ("--set", setting)]
    ended = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(ended.stderr)
    return [json.loads(line) for line in (folder / name / "journal.jsonl").read_text("utf-8").splitlines()]


def _identities(lines: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    return [(line["step"], line["stage"], line["identity"]) for line in lines if "stage" in line]


def _wall_s(lines: list[dict[str, Any]], steps: int) -> float:
    """Return the mean wall time of a step, without the first."""
    ends = {line["step"]: line["at"] for line in lines if line.get("stage") == "actor_update"}
    return float(ends[steps] - ends[1]) / (steps - 1)


if __name__ == "__main__":
    main()
