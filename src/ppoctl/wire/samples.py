"""Samples of a committed step, gathered from its artifacts, for people."""

from dataclasses import dataclass
from typing import Any, Literal

from ppoctl.batch.records import (
    FINISH_REASONS,
    REWARD_OUTCOMES,
    Advantages,
    Record,
    Rewards,
    Rollouts,
    Values,
)
from ppoctl.data.template import load_tokenizer
from ppoctl.errors import RecipeError, quoted
from ppoctl.store import manifest as manifests
from ppoctl.store import run_dir
from ppoctl.store.layout import RunLayout
from ppoctl.store.once import load_record


@dataclass(frozen=True)
class ShownSample:
    """What `show` prints."""

    step: int
    row: int
    prompt_id: str
    sample: int
    stamp: str
    prompt: str
    response: str
    answer: str
    """Ground truth; empty where there is none, or none was scored against."""
    finish: str
    outcome: str
    score: float | None
    tokens: list[int]
    pieces: list[str]
    """Each token as text."""
    logprobs: list[float]
    values: list[float] | None
    advantages: list[float] | None


def read_sample(layout: RunLayout, step: int, choice: int | Literal["worst", "best"]) -> ShownSample:
    """The sample in that row, or the one with the lowest or highest reward. Raises RecipeError when there is none."""
    read = _ReadStep(layout, step)
    return read.sample(_row(read.rollouts, read.rewards, choice))


def read_samples(layout: RunLayout, step: int) -> list[ShownSample]:
    """All samples of a step, in their order. Raises RecipeError when it has no rollouts."""
    read = _ReadStep(layout, step)
    return [read.sample(row) for row in range(read.rollouts.num_seqs)]


class _ReadStep:
    """The records of a step, and the tokenizer that makes text of them."""

    def __init__(self, layout: RunLayout, step: int) -> None:
        rollouts = _read(layout, step, "rollout")
        if not isinstance(rollouts, Rollouts):
            raise _no_rollouts(layout, step)
        self.rollouts = rollouts
        rewards, self.values, self.advantages = (
            _read(layout, step, name) for name in ("reward", "values", "advantages")
        )
        assert rewards is None or isinstance(rewards, Rewards)
        self.rewards = rewards
        self.values, self.advantages = _read(layout, step, "values"), _read(layout, step, "advantages")
        recipes = run_dir.recipes(layout)
        self.tokenizer = load_tokenizer(recipes[max(recipes)]["model"]["path"])
        self.step = step

    def sample(self, row: int) -> ShownSample:
        rollouts, rewards, values, advantages = self.rollouts, self.rewards, self.values, self.advantages
        length = int(rollouts.lengths[row])
        tokens = rollouts.tokens[row, :length].tolist()
        start = int(rollouts.prompt_lengths[:row].sum())
        prompt = rollouts.prompt_tokens[start : start + int(rollouts.prompt_lengths[row])].tolist()
        outcome = "not scored" if rewards is None else REWARD_OUTCOMES[int(rewards.outcomes[row])]
        return ShownSample(
            step=self.step,
            row=row,
            prompt_id=rollouts.prompt_ids[row],
            sample=rollouts.sample_indices[row],
            stamp=rollouts.stamps[row],
            prompt=self.tokenizer.decode(prompt),
            response=rollouts.texts[row],
            answer=(rewards.truths[row] or "") if rewards is not None else "",
            finish=FINISH_REASONS[int(rollouts.finish[row])],
            outcome=outcome,
            score=float(rewards.scores[row]) if rewards is not None and outcome == "ok" else None,
            tokens=tokens,
            pieces=[self.tokenizer.decode([token]) for token in tokens],
            logprobs=rollouts.sampler_logprobs[row, :length].tolist(),
            values=values.values[row, :length].tolist() if isinstance(values, Values) else None,
            advantages=advantages.advantages[row, :length].tolist() if isinstance(advantages, Advantages) else None,
        )


def _no_rollouts(layout: RunLayout, step: int) -> RecipeError:
    kept = [s for s in layout.committed_steps() if manifests.read(layout.stage(s, "rollout")) is not None]
    if not kept:
        return RecipeError(f"run `{layout.root}` has no rollouts yet", hint=f"ppoctl status {quoted(layout.root)}")
    nearest = min(kept, key=lambda s: abs(s - step))
    return RecipeError(
        f"step {step} of `{layout.root}` has no rollouts; kept are those of {', '.join(map(str, kept))}",
        hint=f"ppoctl show {quoted(layout.root)} --step {nearest}",
    )


def _row(rollouts: Rollouts, rewards: Rewards | None, choice: int | str) -> int:
    if isinstance(choice, int):
        if not 0 <= choice < rollouts.num_seqs:
            raise RecipeError(
                f"the step has {rollouts.num_seqs} samples, not a row `{choice}`", hint="count from 0, with --sample"
            )
        return choice
    if rewards is None:
        raise RecipeError("the step is not scored yet", hint="name a row with --sample")
    scores = rewards.scores.where(rewards.valid, float("inf") if choice == "worst" else float("-inf"))
    return int(scores.argmin() if choice == "worst" else scores.argmax())


def _read(layout: RunLayout, step: int, stage: str) -> Record[Any] | None:
    manifest = manifests.read(layout.stage(step, stage))
    return None if manifest is None else load_record(layout, step, stage, manifest)
