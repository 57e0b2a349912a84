"""Every algorithm learns the quickstart, and none of them learns from uninformative rewards.

Trains the quickstart with each variant and seed, and with rewards shuffled between samples (the first `--shuffled`
seeds): then accuracy must not rise, otherwise the signal comes from somewhere else. Variants with a critic are
settings of `quickstart.toml`, the others of `quickstart-grpo.toml` (32 prompts, 8 responses each). Prints held-out
accuracy before and after, and a digest of the final weights, which must differ between variants. Exits 1 if a variant
does not rise by 0.2, a shuffled one does, or weights are equal.

    python benchmarks/learning.py --folder FOLDER [--seeds 1 2 3] [--shuffled 1] [--steps 40] [--only NAME ...]

Cells that are already in FOLDER are not run again. Two run side by side, one thread each.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
METRIC = "eval/heldout/pass_at_1"
RISE_MIN = 0.2
ADAPTIVE = "adaptive={target_per_token=0.05, horizon_seqs=2000}"
VARIANTS = {
    "ppo": [],
    "vapo": [
        "ppo.advantages.gae_lambda_value=1.0",
        "ppo.advantages.length_adaptive_alpha=0.2",
        "ppo.policy_loss.clip_high=0.28",
        "ppo.policy_loss.positive_nll_coef=0.1",
        "ppo.critic_only_steps=2",
    ],
    "adaptive_kl": [f'ppo.kl={{place="reward", estimator="k1", coef=0.02, {ADAPTIVE}}}'],
    "gspo": ['ppo.policy_loss={kind="gspo", aggregation="sequence_mean_token_mean"}'],
    "cispo": ['ppo.policy_loss={kind="cispo", clip_high=0.28}'],
    "top_layers": ["actor.train.top_layers=2", "critic.train.top_layers=2"],
    "value_head": ["critic={on='actor'}"],
    "lora": [
        "actor.train={lora={rank=8, alpha=32}}",
        "critic.train={lora={rank=8, alpha=32}}",
        "actor.optimizer.lr=1e-3",
        "critic.optimizer.lr=2e-3",
    ],
    "partial": ["rollout.tokens_per_step=12", "ppo.rollout_correction.kind=tis"],
    "two_ahead": ["rollout.ahead=2", "ppo.rollout_correction.kind=tis"],
    "grpo": [],
    "rloo": ['ppo.advantages={kind="rloo"}'],
    "reinforce_pp": ['ppo.advantages={kind="reinforce_plus_plus"}'],
    "remax": ['ppo.advantages={kind="remax"}'],
}
"""Settings of each variant."""
CRITIC_FREE = ("grpo", "rloo", "reinforce_pp", "remax")
"""Variants of `quickstart-grpo.toml`."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    variant: str
    seed: int
    shuffled: bool

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.seed}" + ("-shuffled" if self.shuffled else "")


@dataclass(frozen=True)
class Result:
    """Accuracy before and after a run."""

    before: float
    after: float
    weights: str
    """Digest of the actor's final weights."""

    @property
    def rise(self) -> float:
        return self.after - self.before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--shuffled", type=int, default=1, help="number of seeds with shuffled rewards")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        run(Cell(**json.loads(args.cell)), args.folder, args.steps)
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    cells = list(cells_of(args.only, args.seeds, args.shuffled))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda cell: run_apart(cell, args.folder, args.steps), cells))
    return judged({cell: result_of(cell, args.folder) for cell in cells})


def cells_of(variants: Iterable[str], seeds: list[int], shuffled: int) -> Iterator[Cell]:
    for variant in variants:
        yield from (Cell(variant, seed, shuffled=False) for seed in seeds)
        yield from (Cell(variant, seed, shuffled=True) for seed in seeds[:shuffled])


def result_of(cell: Cell, folder: Path) -> Result:
    return Result(**json.loads((folder / f"{cell.name}.json").read_text()))


def run_apart(cell: Cell, folder: Path, steps: int) -> None:
    """Run a cell in a separate process, unless its result exists."""
    if (folder / f"{cell.name}.json").exists():
        return
    with (folder / f"{cell.name}.log").open("w") as log:
        subprocess.run(
            [sys.executable, __file__, "--folder", folder, "--steps", str(steps), "--cell", json.dumps(asdict(cell))],
            check=True,
            stdout=log,
            stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"},
        )
    print(f"{cell.name}: {result_of(cell, folder)}", flush=True)


