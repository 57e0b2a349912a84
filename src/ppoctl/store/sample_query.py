"""Lists of samples of a run: filters and orders. Imports numpy but not torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from statistics import fmean
from typing import Literal

from ppoctl.core.errors import RecipeError, quoted
from ppoctl.store import stored_samples
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.stored_samples import SampleRow, StepRecords

SortKey = Literal["row", "reward", "length", "advantage", "flipped"]
Question = tuple[str, str]
"""Key of a prompt across steps: the evaluation set with its mode (empty in training), and the prompt's id."""


@dataclass(frozen=True)
class SampleFilter:
    """Conditions on a sample; None: no condition."""

    finish: str | None = None
    outcome: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    grep: str | None = None
    """Text that the response must contain."""
    prompt_id: str | None = None
    set: str | None = None
    """Evaluation set, or set and mode, such as `heldout/greedy`."""

    def takes(self, row: SampleRow) -> bool:
        """Return whether the sample meets all conditions. Without a score, it does not meet a bound on the reward."""
        low, high = self.min_reward, self.max_reward
        return (
            self.finish in (None, row.finish)
            and self.outcome in (None, row.outcome)
            and (low is None or (row.score is not None and row.score >= low))
            and (high is None or (row.score is not None and row.score <= high))
            and (self.grep is None or self.grep in row.response)
            and self.prompt_id in (None, row.prompt_id)
            and self.set in (None, row.set, row.set.rpartition("/")[0])
        )


@dataclass(frozen=True)
class Source:
    """Source of samples: the steps of a run, or its evaluations."""

    run: RecordedRun
    evaluations: bool = False

    def steps(self) -> list[int]:
        """Return the steps that have samples, oldest first."""
        return self.run.evaluated_steps() if self.evaluations else stored_samples.steps_with_rollouts(self.run)

    def last(self) -> int:
        """Return the newest step that has samples. Raises RecipeError if no step has samples."""
        if steps := self.steps():
            return steps[-1]
        self.rows(1)  # raises the RecipeError
        raise AssertionError("`rows` raises for a step without samples")

    def rows(self, step: int) -> list[SampleRow]:
        """Return all samples of a step. Raises RecipeError if there are none, or an error of `record_file.read`."""
        if self.evaluations:
            return stored_samples.listed(step, stored_samples.evaluation_rows(self.run, step))
        return StepRecords.read(self.run, step, per_token=False).rows()

    def of_prompt(self, prompt_id: str) -> list[SampleRow]:
        """Return all samples of a prompt, oldest first. Raises RecipeError if there are none."""
        rows = [row for step in self.steps() for row in self.rows(step)]
        of_prompt = [row for row in rows if row.prompt_id == prompt_id]
        if not of_prompt:
            known = sorted({row.prompt_id for row in rows})
            near = get_close_matches(prompt_id, known, n=1, cutoff=0.6) or [id for id in known if prompt_id in id]
            command = f"ppoctl show {quoted(self.run.paths.root)}"
            raise RecipeError(
                f"the run has no samples of prompt `{prompt_id}`" + (f"; did you mean `{near[0]}`?" if near else ""),
                hint=f"{command} --eval" if self.evaluations else f"{command} --list",
            )
        return of_prompt

    def before(self, step: int, rows: Sequence[SampleRow]) -> "dict[Question, Before]":
        """Return the mean score of each prompt of these rows in the nearest earlier step that scored the prompt."""
        open_, earlier_scores = {(row.set, row.prompt_id) for row in rows}, dict[Question, Before]()
        for earlier in reversed([other for other in self.steps() if other < step]):
            if not open_:
                break
            scores = means(self.rows(earlier))
            earlier_scores |= {prompt: Before(earlier, scores[prompt]) for prompt in open_ & scores.keys()}
            open_ -= scores.keys()
        return earlier_scores


@dataclass(frozen=True)
class Before:
    """Mean score of a prompt in the nearest earlier step that scored the prompt."""

    step: int
    score: float


def _scores(rows: Iterable[SampleRow]) -> dict[Question, list[float]]:
    """Return the scores of each prompt's samples; a prompt without a score is omitted."""
    scores: dict[Question, list[float]] = {}
    for row in rows:
        if row.score is not None:
            scores.setdefault((row.set, row.prompt_id), []).append(row.score)
    return scores


def means(rows: Iterable[SampleRow]) -> dict[Question, float]:
    """Return the mean score of each prompt's samples; a prompt without a score is omitted."""
    return {prompt: fmean(values) for prompt, values in _scores(rows).items()}


def flips(rows: Sequence[SampleRow], before: Mapping[Question, Before]) -> dict[Question, float]:
    """Return how much the scores of each prompt differ; 0: all are equal, and equal to those of the earlier step.

    The value is the larger of two numbers: the range of the scores of the prompt's samples, and the change of their
    mean since the earlier step.
    """
    ranges = {prompt: max(values) - min(values) for prompt, values in _scores(rows).items()}
    now = means(rows)
    return {
        prompt: max(value, abs(now[prompt] - before[prompt].score) if prompt in before else 0.0)
        for prompt, value in ranges.items()
    }


def ordered(
    rows: Sequence[SampleRow], key: SortKey, flipped: Mapping[Question, float], *, reverse: bool = False
) -> list[SampleRow]:
    """Return the rows sorted by `key`, highest value first; the key `flipped` keeps a prompt's samples together.

    Rows without a value are last, also if `reverse` is set. Rows with equal values stay in their order. The key `row`
    is the order of generation.
    """
    if key == "row":
        return list(reversed(rows)) if reverse else list(rows)

    def sort_value(row: SampleRow) -> float | None:
        if key == "flipped":
            return flipped.get((row.set, row.prompt_id))
        return row.score if key == "reward" else row.advantage if key == "advantage" else float(row.tokens)

    known = [(value, row) for row in rows if (value := sort_value(row)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=not reverse)  # `reverse` of `sort` keeps equal rows in their order
    if key == "flipped":  # keep the samples of a prompt together if other prompts have an equal value
        first: dict[tuple[float, Question], int] = {}
        for position, (value, row) in enumerate(known):
            first.setdefault((value, (row.set, row.prompt_id)), position)
        known.sort(key=lambda pair: first[pair[0], (pair[1].set, pair[1].prompt_id)])
    return [row for _, row in known] + [row for row in rows if sort_value(row) is None]
