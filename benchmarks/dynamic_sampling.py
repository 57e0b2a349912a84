"""Does dynamic sampling need fewer optimizer steps, and what does it generate for that?

Trains `quickstart-grpo.toml` with and without `rollout.groups` until the held-out accuracy reaches a bound, once for
each seed. Prints the optimizer steps of the actor, the responses that were generated, and the fraction of groups that
were dropped. There is no target: the answer depends on the problem.

    python benchmarks/dynamic_sampling.py --folder FOLDER [--seeds 1 2 3] [--bound 0.8] [--steps 40]

Cells that are already in FOLDER are not run again. Two run side by side, one thread each.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

RECIPE = Path(__file__).parents[1] / "recipes/quickstart-grpo.toml"
METRIC = "eval/heldout/pass_at_1"
VARIANTS = {
    "all groups": [],
    "mixed groups": ['rollout.groups={keep="mixed", max_rounds=8, when_short="use_fewer"}'],
}
"""Settings of each variant."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--bound", type=float, default=0.8)
    parser.add_argument("--steps", type=int, default=40, help="maximum number of steps")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    cells = list(product(VARIANTS, args.seeds))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda cell: run(*cell, args), cells))
    print("variant        seed  accuracy  steps  optimizer steps  responses  groups dropped  most rounds")
    for variant, seed in cells:
        print(f"{variant:12} {seed:6}  {described(args.folder / name_of(variant, seed))}")
    return 0


def name_of(variant: str, seed: int) -> str:
    return f"{variant.replace(' ', '-')}-{seed}"


def run(variant: str, seed: int, args: argparse.Namespace) -> None:
    """Train one cell with the command line, unless it exists."""
    name = name_of(variant, seed)
    if (args.folder / name).exists():
        return
    settings = [
        f"name={name}",
        f"seed={seed}",
        f"steps={args.steps}",
        "eval={every_steps=1, passes='sampled'}",
        "expect={}",
        f'until={{"{METRIC}"={{min={args.bound}}}}}',
        "tracking={kind='none'}",
        "cluster.threads=1",
        "checkpoint.every_steps=10",
        *VARIANTS[variant],
    ]
    command = [sys.executable, "-m", "ppoctl", "train", RECIPE, "--runs", args.folder]
    with (args.folder / f"{name}.log").open("w") as log:
        subprocess.run(
            [*command, *(part for setting in settings for part in ("--set", setting))],
            check=True,
            stdout=log,
            stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"},
        )


def described(run: Path) -> str:
    """Return the columns of a finished run, from its journal and its ledger."""
    lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    updates = [line for line in lines if line.get("stage") == "actor_update"]
    last = {line["step"]: line["figures"] for line in lines if line.get("stage", "").startswith("keep_groups")}
    rounds = [figures["groups/rounds"] for figures in last.values()] or [1.0]
    accuracy = next(line["figures"][METRIC] for line in reversed(lines) if METRIC in line.get("figures", {}))
    responses = sum(1 for _ in (run / "ledger.jsonl").open())
    recipe = json.loads((run / "recipe.resolved.json").read_text())
    samples, minibatch = recipe["rollout"]["samples_per_prompt"], recipe["ppo"]["minibatch_seqs"]
    kept = sum(figures["groups/kept"] for figures in last.values())
    dropped = 1 - kept * samples / responses if last else 0.0
    seqs = [figures["groups/kept"] * samples for figures in last.values()]
    seqs = seqs or [recipe["rollout"]["prompts_per_step"] * samples] * len(updates)
    optimizer_steps = sum(-(-int(count) // minibatch) for count in seqs)
    counts = f"{len(updates):5}  {optimizer_steps:15}  {responses:9}"
    return f"{accuracy:8.3f}  {counts}  {dropped:14.3f}  {max(rounds):11.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
