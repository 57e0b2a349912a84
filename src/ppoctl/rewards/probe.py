"""Ask the scorer before training does: a gold answer must beat a wrong, an empty and a truncated one.

It catches swapped arguments, a reward that is constant, a reward that does not know this dataset's answers, and a
recipe whose reward and data do not belong together. Imports no torch. It cannot tell whether a response of the model
will be *read* well: look at the first rollouts for that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ppoctl.errors import RewardError
from ppoctl.recipe.schema import ExactMatchReward, Gsm8kReward
from ppoctl.rewards import gsm8k
from ppoctl.rewards.pool import Outcome, ScorerPool
from ppoctl.rewards.verdict import is_trainable
from ppoctl.rewards.worker import Question

_SHOWN_CHARS = 60


@runtime_checkable
class HasAnswer(Protocol):
    """A row of a dataset: `data.rows.Row` and `batch.records.Prompt` alike."""

    @property
    def id(self) -> str: ...

    @property
    def answer(self) -> str: ...


@dataclass(frozen=True)
class Candidates:
    """Four responses to one question."""

    gold: str
    wrong: str
    empty: str
    truncated: str

    def items(self) -> list[tuple[str, str]]:
        return [("gold", self.gold), ("wrong", self.wrong), ("empty", self.empty), ("truncated", self.truncated)]


@dataclass(frozen=True)
class ProbeRow:
    """What each candidate of one row scored, by candidate name."""

    id: str
    truth: str
    candidates: Candidates
    outcomes: Mapping[str, Outcome]

    @property
    def gold_wins(self) -> bool:
        """Each candidate has a finite score, and gold's is above all others."""
        values = {name: outcome.value for name, outcome in self.outcomes.items()}
        scores = {name: value for name, value in values.items() if value is not None and is_trainable(value)}
        if scores.keys() != values.keys():
            return False
        return all(score < scores["gold"] for name, score in scores.items() if name != "gold")

    def describe(self) -> str:
        """`gold` scored 0, `wrong` scored 1, ..."""
        return ", ".join(f"{name} {_said(self.outcomes[name])}" for name, _ in self.candidates.items())


def candidates_of(reward: Gsm8kReward | ExactMatchReward, truth: str) -> Candidates:
    """Responses in the reward's own format, made from the ground truth; raises RewardError on a truth in which the
    reward's format is not to be found."""
    match reward:
        case Gsm8kReward():
            return _gsm8k_candidates(truth, strict=reward.strict)
        case ExactMatchReward():
            gold = truth.strip()
            if not gold:
                raise RewardError("the ground truth is empty", hint="name another column as `answer`")
            return Candidates(gold=gold, wrong=_other_text(gold), empty="", truncated=gold[:-1])


def probe(pool: ScorerPool, reward: Gsm8kReward | ExactMatchReward, rows: Sequence[HasAnswer]) -> list[ProbeRow]:
    """Score all candidates of all rows, in order; raises RewardError as `candidates_of`, naming the row."""
    asked: list[tuple[HasAnswer, Candidates]] = []
    for row in rows:
        try:
            asked.append((row, candidates_of(reward, row.answer)))
        except RewardError as error:
            raise RewardError(f"row `{row.id}`: {error.message}", hint=error.hint) from error
    questions = [Question(text, row.answer) for row, candidates in asked for _, text in candidates.items()]
    outcomes = iter(pool.score(questions))
    return [
        ProbeRow(row.id, row.answer, candidates, {name: next(outcomes) for name, _ in candidates.items()})
        for row, candidates in asked
    ]


def require_gold_wins(probed: Sequence[ProbeRow]) -> None:
    """Raises RewardError naming the first row whose gold answer does not beat all others, with what each scored."""
    for row in probed:
        if row.gold_wins:
            continue
        raise RewardError(
            f"the reward does not prefer the gold answer of row `{row.id}`: {row.describe()} "
            f"(ground truth `{_shown(row.truth)}`, gold answer tried `{_shown(row.candidates.gold)}`)",
            hint="check that `reward.kind` and the `answer` column belong together",
        )


def _gsm8k_candidates(truth: str, *, strict: bool) -> Candidates:
    try:
        number = gsm8k.gold_number(truth)
    except ValueError as error:
        raise RewardError(str(error), hint="name the column with the number as `answer`") from error
    # A bare number, as verl's parquet has it, gets the frame that a good response has.
    worked = truth if gsm8k.strict_number(truth) is not None else f"The answer is\n{gsm8k.MARK} {number}"
    before = worked[: worked.rindex(gsm8k.MARK)]
    # The lenient reading is right to credit an answer that stands in the working, so it must be cut before that.
    truncated = before if strict else gsm8k.before_number(before, number)
    return Candidates(
        gold=worked, wrong=f"{before}{gsm8k.MARK} {_other_number(number)}", empty="", truncated=truncated.rstrip()
    )


def _other_number(number: str) -> str:
    """number + 1, in the same spelling where that is possible."""
    whole, dot, fraction = number.partition(".")
    return f"{int(whole) + 1}{dot}{fraction}" if whole.lstrip("-").isdecimal() else f"1{number}"


def _other_text(text: str) -> str:
    """A plausible other answer: the next number, the next letter, else another text."""
    if text.lstrip("-").isdecimal():
        return str(int(text) + 1)
    if len(text) == 1 and text.isascii() and text.isalpha():
        return "B" if text in "Aa" else "A"
    return f"not {text}"


def _said(outcome: Outcome) -> str:
    if outcome.kind == "ok":
        return f"scored {outcome.value:g}"
    return f"gave no score ({outcome.message})"


def _shown(text: str) -> str:
    """The end of a text on one line: where the answer stands."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"...{line[-_SHOWN_CHARS:]}"