def judged(results: dict[Cell, Result]) -> int:
    """Print the table; return the exit code."""
    wrong = []
    print("variant          seed before  after   rise   weights")
    for cell, result in results.items():
        says = "shuffled" if cell.shuffled else str(cell.seed)
        columns = f"{result.before:6.3f} {result.after:6.3f} {result.rise:+6.3f}  {result.weights}"
        print(f"{cell.variant:12} {says:>8} {columns}")
        if (result.rise >= RISE_MIN) == cell.shuffled:
            wrong.append(f"{cell.name} {'rises' if cell.shuffled else 'does not rise'}")
        others = {other.variant for other, found in results.items() if found.weights == result.weights}
        if others != {cell.variant}:
            wrong.append(f"{cell.name} ends with the weights of {', '.join(sorted(others - {cell.variant}))}")
    print("\n".join(wrong) or f"every variant rises by {RISE_MIN} and more, none from shuffled rewards")
    return int(bool(wrong))


def run(cell: Cell, folder: Path, steps: int) -> None:
    """Train in this process, and write the result."""
    from ppoctl.recipe.loading.load import load

    settings = [f"seed={cell.seed}", f"name={cell.name}", f"steps={steps}", f"eval.every_steps={steps}", "expect={}"]
    fixed = ["tracking={kind='none'}", "cluster.threads=1", f"checkpoint.every_steps={steps}"]
    path = RECIPES / ("quickstart-grpo.toml" if cell.variant in CRITIC_FREE else "quickstart.toml")
    recipe = load([path], [*settings, *fixed, *VARIANTS[cell.variant]]).recipe
    batches = [recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt]
    if cell.variant == "remax":
        batches.append(recipe.rollout.prompts_per_step)
    result = trained(recipe, folder, batches if cell.shuffled else [])
    (folder / f"{cell.name}.json").write_text(json.dumps(asdict(result)))


def trained(recipe, folder: Path, shuffled: list[int]) -> Result:
    """Train in this process. Rewards are shuffled if `shuffled` has the batches of `ShuffledScorer`."""
    from ppoctl.run import new_run, session
    from ppoctl.show.report.expectations import history
    from ppoctl.store.recorded_run import RecordedRun
    from ppoctl.store.resume_plan import plan_resume
    from ppoctl.store.run_paths import RunPaths

    components, digests = session.prepare(recipe, datetime.now())
    if shuffled:
        components = replace(components, scorer=ShuffledScorer(components.scorer, shuffled))
    found: list[str] = []
    actor, close = components.trainers["actor"], components.close_trainers

    def digest_and_close() -> None:
        found.append(weights_digest(actor))
        close()

    components = replace(components, close_trainers=digest_and_close)
    paths = RunPaths(folder / "runs" / recipe.name)
    new_run.create(paths, recipe, digests, command="train")
    ended = session.attempt_run(session.OpenedRun(paths, {1: recipe}, components, plan_resume(RecordedRun(paths))))
    points = history(ended.lines)[METRIC]
    return Result(points[0][1], points[-1][1], found[0])


def weights_digest(actor: object) -> str:
    digest = hashlib.sha256()
    for bucket in actor.ranks.weights().buckets():  # type: ignore[attr-defined]
        for name, checksum in sorted(bucket.checksums.items()):
            digest.update(f"{name} {checksum}".encode())
    return digest.hexdigest()[:12]


class ShuffledScorer:
    """Gives each training sample the score of another, once all samples of a stage have been submitted. Evaluations
    keep their scores."""

    def __init__(self, scorer, batches: list[int]) -> None:
        """Shuffle among this number of samples in each stage of a step that scores, in order."""
        self._scorer = scorer
        self._batches = itertools.cycle(batches)
        self._batch = next(self._batches)
        self._random = random.Random(0)
        self._scored: list[Future] = []
        self._handed: list[Future] = []

    def submit(self, request) -> Future:
        scored = self._scorer.submit(request)
        if not request.prompt_id.startswith("train/"):
            return scored
        handed: Future = Future()
        self._scored.append(scored)
        self._handed.append(handed)
        if len(self._handed) == self._batch:
            self._batch = next(self._batches)
            self._random.shuffle(self._scored)
            for each, other in zip(self._handed, self._scored, strict=True):
                each.set_result(other.result())
            self._scored, self._handed = [], []
        return handed

    def close(self) -> None:
        self._scorer.close()


if __name__ == "__main__":
    raise SystemExit(main())
