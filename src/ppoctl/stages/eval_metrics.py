"""The figures of one pass over an evaluation set, from its samples."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ppoctl import metric_registry
from ppoctl.stages.pass_at import best_at, majority_at, mean_and_error

Mode = Literal["greedy", "sampled"]
Rows = list[dict[str, Any]]
UNSCORED = "unscored"
"""Outcome of a sample of which no score was asked: the reward needs a ground truth, and the row has none."""


@dataclass(frozen=True)
class Estimates:
    """What is estimated of the sampled responses to a prompt, besides the mean."""

    pass_at: tuple[int, ...] = ()
    maj_at: tuple[int, ...] = ()
    pass_score: float | None = None
    """Lowest score that passes; None: the score itself is what counts."""


def summarise(name: str, mode: Mode, rows: Sequence[dict[str, Any]], wanted: Estimates) -> dict[str, float]:
    """Scores with their standard errors (over prompts: samples of one prompt are not independent), and shares.

    A row without a score counts against nothing: it is left out of the estimates and shows in `error_frac`; a prompt
    of which fewer than k responses have one is left out of what is estimated of k. Where no score was asked there are
    lengths and truncations only.
    """
    asked = [row for row in rows if row["outcome"] != UNSCORED]
    figures = {
        "truncated_frac": sum(not row["terminated"] for row in rows) / len(rows),
        "response_tokens_mean": sum(row["response_tokens"] for row in rows) / len(rows),
    }
    if asked:
        figures["error_frac"] = sum(row["score"] is None for row in asked) / len(asked)
    by_prompt: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in asked:
        if row["score"] is not None:
            by_prompt[row["prompt_id"]].append(row)
    for figure, least, estimate in _estimates(wanted, mode):
        if found := [estimate(of_prompt) for of_prompt in by_prompt.values() if len(of_prompt) >= least]:
            figures[figure], figures[f"{figure}_stderr"] = mean_and_error(found)
    return {eval_metric_name(name, mode, figure): value for figure, value in figures.items()}


def eval_metric_name(name: str, mode: Mode, figure: str) -> str:
    """The metric that a figure of a pass over a set is. Raises KeyError where the registry has none."""
    return metric_registry.named(f"eval/{name}", f"greedy_{figure}" if mode == "greedy" else figure)


def _estimates(wanted: Estimates, mode: str) -> Iterator[tuple[str, int, Callable[[Rows], float]]]:
    """(figure, responses it takes, what it is of the scored rows of a prompt)."""
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
