"""Samples of a committed step, with their prompts and each token as text, for people. This module does not import
torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ppoctl.core.batch.episodes import EndReason, Episode
from ppoctl.core.errors import RecipeError
from ppoctl.data.token_text import TokenText
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.stored_samples import StepRecords


@dataclass(frozen=True)
class ShownSample:
    """Sample as printed by `show`."""

    step: int
    row: int
    prompt_id: str
    sample: int
    stamp: str
    prompt: str
    response: str
    answer: str
    """Ground truth; empty if the row has no ground truth or the sample was not scored against it."""
    finish: str
    outcome: str
    score: float | None
    tokens: list[int]
    pieces: list[str]
    """Text that each token adds. If a character consists of several tokens, the first token has the character and the
    others are empty."""
    logprobs: list[float]
    values: list[float] | None
    advantages: list[float] | None
    kl: list[float] | None = None
    """KL from the reference, of each token; None: the reference was not used."""
    mask: list[bool] | None = None
    """Tokens that the actor generated, shape [tokens]; None: all."""
    unknown: list[bool] | None = None
    """Tokens that the tokenizer lacks, shape [tokens]; None: it has all of them. Such a token has no text."""
    episode: Episode | None = None
    """Turns of the response; None: it has one turn and no environment."""

    @property
    def differs_from_tokens(self) -> bool:
        """Whether the scorer saw another text than that of the tokens, with or without the last one."""
        return self.response not in ("".join(self.pieces), "".join(self.pieces[:-1]))

    @property
    def turns(self) -> int | None:
        """Number of turns; None: the response is not an episode."""
        return None if self.episode is None else len(self.episode.turns)

    @property
    def end(self) -> EndReason | None:
        """Why the episode ended; None: the response is not an episode."""
        return None if self.episode is None else self.episode.end

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values. `mask`, `unknown` and `episode` are absent if they are None."""
        optional = ("mask", "unknown", "episode")
        fields = {name: value for name, value in vars(self).items() if value is not None or name not in optional}
        return fields if self.episode is None else {**fields, "episode": self.episode.as_json()}


def read_samples(run: RecordedRun, step: int, rows: Iterable[int] | None = None) -> list[ShownSample]:
    """Return these rows of a step's samples, in row order; without `rows`, return all samples. Raises RecipeError if
    the step has no rollouts or no such row."""
    records = StepRecords.read(run, step)
    text = TokenText(run.recipe["model"]["path"])
    wanted = range(records.num_seqs) if rows is None else list(rows)
    for row in wanted:
        require_row(row, records.num_seqs)
    return [_shown(records, row, text) for row in wanted]


def require_row(row: int, count: int) -> None:
    """Raise RecipeError unless 0 <= row < count."""
    if not 0 <= row < count:
        raise RecipeError(
            f"there are {count} samples, but no row `{row}`", hint="give a row, counted from 0, with --sample"
        )


def _shown(records: StepRecords, row: int, text: TokenText) -> ShownSample:
    sample, rollouts, rewards = records.row(row), records.rollouts, records.rewards
    tokens: list[int] = rollouts.value("tokens", row)[: sample.tokens].tolist()
    mask: list[bool] = rollouts.value("mask", row)[: sample.tokens].tolist()
    episode = rollouts.value("episodes", row)
    unknown = text.unknown(tokens)
    return ShownSample(
        step=records.step,
        row=row,
        prompt_id=sample.prompt_id,
        sample=sample.sample,
        stamp=rollouts.value("stamps", row),
        prompt=text.text(records.prompt_tokens(row)),
        response=sample.response,
        answer=rewards.value("truths", row) or "",
        finish=sample.finish,
        outcome=sample.outcome,
        score=sample.score,
        tokens=tokens,
        pieces=text.pieces(tokens),
        logprobs=records.per_token(rollouts, "sampler_logprobs", row) or [],
        values=records.per_token(records.values, "values", row),
        advantages=records.per_token(records.advantages, "advantages", row),
        kl=records.kl(row),
        mask=None if all(mask) else mask,
        unknown=unknown if any(unknown) else None,
        episode=None if episode is None else Episode.from_json(episode),
    )
