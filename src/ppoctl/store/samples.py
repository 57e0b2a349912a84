"""Samples of a run's steps and evaluations, one row each, read from their records.

Imports numpy but not torch. The texts of prompts are not included, because decoding them requires a tokenizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ppoctl.batch.scores import FINISH_REASONS, REWARD_OUTCOMES
from ppoctl.errors import RecipeError, quoted
from ppoctl.store import manifest as manifests
from ppoctl.store import record_file
from ppoctl.store.outline import EVAL
from ppoctl.store.record_file import PlainRecord
from ppoctl.store.run_paths import RunPaths

ADVANTAGES = "advantages"
"""Stage after which all columns of a list of samples are known."""


@dataclass(frozen=True)
class SampleRow:
    """One row of a list of samples."""

    step: int
    row: int
    """Index in the records of the step, from 0."""
    set: str
    """Evaluation set and mode, such as `heldout/greedy`; empty: a training sample."""
    prompt_id: str
    sample: int
    score: float | None
    outcome: str
    tokens: int
    finish: str
    advantage: float | None
    """Mean advantage of the unmasked tokens; None: all tokens are masked out, or the stage has not run yet."""
    response: str


@dataclass(frozen=True)
class StepRecords:
    """The records of a step; None for stages that are not committed."""

    step: int
    rollouts: PlainRecord
    rewards: PlainRecord | None
    values: PlainRecord | None
    logprobs: PlainRecord | None
    advantages: PlainRecord | None

    @staticmethod
    def read(paths: RunPaths, step: int, *, per_token: bool = True) -> "StepRecords":
        """Read and verify the records; without `per_token`, only the records that `rows` requires.

        Raises RecipeError if the step has no rollouts, and the errors of `record_file.read`.
        """
        rollouts = record_file.read(paths, step, "rollout")
        if rollouts is None:
            raise no_rollouts(paths, step)
        rewards, advantages = (record_file.read(paths, step, name) for name in ("reward", ADVANTAGES))
        names = ("values", "logprobs")
        values, logprobs = (record_file.read(paths, step, name) if per_token else None for name in names)
        return StepRecords(step, rollouts, rewards, values, logprobs, advantages)

    @property
    def num_seqs(self) -> int:
        return len(self.rollouts["lengths"])

    def per_token(self, record: PlainRecord | None, name: str, row: int) -> list[float] | None:
        """Return a field's value for each token of a response; None if the field is not recorded."""
        grid = None if record is None else record.get(name)
        return None if grid is None else [float(value) for value in grid[row, : self.rollouts["lengths"][row]]]

    def prompt_tokens(self, row: int) -> list[int]:
        """Return the token ids of a response's prompt."""
        end = self._prompt_ends[row]
        ids: list[int] = self.rollouts["prompt_tokens"][end - self.rollouts["prompt_lengths"][row] : end].tolist()
        return ids

    @cached_property
    def _prompt_ends(self) -> Any:
        return self.rollouts["prompt_lengths"].cumsum()

    def kl(self, row: int) -> list[float] | None:
        """Return KL(actor || reference) of each token; None if the reference log-probs are not recorded.

        The value is the full KL if it is recorded; otherwise the estimate from the sampled token: the actor's
        log-prob minus the reference log-prob.
        """
        if (full := self.per_token(self.logprobs, "full_kl", row)) is not None:
            return full
        reference = self.per_token(self.logprobs, "reference", row)
        if reference is None:
            return None
        own = self.per_token(self.logprobs, "actor", row) or self.per_token(self.rollouts, "sampler_logprobs", row)
        assert own is not None
        return [actor - other for actor, other in zip(own, reference, strict=True)]

    def row(self, row: int) -> SampleRow:
        """Return the row of one response."""
        rollouts, rewards = self.rollouts, self.rewards
        outcome = "not scored" if rewards is None else REWARD_OUTCOMES[int(rewards["outcomes"][row])]
        score = float(rewards["scores"][row]) if rewards is not None and outcome == "ok" else None
        return SampleRow(
            step=self.step,
            row=row,
            set="",
            prompt_id=rollouts["prompt_ids"][row],
            sample=rollouts["sample_indices"][row],
            score=score,
            outcome=outcome,
            tokens=int(rollouts["lengths"][row]),
            finish=FINISH_REASONS[int(rollouts["finish"][row])],
            advantage=self._mean_advantage(row),
            response=rollouts["texts"][row],
        )

    def rows(self) -> list[SampleRow]:
        """Return the rows of all responses, in the order of the record."""
        return [self.row(row) for row in range(self.num_seqs)]

    def _mean_advantage(self, row: int) -> float | None:
        if self.advantages is None:
            return None
        unmasked = self.advantages["advantages"][row][self.advantages["mask"][row]]
        return float(unmasked.mean()) if len(unmasked) else None


