"""Comparison of two evaluations, prompt by prompt. Light: reads the rows of their samples only."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ppoctl.errors import RecipeError
from ppoctl.store.eval_samples import SampleDict
from ppoctl.store.paired import PairedDifference, paired

_TIE = 1e-9


@dataclass(frozen=True)
class Changed:
    """A prompt that the two evaluations score differently: the mean scores of its samples."""

    prompt: str
    scores: tuple[float, float]


@dataclass(frozen=True)
class ComparedSet:
    """One set, drawn in one mode, in both evaluations."""

    set: str
    mode: str
    scores: tuple[float, float]
    """Mean score over the prompts that are compared."""
    difference: PairedDifference
    left_out: int
    """Prompts that have a score in one of the two only, or none."""
    changed: tuple[Changed, ...]
    """Prompts whose score changed, the largest changes first."""


def compare_evaluations(left: Sequence[SampleDict], right: Sequence[SampleDict]) -> list[ComparedSet]:
    """What two evaluations say of the sets and modes that both have. Raises RecipeError where they share none."""
    both = [_scores(rows) for rows in (left, right)]
    found = [
        _compared(name, mode, both[0][name, mode], both[1][name, mode])
        for name, mode in both[0]
        if (name, mode) in both[1]
    ]
    compared = [each for each in found if each is not None]
    if not compared:
        has = [", ".join(sorted({f"`{name}` ({mode})" for name, mode in of})) or "none" for of in both]
        raise RecipeError(
            f"no prompt has a score in both evaluations; the first has sets {has[0]}, the second {has[1]}",
            hint="evaluate both on the same rows: ppoctl eval RECIPE --ckpt CHECKPOINT --out samples.jsonl",
        )
    return compared


def not_compared(left: Sequence[SampleDict], right: Sequence[SampleDict], found: Sequence[ComparedSet]) -> list[str]:
    """Sets and modes of either evaluation that no prompt with a score in both is of."""
    compared = {(each.set, each.mode) for each in found}
    of_both = sorted({(row["set"], row["mode"]) for row in (*left, *right)})
    return [f"{name} {mode}" for name, mode in of_both if (name, mode) not in compared]


_OfPrompts = dict[str, list[float]]


def _scores(rows: Sequence[SampleDict]) -> dict[tuple[str, str], _OfPrompts]:
    """Scores of each set and mode, by prompt; of one whose samples have none there are none."""
    found: dict[tuple[str, str], _OfPrompts] = {}
    for row in rows:
        of_prompt = found.setdefault((row["set"], row["mode"]), {}).setdefault(row["prompt_id"], [])
        if row["score"] is not None:
            of_prompt.append(row["score"])
    return found


def _compared(name: str, mode: str, left: _OfPrompts, right: _OfPrompts) -> ComparedSet | None:
    prompts = [prompt for prompt in left if left[prompt] and right.get(prompt)]
    if not prompts:
        return None
    means = [Changed(prompt, (fmean(left[prompt]), fmean(right[prompt]))) for prompt in prompts]
    differences = [each.scores[1] - each.scores[0] for each in means]
    changed = [each for each in means if abs(each.scores[1] - each.scores[0]) > _TIE]
    return ComparedSet(
        set=name,
        mode=mode,
        scores=(fmean(each.scores[0] for each in means), fmean(each.scores[1] for each in means)),
        difference=paired(differences),
        left_out=len({*left, *right}) - len(prompts),
        changed=tuple(sorted(changed, key=lambda each: -abs(each.scores[1] - each.scores[0]))),
    )
