"""Waiting times of a user: for the first step, an evaluation, a sample, a run that is already finished.

    python benchmarks/first_step.py --before ../parent [--repeat 3]

Two checkouts, this one and `--before`, run alternately with the same Python, so that other work on the machine slows
both. The best wall time of each counts, in seconds; the ratio is this checkout's time divided by the other's. Off a
terminal, with the quickstart:

- first line: until `train` prints anything;
- first step: until the line of step 1, with an evaluation before it;
- eval: all of `eval` on the resulting run;
- show: one sample of it;
- resume: of the run, which has nothing left to do.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parents[1]
FINISHED = ("--set", "steps=1", "--set", "expect={}")


def environment(tree: Path, cache: Path) -> dict[str, str]:
    """Return the environment of a checkout: its own code, and a separate bytecode cache."""
    return {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONPYCACHEPREFIX": str(cache / tree.name)}


@contextmanager
def started(tree: Path, cache: Path, words: tuple[str, ...], folder: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "ppoctl", *words]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment(tree, cache),
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        yield process


def train(tree: Path, cache: Path, folder: Path) -> dict[str, float]:
    """Return seconds until the first line and until the line of the first step."""
    began, found = time.perf_counter(), dict[str, float]()
    recipe = HERE / "recipes" / "quickstart.toml"
    with started(tree, cache, ("train", str(recipe), *FINISHED), folder) as process:
        assert process.stderr is not None
        for line in process.stderr:
            found.setdefault("first line", time.perf_counter() - began)
            if line.startswith("step 1/1  reward"):
                found["first step"] = time.perf_counter() - began
    assert process.returncode == 0, f"{tree}: train ended with {process.returncode}"
    found["to the prompt"] = time.perf_counter() - began
    return found


def whole(tree: Path, cache: Path, folder: Path, *words: str) -> float:
    began = time.perf_counter()
    with started(tree, cache, words, folder) as process:
        output = process.communicate()[1]
    assert process.returncode == 0, output
    return time.perf_counter() - began


def once(tree: Path, cache: Path) -> dict[str, float]:
    """Return the seconds of every measurement, on a new run."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        found = train(tree, cache, folder)
        run = "runs/quickstart"
        found["eval"] = whole(tree, cache, folder, "eval", "--ckpt", run)
        found["show"] = whole(tree, cache, folder, "show", run)
        found["resume"] = whole(tree, cache, folder, "resume", run)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description="How long a person waits, here and in another checkout.")
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    trees = {"before": args.before.resolve(), "now": HERE}
    with tempfile.TemporaryDirectory() as cache:
        runs = {name: [once(tree, Path(cache))] for name, tree in trees.items()}  # writes bytecode
        for _ in range(args.repeat):
            for name, tree in trees.items():
                runs[name].append(once(tree, Path(cache)))
    best = {name: {what: min(run[what] for run in found[1:]) for what in found[0]} for name, found in runs.items()}
    print(f"{'seconds until':<14} {'before':>8} {'now':>8} {'ratio':>7}   best of {args.repeat}")
    for what, before in best["before"].items():
        now = best["now"][what]
        print(f"{what:<14} {before:>8.2f} {now:>8.2f} {now / before:>7.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
