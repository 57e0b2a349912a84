"""Samples of a committed step, with their prompts and each token as text, for people. No torch is needed for it."""

from collections.abc import Iterable
from dataclasses import dataclass

from ppoctl.data.token_text import TokenText
from ppoctl.errors import RecipeError
from ppoctl.store import run_dir
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.samples import StepRecords


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
    """What each token adds to the text. A character in several tokens is with the first, the others are empty."""
    logprobs: list[float]
    values: list[float] | None
    advantages: list[float] | None
    kl: list[float] | None = None
    """KL from the reference, of each token; None: the reference was not asked."""


def read_samples(paths: RunPaths, step: int, rows: Iterable[int] | None = None) -> list[ShownSample]:
    """Samples of a step, in their order; without `rows`, all. Raises RecipeError when it has no rollouts, or no such
    row."""
    records = StepRecords.read(paths, step)
    recipes = run_dir.recipes(paths)
    text = TokenText(recipes[max(recipes)]["model"]["path"])
    wanted = range(records.num_seqs) if rows is None else list(rows)
    for row in wanted:
        require_row(row, records.num_seqs)
    return [_shown(records, row, text) for row in wanted]


def require_row(row: int, count: int) -> None:
    """Raise RecipeError unless one of so many samples is in that row."""
    if not 0 <= row < count:
        raise RecipeError(f"there are {count} samples, and no row `{row}`", hint="count from 0, with --sample")


def _shown(records: StepRecords, row: int, text: TokenText) -> ShownSample:
    told, rollouts, rewards = records.row(row), records.rollouts, records.rewards
    tokens: list[int] = rollouts["tokens"][row, : told.tokens].tolist()
    return ShownSample(
        step=records.step,
        row=row,
        prompt_id=told.prompt_id,
        sample=told.sample,
        stamp=rollouts["stamps"][row],
        prompt=text.text(records.prompt_tokens(row)),
        response=told.response,
        answer="" if rewards is None else rewards["truths"][row] or "",
        finish=told.finish,
        outcome=told.outcome,
        score=told.score,
        tokens=tokens,
        pieces=text.pieces(tokens),
        logprobs=records.per_token(rollouts, "sampler_logprobs", row) or [],
        values=records.per_token(records.values, "values", row),
        advantages=records.per_token(records.advantages, "advantages", row),
        kl=records.kl(row),
    )
