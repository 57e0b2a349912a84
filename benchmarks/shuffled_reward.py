"""The quickstart with its rewards shuffled between samples must not meet its `[expect]`.

If a run learns as well from a reward that says nothing, the accuracy came from somewhere else. Prints both curves'
ends; exits 1 when the shuffled run meets its contract.

    python benchmarks/shuffled_reward.py [--steps 40]
"""

import argparse
import random
import tempfile
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

from ppoctl.batch.scores import Score, Scorer, ScoreRequest
from ppoctl.loop.expectations import history
from ppoctl.recipe.load import load
from ppoctl.store.layout import RunLayout
from ppoctl.store.resume_plan import plan_resume
from ppoctl.wire import new_run, session

RECIPE = Path(__file__).parents[1] / "recipes/quickstart.toml"


class ShuffledScorer:
    """Gives each training sample another one's score, once all of a step have been submitted. Those of evaluations
    stay as they are."""

    def __init__(self, scorer: Scorer, step_seqs: int) -> None:
        self._scorer = scorer
        self._step_seqs = step_seqs
        self._random = random.Random(0)
        self._scored: list[Future[Score]] = []
        self._handed: list[Future[Score]] = []

    def submit(self, request: ScoreRequest) -> Future[Score]:
        scored = self._scorer.submit(request)
        if not request.prompt_id.startswith("train/"):
            return scored
        handed: Future[Score] = Future()
        self._scored.append(scored)
        self._handed.append(handed)
        if len(self._handed) == self._step_seqs:
            self._random.shuffle(self._scored)
            for each, other in zip(self._handed, self._scored, strict=True):
                each.set_result(other.result())
            self._scored, self._handed = [], []
        return handed

    def close(self) -> None:
        self._scorer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        recipe = load([RECIPE], ["name=shuffled", "tracking={kind='none'}", f"steps={steps}"]).recipe
        sockets, digests = session.prepare(recipe)
        step_seqs = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
        sockets = replace(sockets, scorer=ShuffledScorer(sockets.scorer, step_seqs))
        layout = RunLayout(Path(folder) / "shuffled")
        new_run.create(layout, recipe, digests, command="train")
        ended = session.attempt_run(session.OpenedRun(layout, {1: recipe}, sockets, plan_resume(layout)))
    for metric, points in history(ended.lines).items():
        if metric.endswith("pass_at_1"):
            print(f"{metric}: {points[0][1]:.3f} at step {points[0][0]}, {points[-1][1]:.3f} at step {points[-1][0]}")
    met = all(verdict.met for verdict in ended.verdicts)
    print("contract met: the reward is not what it learned from" if met else "contract not met, as it must be")
    return int(met)


if __name__ == "__main__":
    raise SystemExit(main())
