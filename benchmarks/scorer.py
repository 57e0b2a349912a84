"""The cost of killable child processes for a quick reward.

    PYTHONPATH=src python benchmarks/scorer.py

Scores 256 answers to GSM8K in this process and by a pool of one child, the least of 20 rounds each.
"""

import time
from collections.abc import Callable
from contextlib import closing

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.rewards import gsm8k
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_pool import ScorerPool

SAMPLES, ROUNDS = 256, 20
REQUEST = ScoreRequest("train/0", "", (), "so it is\n#### 42", "#### 42", {}, "terminated")


def least_seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    here = least_seconds(lambda: [gsm8k.score(REQUEST, strict=True) for _ in range(SAMPLES)])
    with closing(ScorerPool(ScorerSpec("ppoctl.rewards.gsm8k:score", {"strict": True}))) as pool:

        def score_all() -> None:
            futures = [pool.submit(REQUEST) for _ in range(SAMPLES)]
            assert all(future.result().value for future in futures)

        score_all()
        pooled = least_seconds(score_all)
    each = (pooled - here) / SAMPLES * 1e6
    print(
        f"{SAMPLES} scores: {here * 1e3:.1f} ms here, {pooled * 1e3:.1f} ms in a child: {each:.0f} us more per sample"
    )


if __name__ == "__main__":
    main()
