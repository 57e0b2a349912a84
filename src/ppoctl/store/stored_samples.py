"""Samples of a run's steps and evaluations, one row each, read from their records.

Imports numpy but not torch. The texts of prompts are not included, because decoding them requires a tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppoctl.core.batch.episodes import EndReason
from ppoctl.core.batch.scores import FINISH_REASONS, REWARD_OUTCOMES
from ppoctl.core.errors import RecipeError, quoted
from ppoctl.core.units import counted
from ppoctl.store import record_file
from ppoctl.store.outline import EVAL
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.sample_join import REWARD, JoinedRecords, StepJoin

ADVANTAGES = "advantages"
"""Stage after which all columns of a list of samples are known."""
END_TEXTS: Mapping[str, str] = {
    "done": "the environment ended the episode",
    "turns": "the limit of turns",
    "tokens": "a limit of tokens",
    "timeout": "the environment did not answer in time",
    "died": "the environment's process ended",
    "error": "the environment raised an error",
    "invalid": "the environment's answer is not an observation",
    "too_large": "the environment's answer is too large",
    "control_tokens": "the observation contains control tokens",
    "changed": "after a restart, the environment answered differently",
}
"""Meaning of the reasons for the end of an episode."""


@dataclass(frozen=True)
class SampleRow:
    """One row of a list of samples."""

    step: int
    row: int
    """Number of the sample in its step, from 0; for one round, the row of its records."""
    set: str
    """Evaluation set and mode, such as `heldout/greedy`; empty: a training sample."""
    prompt_id: str
    sample: int
    score: float | None
    outcome: str
    tokens: int
    finish: str
    advantage: float | None
    """Mean advantage of the unmasked tokens; None: all tokens are masked out, the sample was not selected, or the
    stage has not run yet."""
    response: str
    truth: str | None = None
    """Ground truth of the prompt; None: there is none, or the sample is not scored."""
    round: int = 1
    """Round of the step in which the sample was generated."""
    turns: int | None = None
    """Number of turns; None: the response is not an episode."""
    end: EndReason | None = None
    """Why the episode ended; None: the response is not an episode."""


@dataclass(frozen=True)
class StepRecords:
    """The records of a step, joined by sample. Samples of several rounds are numbered one round after another."""

    step: int
    rounds: tuple[int, ...]
    """Round of each sample."""
    rollouts: JoinedRecords
    rewards: JoinedRecords
    values: JoinedRecords
    logprobs: JoinedRecords
    advantages: JoinedRecords

    @staticmethod
    def read(run: RecordedRun, step: int, *, per_token: bool = True) -> "StepRecords":
        """Read and verify the records; without `per_token`, only the records that `rows` requires.

        Raises RecipeError if the step has no rollouts, and the errors of `record_file.read`.
        """
        join = StepJoin.of(run, step)
        if not join.samples:
            raise no_rollouts(run, step)
        nothing = JoinedRecords((None,) * len(join.samples))
        return StepRecords(
            step,
            rounds=join.rounds,
            rollouts=join.rollouts(),
            rewards=join.joined(REWARD),
            values=join.joined("values") if per_token else nothing,
            logprobs=join.joined("logprobs") if per_token else nothing,
            advantages=join.joined(ADVANTAGES),
        )

    @property
    def num_seqs(self) -> int:
        return len(self.rollouts.places)

    def per_token(self, records: JoinedRecords, name: str, row: int) -> list[float] | None:
        """Return a field's value for each token of a response; None if the field is not recorded."""
        values = records.value(name, row)
        return None if values is None else [float(value) for value in values[: self.rollouts.value("lengths", row)]]

    def prompt_tokens(self, row: int) -> list[int]:
        """Return the token ids of a response's prompt."""
        place = self.rollouts.places[row]
        assert place is not None
        rollouts, number = place
        end = int(rollouts["prompt_lengths"][: number + 1].sum())
        ids: list[int] = rollouts["prompt_tokens"][end - rollouts["prompt_lengths"][number] : end].tolist()
        return ids

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
        rollouts, code = self.rollouts, self.rewards.value("outcomes", row)
        outcome = "not scored" if code is None else REWARD_OUTCOMES[int(code)]
        episode = rollouts.value("episodes", row)
        return SampleRow(
            step=self.step,
            row=row,
            set="",
            prompt_id=rollouts.value("prompt_ids", row),
            sample=rollouts.value("sample_indices", row),
            score=float(self.rewards.value("scores", row)) if outcome == "ok" else None,
            outcome=outcome,
            tokens=int(rollouts.value("lengths", row)),
            finish=FINISH_REASONS[int(rollouts.value("finish", row))],
            advantage=self._mean_advantage(row),
            response=rollouts.value("texts", row),
            truth=self.rewards.value("truths", row),
            round=self.rounds[row],
            turns=None if episode is None else len(episode["turns"]),
            end=None if episode is None else episode["end"],
        )

    def rows(self) -> list[SampleRow]:
        """Return the rows of all responses, in the order of generation."""
        return [self.row(row) for row in range(self.num_seqs)]

    def _mean_advantage(self, row: int) -> float | None:
        advantages = self.advantages.value("advantages", row)
        if advantages is None:
            return None
        unmasked = advantages[self.advantages.value("mask", row)]
        return float(unmasked.mean()) if len(unmasked) else None


