"""GSM8K: is the number after `####` the right one? Imported in the children: nothing heavy.

Strict reading, as verl's (`verl/utils/reward_score/gsm8k.py`), so that curves compare:

    "#### 1,234"              1234      commas are removed
    "#### 41 ... #### 42"     42        the last `#### number` counts
    "#### $42", "####42"      nothing   a digit, dot, comma or minus follows `#### `, or it is no answer
    "#### 42."                "42."     compared as text: it is not "42"; neither is "42.0"

One difference: verl looks at the last 300 characters of the response, we at all of it unless `last_chars = 300`. The
two differ only where a response goes on for that long after its last answer: verl gives it 0.

Lenient reading, ours: the last number anywhere, compared as a number ("$42", "42." and "42.0" are all 42). verl's
`flexible` compares text here too, and so fails an answer at the end of a sentence.
"""

import re
from decimal import Decimal
from typing import Annotated, ClassVar, Literal

from ppoctl.batch.scores import ScoreRequest
from ppoctl.errors import RewardError
from ppoctl.recipe_table import RESULTS, AtLeastOne
from ppoctl.rewards.function import RewardValue, ScorerSpec, ending
from ppoctl.rewards.table import Candidates, ProcessScorer

MARK = "####"

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_LENIENT = re.compile(r"-?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_BARE = re.compile(r"-?[0-9.,]*[0-9][0-9.,]*")


class Gsm8kScorer(ProcessScorer):
    """Reward 1 where the number after the last `####` equals the answer's, else 0 (commas removed, string
    equality)."""

    needs_truth: ClassVar[bool] = True
    finds_answers: ClassVar[bool] = True

    kind: Annotated[Literal["gsm8k"], RESULTS]
    """The number after `####` is compared."""
    strict: Annotated[bool, RESULTS] = True
    """Read the number after `####` only; false: the last number anywhere in the response. The other reading is
    reported beside it."""
    last_chars: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Characters at the end of a response that are read (verl: 300); absent: all."""

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("ppoctl.rewards.gsm8k:score", {"strict": self.strict, "last_chars": self.last_chars})

    def candidates(self, truth: str) -> Candidates:
        try:
            number = gold_number(truth)
        except ValueError as error:
            raise RewardError(str(error), hint="name the column with the number as `answer`") from error
        # A bare number, as verl's parquet has it, gets the frame that a good response has.
        worked = truth if strict_number(truth) is not None else f"The answer is\n{MARK} {number}"
        before = worked[: worked.rindex(MARK)]
        # The lenient reading is right to credit an answer that stands in the working, so it must be cut before that.
        truncated = before if self.strict else before_number(before, number)
        wrong = f"{before}{MARK} {_other_number(number)}"
        return Candidates(gold=worked, wrong=wrong, empty="", truncated=truncated.rstrip())


def score(request: ScoreRequest, *, strict: bool = True, last_chars: int | None = None) -> RewardValue:
    """1 or 0 by the chosen reading; `extras` has the other one under its name.

    Raises ValueError on a truth without a number: that is a fault of the data, not a wrong response.
    """
    gold = gold_number(request.required_truth())
    read = ending(request.response, last_chars)
    marked, last = strict_number(read), lenient_number(read)
    by_strict = float(marked == gold)
    by_lenient = float(_same_number(last, gold))
    if strict:
        return RewardValue(by_strict, {"lenient": by_lenient}, answer=marked)
    # 42, 42.0 and 42.00 are one answer.
    answer = None if last is None else f"{Decimal(last).normalize():f}"
    return RewardValue(by_lenient, {"strict": by_strict}, answer=answer)


def strict_number(text: str) -> str | None:
    """What follows the last `#### `, commas removed; None where nothing does."""
    found = _STRICT.findall(text)
    return str(found[-1]).replace(",", "") if found else None


def lenient_number(text: str) -> str | None:
    """The last number anywhere, commas removed; None where there is none."""
    found = _LENIENT.findall(text)
    return str(found[-1]).replace(",", "") if found else None


def gold_number(truth: str) -> str:
    """The number of a gold answer (after `####`), or the bare number it is; raises ValueError where it is neither."""
    number = strict_number(truth)
    bare = truth.strip()
    if number is None and _BARE.fullmatch(bare):
        number = bare.replace(",", "")
    if number is None:
        raise ValueError(f"the ground truth `{bare[:80]}` is neither a number nor a text with `#### number`")
    return number


def before_number(text: str, number: str) -> str:
    """The text up to where the number first stands in it, in any spelling; all of it where it does not."""
    for found in _LENIENT.finditer(text):
        if _same_number(found.group().replace(",", ""), number):
            return text[: found.start()]
    return text


def _same_number(number: str | None, gold: str) -> bool:
    if number is None:
        return False
    # A gold such as "1.2.3" is no decimal number; it can still be met letter by letter.
    readable = _LENIENT.fullmatch(gold)
    return Decimal(number) == Decimal(gold) if readable else number == gold


def _other_number(number: str) -> str:
    """number + 1, in the same spelling where that is possible."""
    whole, dot, fraction = number.partition(".")
    return f"{int(whole) + 1}{dot}{fraction}" if whole.lstrip("-").isdecimal() else f"1{number}"
