"""Fraction of a rollout in which the engine has nothing to generate, because every open episode waits for a tool.

    PYTHONPATH=src python benchmarks/tool_waits.py --folder FOLDER [--seconds 0 0.2] [--episodes 64] [--workers 64]

Trains the quickstart's model for three steps with an environment that sleeps in each answer, for several durations.
The model has random weights and ten end tokens, so turns have about 57 tokens, with a long tail as in real responses.
Prints `throughput/engine_idle_frac` and the seconds of each rollout; in the first one the processes start.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

QUICKSTART = Path(__file__).parents[1] / "recipes/quickstart"
ENVIRONMENT = """
import time


class Slow:
    def __init__(self, seconds):
        self.seconds = seconds

    def open(self, row, seed):
        return None

    def step(self, turn):
        time.sleep(self.seconds)
        return {"messages": "go on"}

    def close(self):
        pass
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.2], help="duration of an answer")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--workers", type=int, default=64)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "slow.py").write_text(ENVIRONMENT)
    write_random_model(args.folder / "model")
    print("seconds of a tool  idle fraction of steps 1 to 3   seconds of the rollouts")
    for seconds in args.seconds:
        steps = rollouts(args, seconds)
        idle = "  ".join(f"{metrics['throughput/engine_idle_frac']:.3f}" for metrics in steps)
        took = "  ".join(f"{metrics['time/rollout_s']:.1f}" for metrics in steps)
        print(f"{seconds:17}  {idle:28}  {took}", flush=True)
    return 0


def write_random_model(folder: Path) -> None:
    """Write the quickstart's tokenizer with a model of the same shape and random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shutil.copytree(QUICKSTART / "model", folder, dirs_exist_ok=True)
    torch.manual_seed(5)
    config = Qwen2Config.from_pretrained(folder)
    config.initializer_range = 0.02
    config.max_position_embeddings = 4096
    Qwen2ForCausalLM(config).save_pretrained(folder)


def rollouts(args: argparse.Namespace, seconds: float) -> list[dict[str, float]]:
    """Train three steps with the command line, and return the metrics of their rollouts."""
    name = f"tools-{seconds:g}"
    shutil.rmtree(args.folder / name, ignore_errors=True)
    environment = {
        "kind": "python",
        "path": f"{args.folder.resolve()}/slow.py:Slow",
        "options": {"seconds": seconds},
        "turns": args.turns,
        "tokens": 3000,
        "workers": args.workers,
    }
    settings = {
        "name": name,
        "steps": 3,
        "model.path": str(args.folder.resolve() / "model"),
        "environment": environment,
        "reward": {"kind": "environment"},
        "rollout.prompts_per_step": args.episodes,
        "rollout.samples_per_prompt": 1,
        "rollout.max_new_tokens": 2500,
        "rollout.stop_token_ids": list(range(400, 409)),
        "ppo.minibatch_seqs": args.episodes,
        "eval": {"at_start": False, "at_end": False},
        "health.reward_spread": {"min": "off"},
        "expect": {},
        "tracking": {"kind": "none"},
    }
    sets = (part for key, value in settings.items() for part in ("--set", f"{key}={toml(value)}"))
    command = [
        sys.executable,
        "-m",
        "ppoctl",
        "train",
        QUICKSTART.with_suffix(".toml"),
        "--runs",
        args.folder,
        *sets,
    ]
    with (args.folder / f"{name}.log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    lines = map(json.loads, (args.folder / name / "journal.jsonl").read_text().splitlines())
    entries = [entry for entry in lines if entry.get("stage") == "rollout"]
    return [{**entry["clocked"], "time/rollout_s": entry["seconds"]} for entry in entries]


def toml(value: object) -> str:
    """Return a value as `--set` reads it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