def steps_with_rollouts(run: RecordedRun) -> list[int]:
    """Return the steps whose rollouts exist, oldest first."""
    joins = (StepJoin.of(run, step) for step in run.paths.committed_steps())
    return [join.step for join in joins if run.manifest(*join.place(join.generated[0])) is not None]


def last_step(run: RecordedRun) -> int:
    """Return the newest step with rollouts. Raises RecipeError if there is none."""
    kept = steps_with_rollouts(run)
    if not kept:
        raise no_rollouts(run, 1)
    return kept[-1]


def no_rollouts(run: RecordedRun, step: int) -> RecipeError:
    """Return the error for a step without rollouts; it lists the steps that have rollouts."""
    paths, kept = run.paths, steps_with_rollouts(run)
    if not kept:
        return RecipeError(f"run `{paths.root}` has no rollouts yet", hint=f"ppoctl status {quoted(paths.root)}")
    nearest = min(kept, key=lambda other: abs(other - step))
    deleted = "" if step > kept[-1] else "; a run keeps older ones only by `checkpoint.keep_rollouts_every_steps`"
    return RecipeError(
        f"step {step} of `{paths.root}` has no rollouts; steps with rollouts: {spans(kept)}{deleted}",
        hint=f"ppoctl show {quoted(paths.root)} --step {nearest}",
    )


def evaluation_rows(run: RecordedRun, step: int) -> list[dict[str, Any]]:
    """Return the recorded samples of the evaluation after a step.

    Raises RecipeError if the step has no evaluation, and the errors of `record_file.read`.
    """
    paths = run.paths
    record = record_file.read(paths, step, EVAL)
    if record is not None:
        rows: list[dict[str, Any]] = record["rows"]
        return rows
    evaluated = run.evaluated_steps()
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
            truth=row.get("answer"),
            turns=row.get("turns"),
            end=row.get("end"),
        )
        for number, row in enumerate(rows)
    ]


def finish_text(finish: str, tokens: int, turns: int | None) -> str:
    """Return how a response ended, with its number of tokens and, for an episode, of turns."""
    return f"{finish} after {tokens} tokens" + ("" if turns is None else f" in {counted(turns, 'turn')}")


def spans(steps: Sequence[int]) -> str:
    """Return sorted steps as text, with consecutive steps as a range: `1-4, 8, 10-12`."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][-1] + 1:
            ranges[-1][1:] = [step]
        else:
            ranges.append([step])
    return ", ".join("-".join(map(str, bounds)) for bounds in ranges)