def steps_with_rollouts(paths: RunPaths) -> list[int]:
    """Return the steps whose rollouts exist, oldest first."""
    return [step for step in paths.committed_steps() if manifests.read(paths.stage(step, "rollout")) is not None]


def last_step(paths: RunPaths) -> int:
    """Return the newest step with rollouts. Raises RecipeError if there is none."""
    kept = steps_with_rollouts(paths)
    if not kept:
        raise no_rollouts(paths, 1)
    return kept[-1]


def no_rollouts(paths: RunPaths, step: int) -> RecipeError:
    """Return the error for a step without rollouts; it lists the steps that have rollouts."""
    kept = steps_with_rollouts(paths)
    if not kept:
        return RecipeError(f"run `{paths.root}` has no rollouts yet", hint=f"ppoctl status {quoted(paths.root)}")
    nearest = min(kept, key=lambda other: abs(other - step))
    return RecipeError(
        f"step {step} of `{paths.root}` has no rollouts; steps with rollouts: {spans(kept)}",
        hint=f"ppoctl show {quoted(paths.root)} --step {nearest}",
    )


def steps_with_evaluation(paths: RunPaths) -> list[int]:
    """Return the steps after which an evaluation ran, oldest first; 0: before the first step."""
    return [step for step in paths.committed_steps() if manifests.read(paths.stage(step, EVAL)) is not None]


def evaluation_rows(paths: RunPaths, step: int) -> list[dict[str, Any]]:
    """Return the recorded samples of the evaluation after a step.

    Raises RecipeError if the step has no evaluation, and the errors of `record_file.read`.
    """
    record = record_file.read(paths, step, EVAL)
    if record is not None:
        rows: list[dict[str, Any]] = record["rows"]
        return rows
    evaluated = steps_with_evaluation(paths)
    if not evaluated:
        hint = f"ppoctl eval --ckpt {quoted(paths.root)}"
        raise RecipeError(f"run `{paths.root}` has no evaluation yet", hint=hint)
    nearest = min(evaluated, key=lambda other: abs(other - step))
    raise RecipeError(
        f"step {step} of `{paths.root}` has no evaluation; steps with an evaluation: {spans(evaluated)}",
        hint=f"ppoctl show {quoted(paths.root)} --eval --step {nearest}",
    )


def listed(step: int, rows: Sequence[dict[str, Any]]) -> list[SampleRow]:
    """Return the samples of an evaluation as rows of a list."""
    return [
        SampleRow(
            step=step,
            row=number,
            set=f"{row['set']}/{row['mode']}",
            prompt_id=row["prompt_id"],
            sample=row["sample"],
            score=row["score"],
            outcome=row["outcome"],
            tokens=row["response_tokens"],
            finish="terminated" if row["terminated"] else "truncated",
            advantage=None,
            response=row["response"],
        )
        for number, row in enumerate(rows)
    ]


def spans(steps: Sequence[int]) -> str:
    """Return sorted steps as text, with consecutive steps as a range: `1-4, 8, 10-12`."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1][1:] = [step]
        else:
            ranges.append([step])
    return ", ".join("-".join(map(str, bounds)) for bounds in ranges)
