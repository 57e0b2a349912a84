"""Lists of samples of a run: which of them, and in what order. Light but for numpy."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from statistics import fmean
from typing import Literal

from ppoctl.errors import RecipeError, quoted
from ppoctl.store import samples
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.samples import SampleRow, StepRecords

SortKey = Literal["row", "reward", "length", "advantage", "flipped"]
Question = tuple[str, str]
"""Evaluation set with mode, empty in training, and prompt: what samples of different steps have in common."""


@dataclass(frozen=True)
class SampleFilter:
    """What a sample must be like; None asks nothing."""

    finish: str | None = None
    outcome: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    grep: str | None = None
    """Text that is in the response."""
    prompt_id: str | None = None
    set: str | None = None
    """Evaluation set, or set and mode as `heldout/greedy`."""

    def takes(self, row: SampleRow) -> bool:
        """Whether the sample is one of those. One without a score is within no bounds of the reward."""
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
    """Where samples are taken from: the steps of a run, or its evaluations."""

    paths: RunPaths
    evaluations: bool = False

    def steps(self) -> list[int]:
        """Steps that have samples, oldest first."""
        return (samples.steps_with_evaluation if self.evaluations else samples.steps_with_rollouts)(self.paths)

    def last(self) -> int:
        """The newest of them. Raises RecipeError where there is none."""
        if found := self.steps():
            return found[-1]
        self.rows(1)
        raise AssertionError("a step without samples is refused")

    def rows(self, step: int) -> list[SampleRow]:
        """All samples of a step. Raises RecipeError where it has none, and as `record_file.read` does."""
        if self.evaluations:
            return samples.listed(step, samples.evaluation_rows(self.paths, step))
        return StepRecords.read(self.paths, step, per_token=False).rows()

    def of_prompt(self, prompt_id: str) -> list[SampleRow]:
        """All samples of a prompt, oldest first. Raises RecipeError where no step has any."""
        every = [row for step in self.steps() for row in self.rows(step)]
        found = [row for row in every if row.prompt_id == prompt_id]
        if not found:
            known = sorted({row.prompt_id for row in every})
            near = get_close_matches(prompt_id, known, n=1, cutoff=0.6) or [one for one in known if prompt_id in one]
            whole = f"ppoctl show {quoted(self.paths.root)}"
            raise RecipeError(
                f"no sample that is kept is of a prompt `{prompt_id}`"
                + (f"; did you mean `{near[0]}`?" if near else ""),
                hint=f"{whole} --eval" if self.evaluations else f"{whole} --list",
            )
        return found

    def before(self, step: int, rows: Sequence[SampleRow]) -> "dict[Question, Before]":
        """The mean score of each prompt of these rows in the nearest earlier step that has one."""
        open_, found = {(row.set, row.prompt_id) for row in rows}, dict[Question, Before]()
        for earlier in reversed([each for each in self.steps() if each < step]):
            if not open_:
                break
            then = means(self.rows(earlier))
            found |= {question: Before(earlier, then[question]) for question in open_ & then.keys()}
            open_ -= then.keys()
        return found


@dataclass(frozen=True)
class Before:
    """How a prompt did in the nearest earlier step that has it too."""

    step: int
    score: float


def means(rows: Iterable[SampleRow]) -> dict[Question, float]:
    """Mean score of each prompt's samples; a prompt without any score is left out."""
    scores: dict[Question, list[float]] = {}
    for row in rows:
        if row.score is not None:
            scores.setdefault((row.set, row.prompt_id), []).append(row.score)
    return {question: fmean(found) for question, found in scores.items()}


def flips(rows: Sequence[SampleRow], before: Mapping[Question, Before]) -> dict[Question, float]:
    """How far each prompt is from one verdict: the spread of its samples' scores, or the change of their mean since
    it was drawn before, if that is more. 0: all alike, and as before."""
    scores: dict[Question, list[float]] = {}
    for row in rows:
        if row.score is not None:
            scores.setdefault((row.set, row.prompt_id), []).append(row.score)
    spread = {question: max(found) - min(found) for question, found in scores.items()}
    now = means(rows)
    return {
        question: max(value, abs(now[question] - before[question].score) if question in before else 0.0)
        for question, value in spread.items()
    }


def ordered(
    rows: Sequence[SampleRow], key: SortKey, flipped: Mapping[Question, float], *, reverse: bool = False
) -> list[SampleRow]:
    """The most first: the highest reward, the longest, the prompts that flipped most (their samples together). What
    has no such figure comes last, either way; equal ones stay in their order. By `row`: as they were drawn."""
    if key == "row":
        return list(reversed(rows)) if reverse else list(rows)

    def figure(row: SampleRow) -> float | None:
        if key == "flipped":
            return flipped.get((row.set, row.prompt_id))
        return row.score if key == "reward" else row.advantage if key == "advantage" else float(row.tokens)

    known = [(found, row) for row in rows if (found := figure(row)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=not reverse)  # which keeps equal ones in their order
    if key == "flipped":  # prompts that flipped alike are not mixed
        first: dict[tuple[float, Question], int] = {}
        for place, (found, row) in enumerate(known):
            first.setdefault((found, (row.set, row.prompt_id)), place)
        known.sort(key=lambda pair: first[pair[0], (pair[1].set, pair[1].prompt_id)])
    return [row for _, row in known] + [row for row in rows if figure(row) is None]
