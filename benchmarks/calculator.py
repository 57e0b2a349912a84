"""own/calculator-small learns to use its calculator; without the tool, or from shuffled rewards, accuracy stays low.

Trains the recipe with each seed in three variants: as it is (`tool`); without `[environment]`, so that a response has
one turn (`no-tool`); and as it is with rewards shuffled between samples (`tool-shuffled`). Prints held-out pass@1
before and after, with its standard error. Exits 1 unless, for each seed, `tool` ends two standard errors above its
start and above both others, `no-tool` ends below 0.3, and `tool-shuffled` does not end two standard errors above its
start.

    python benchmarks/calculator.py --folder FOLDER [--seeds 1 2 3] [--steps 30] [--only VARIANT ...]

Runs one after the other, with two threads. Runs that are already in FOLDER are not run again.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from learning import RECIPES, Result, trained

RECIPE = RECIPES / "own/calculator-small.toml"
VARIANTS = ("tool", "no-tool", "tool-shuffled")
QUESTIONS = 400
ACCURACY_WITHOUT_TOOL = 0.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--here", help=argparse.SUPPRESS, action="store_true")
    args = parser.parse_args()
    if args.here:
        run(args.only[0], args.seeds[0], args.folder, args.steps)
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    results = {
        (variant, seed): result_of(variant, seed, args.folder, args.steps)
        for seed in args.seeds
        for variant in args.only
    }
    return judged(results)


def result_of(variant: str, seed: int, folder: Path, steps: int) -> Result:
    """Train a variant in a separate process, unless its result exists, and return the result."""
    file = folder / f"{variant}-{seed}.json"
    if not file.exists():
        words = ["--folder", folder, "--steps", str(steps), "--only", variant, "--seeds", str(seed), "--here"]
        with file.with_suffix(".log").open("w") as log:
            environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
            subprocess.run([sys.executable, __file__, *words], check=True, stdout=log, stderr=log, env=environ)
        print(f"{variant} {seed}: {file.read_text()}", flush=True)
    return Result(**json.loads(file.read_text()))


def run(variant: str, seed: int, folder: Path, steps: int) -> None:
    """Train in this process, and write the result."""
    from ppoctl.recipe.loading.load import load

    text = RECIPE.read_text().replace('"calculator/', f'"{RECIPE.parent}/calculator/')
    if variant == "no-tool":
        text = re.sub(r"(?ms)^\[environment\]\n.*?(?=^\[)", "", text)
    path = folder / f"{variant}-{seed}.toml"
    path.write_text(text)
    settings = [f"seed={seed}", f"name={variant}-{seed}", f"steps={steps}", f"eval.every_steps={steps}", "expect={}"]
    recipe = load([path], [*settings, "tracking={kind='none'}", f"checkpoint.every_steps={steps}"]).recipe
    samples = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    result = trained(recipe, folder, [samples] if variant == "tool-shuffled" else [])
    path.with_suffix(".json").write_text(json.dumps(asdict(result)))


def error_of(result: Result) -> float:
    """Return the standard error of the accuracy after training."""
    return math.sqrt(result.after * (1 - result.after) / QUESTIONS)


def is_above(result: Result, accuracy: float, error: float) -> bool:
    """Whether a run ends two standard errors of the difference above an accuracy with this standard error."""
    return result.after - accuracy > 2 * math.hypot(error_of(result), error)


def judged(results: dict[tuple[str, int], Result]) -> int:
    """Print the table; return the exit code."""
    wrong = []
    print("variant         seed  before   after (standard error)  weights")
    for (variant, seed), result in results.items():
        before_error = error_of(Result(result.after, result.before, ""))
        print(f"{variant:15} {seed:4}  {result.before:6.3f}  {result.after:6.3f} ({error_of(result):.3f})", end="")
        print(f"          {result.weights}")
        if is_above(result, result.before, before_error) != (variant == "tool") and variant != "no-tool":
            wrong.append(f"{variant} {seed} {'does not rise' if variant == 'tool' else 'rises'}")
        if variant == "no-tool" and result.after >= ACCURACY_WITHOUT_TOOL:
            wrong.append(f"{variant} {seed} reaches {result.after:.3f}")
        tool = results.get(("tool", seed))
        if tool and variant != "tool" and not is_above(tool, result.after, error_of(result)):
            wrong.append(f"tool {seed} is not above {variant} {seed}")
    print("\n".join(wrong) or "the tool raises accuracy by more than two standard errors; nothing else does")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
