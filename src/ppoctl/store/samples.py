"""Samples of a run's steps and evaluations, a row each, gathered from their records. Light but for numpy; texts of
prompts need a tokenizer, and are not here."""

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
"""Stage with which all that a list says of a step's samples is there."""


@dataclass(frozen=True)
class SampleRow:
    """What a list of samples says of one."""

    step: int
    row: int
    """Place in the records of the step, from 0."""
    set: str
    """Evaluation set and mode, `heldout/greedy`; empty: a sample that is trained on."""
    prompt_id: str
    sample: int
    score: float | None
    outcome: str
    tokens: int
    finish: str
    advantage: float | None
    """Mean over the tokens that train; None: none does, or the step has not come so far."""
    response: str


@dataclass(frozen=True)
class StepRecords:
    """The records of a step as far as it has come."""

    step: int
    rollouts: PlainRecord
    rewards: PlainRecord | None
    values: PlainRecord | None
    logprobs: PlainRecord | None
    advantages: PlainRecord | None

    @staticmethod
    def read(paths: RunPaths, step: int, *, per_token: bool = True) -> "StepRecords":
        """Read and verify them; without `per_token` only what a list says. Raises RecipeError where the step has no
        rollouts, and as `record_file.read` does."""
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
        """One figure of each token of a response; None where it is not recorded."""
        grid = None if record is None else record.get(name)
        return None if grid is None else [float(each) for each in grid[row, : self.rollouts["lengths"][row]]]

    def prompt_tokens(self, row: int) -> list[int]:
        """Ids of the prompt in front of a response."""
        end = self._prompt_ends[row]
        found: list[int] = self.rollouts["prompt_tokens"][end - self.rollouts["prompt_lengths"][row] : end].tolist()
        return found

    @cached_property
    def _prompt_ends(self) -> Any:
        return self.rollouts["prompt_lengths"].cumsum()

    def kl(self, row: int) -> list[float] | None:
        """KL(actor || reference) of each token: of the whole distributions where it is recorded, else its estimate by
        the token that was drawn (log-prob less the reference's); None where the reference was not asked."""
        if (whole := self.per_token(self.logprobs, "full_kl", row)) is not None:
            return whole
        reference = self.per_token(self.logprobs, "reference", row)
        if reference is None:
            return None
        own = self.per_token(self.logprobs, "actor", row) or self.per_token(self.rollouts, "sampler_logprobs", row)
        assert own is not None
        return [mine - theirs for mine, theirs in zip(own, reference, strict=True)]

    def row(self, row: int) -> SampleRow:
        """One response."""
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
        """All responses in their order."""
        return [self.row(row) for row in range(self.num_seqs)]

    def _mean_advantage(self, row: int) -> float | None:
        if self.advantages is None:
            return None
        counted = self.advantages["advantages"][row][self.advantages["mask"][row]]
        return float(counted.mean()) if len(counted) else None


def steps_with_rollouts(paths: RunPaths) -> list[int]:
    """Steps whose rollouts are still there, oldest first."""
    return [step for step in paths.committed_steps() if manifests.read(paths.stage(step, "rollout")) is not None]


def last_step(paths: RunPaths) -> int:
    """The newest step with rollouts. Raises RecipeError where none has any."""
    kept = steps_with_rollouts(paths)
    if not kept:
        raise no_rollouts(paths, 1)
    return kept[-1]


def no_rollouts(paths: RunPaths, step: int) -> RecipeError:
    """The error for a step without rollouts: which steps have them."""
    kept = steps_with_rollouts(paths)
    if not kept:
        return RecipeError(f"run `{paths.root}` has no rollouts yet", hint=f"ppoctl status {quoted(paths.root)}")
    nearest = min(kept, key=lambda each: abs(each - step))
    return RecipeError(
        f"step {step} of `{paths.root}` has no rollouts; kept are those of {spans(kept)}",
        hint=f"ppoctl show {quoted(paths.root)} --step {nearest}",
    )


def steps_with_evaluation(paths: RunPaths) -> list[int]:
    """Steps that an evaluation was made after, oldest first; 0: before the first."""
    return [step for step in paths.committed_steps() if manifests.read(paths.stage(step, EVAL)) is not None]


def evaluation_rows(paths: RunPaths, step: int) -> list[dict[str, Any]]:
    """Samples of the evaluation after a step as it recorded them. Raises RecipeError where there is none, and as
    `record_file.read` does."""
    record = record_file.read(paths, step, EVAL)
    if record is not None:
        rows: list[dict[str, Any]] = record["rows"]
        return rows
    made = steps_with_evaluation(paths)
    if not made:
        hint = f"ppoctl eval --ckpt {quoted(paths.root)}"
        raise RecipeError(f"run `{paths.root}` has no evaluation yet", hint=hint)
    nearest = min(made, key=lambda each: abs(each - step))
    raise RecipeError(
        f"step {step} of `{paths.root}` has no evaluation; there are those of {spans(made)}",
        hint=f"ppoctl show {quoted(paths.root)} --eval --step {nearest}",
    )


def listed(step: int, rows: Sequence[dict[str, Any]]) -> list[SampleRow]:
    """Samples of an evaluation as a list says them."""
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
    """Steps in order as text, neighbours together: `1-4, 8, 10-12`."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][-1] + 1:
            found[-1][1:] = [step]
        else:
            found.append([step])
    return ", ".join("-".join(map(str, span)) for span in found)
