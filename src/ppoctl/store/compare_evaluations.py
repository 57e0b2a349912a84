"""Comparison of two evaluations, prompt by prompt. Reads only the rows of their samples; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ppoctl.errors import RecipeError
from ppoctl.store.eval_samples import SampleDict
from ppoctl.store.paired import PairedDifference, paired

_TIE = 1e-9


@dataclass(frozen=True)
class Changed:
    """A prompt that the two evaluations score differently, with the mean scores of its samples in both."""

    prompt: str
    scores: tuple[float, float]


@dataclass(frozen=True)
class ComparedSet:
    """Comparison of one set in one mode."""

    set: str
    mode: str
    scores: tuple[float, float]
    """Mean score over the prompts that are compared."""
    difference: PairedDifference
    left_out: int
    """Number of prompts without a score in one or both evaluations."""
    changed: tuple[Changed, ...]
    """Prompts whose score changed, the largest changes first."""


def compare_evaluations(left: Sequence[SampleDict], right: Sequence[SampleDict]) -> list[ComparedSet]:
    """Compare two evaluations in the sets and modes that both have. Raises RecipeError if none is in both."""
    scores = [_scores(rows) for rows in (left, right)]
    results = [
        _compared(name, mode, scores[0][name, mode], scores[1][name, mode])
        for name, mode in scores[0]
        if (name, mode) in scores[1]
    ]
    compared = [result for result in results if result is not None]
    if not compared:
        has = [", ".join(sorted({f"`{name}` ({mode})" for name, mode in side})) or "none" for side in scores]
        raise RecipeError(
            f"no prompt has a score in both evaluations; the first has sets {has[0]}, the second {has[1]}",
            hint="evaluate both on the same rows: ppoctl eval RECIPE --ckpt CHECKPOINT --out samples.jsonl",
        )
    return compared


def not_compared(left: Sequence[SampleDict], right: Sequence[SampleDict], found: Sequence[ComparedSet]) -> list[str]:
    """Return the sets and modes of either evaluation that have no prompt with a score in both evaluations."""
    compared = {(result.set, result.mode) for result in found}
    of_either = sorted({(row["set"], row["mode"]) for row in (*left, *right)})
    return [f"{name} {mode}" for name, mode in of_either if (name, mode) not in compared]


_PromptScores = dict[str, list[float]]


def _scores(rows: Sequence[SampleDict]) -> dict[tuple[str, str], _PromptScores]:
    """Return the scores of each set and mode, by prompt. A prompt whose samples have no score has an empty list."""
    scores: dict[tuple[str, str], _PromptScores] = {}
    for row in rows:
        prompt_scores = scores.setdefault((row["set"], row["mode"]), {}).setdefault(row["prompt_id"], [])
        if row["score"] is not None:
            prompt_scores.append(row["score"])
    return scores


def _compared(name: str, mode: str, left: _PromptScores, right: _PromptScores) -> ComparedSet | None:
    prompts = [prompt for prompt in left if left[prompt] and right.get(prompt)]
    if not prompts:
        return None
    means = [Changed(prompt, (fmean(left[prompt]), fmean(right[prompt]))) for prompt in prompts]
    differences = [mean.scores[1] - mean.scores[0] for mean in means]
    changed = [mean for mean in means if abs(mean.scores[1] - mean.scores[0]) > _TIE]
    return ComparedSet(
        set=name,
        mode=mode,
        scores=(fmean(mean.scores[0] for mean in means), fmean(mean.scores[1] for mean in means)),
        difference=paired(differences),
        left_out=len({*left, *right}) - len(prompts),
        changed=tuple(sorted(changed, key=lambda mean: -abs(mean.scores[1] - mean.scores[0]))),
    )
