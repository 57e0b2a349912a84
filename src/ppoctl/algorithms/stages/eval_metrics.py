"""Metrics of one pass over an evaluation set, computed from its samples."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ppoctl.algorithms.stages.pass_at import best_at, majority_at, mean_and_error
from ppoctl.core import metric_registry

Mode = Literal["greedy", "sampled"]
Rows = list[dict[str, Any]]
UNSCORED = "unscored"
"""Outcome of a sample that is not scored, because the reward requires a ground truth and the row has none."""


@dataclass(frozen=True)
class Estimates:
    """Settings of the estimates that are computed, in addition to the mean, from the sampled responses to a
    prompt."""

    pass_at: tuple[int, ...] = ()
    maj_at: tuple[int, ...] = ()
    pass_score: float | None = None
    """Lowest score of a response that passes; None: the estimates use the score itself."""


def summarise(name: str, mode: Mode, rows: Sequence[dict[str, Any]], wanted: Estimates) -> dict[str, float]:
    """Return the metrics of one pass: scores with their standard errors, and fractions.

    Standard errors are over prompts, because samples of one prompt are not independent. A row without a score is
    excluded from the estimates and counted in `error_frac`. A prompt with fewer than k scored responses is excluded
    from the estimates for k responses. If no row is scored, only the metrics of lengths and truncation are returned.
    """
    scored_rows = [row for row in rows if row["outcome"] != UNSCORED]
    metrics = {
        "truncated_frac": sum(not row["terminated"] for row in rows) / len(rows),
        "response_tokens_mean": sum(row["response_tokens"] for row in rows) / len(rows),
    }
    if scored_rows:
        metrics["error_frac"] = sum(row["score"] is None for row in scored_rows) / len(scored_rows)
    by_prompt: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in scored_rows:
        if row["score"] is not None:
            by_prompt[row["prompt_id"]].append(row)
    for metric, min_rows, estimate in _estimates(wanted, mode):
        if estimates := [estimate(of_prompt) for of_prompt in by_prompt.values() if len(of_prompt) >= min_rows]:
            metrics[metric], metrics[f"{metric}_stderr"] = mean_and_error(estimates)
    return {eval_metric_name(name, mode, metric): value for metric, value in metrics.items()}


def eval_metric_name(name: str, mode: Mode, metric: str) -> str:
    """Return the full name of a metric of one pass over an evaluation set. Raises KeyError if it is not in the
    registry."""
    return metric_registry.named(f"eval/{name}", f"greedy_{metric}" if mode == "greedy" else metric)


def _estimates(wanted: Estimates, mode: str) -> Iterator[tuple[str, int, Callable[[Rows], float]]]:
    """Yield (name, minimum number of responses, function of the scored rows of a prompt)."""
    passes = partial(_passes, bound=wanted.pass_score)
    yield "pass_at_1", 1, partial(_best_at, of=passes, k=1)
    if wanted.pass_score is not None:
        yield "score_mean", 1, partial(_best_at, of=_scores, k=1)
    if mode == "greedy":
        return
    for k in wanted.pass_at:
        if k > 1:
            yield f"pass_at_{k}", k, partial(_best_at, of=passes, k=k)
        if wanted.pass_score is not None:
            yield f"best_at_{k}", k, partial(_best_at, of=_scores, k=k)
    for k in wanted.maj_at:
        yield f"maj_at_{k}", k, partial(_majority_at, of=passes, k=k)


def _scores(rows: Rows) -> list[float]:
    return [row["score"] for row in rows]


def _passes(rows: Rows, bound: float | None) -> list[float]:
    return [score if bound is None else float(score >= bound) for score in _scores(rows)]


def _best_at(rows: Rows, of: Callable[[Rows], list[float]], k: int) -> float:
    return best_at(of(rows), k)


def _majority_at(rows: Rows, of: Callable[[Rows], list[float]], k: int) -> float:
    return majority_at([row.get("given") for row in rows], of(rows), k)
