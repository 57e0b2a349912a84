"""GSM8K: is the number after `####` correct? Scorer processes import this module, so it imports only the standard
library and recipe tables.

Strict reading, the same as in verl (`verl/utils/reward_score/gsm8k.py`), so that curves can be compared:

    "#### 1,234"              1234      commas are removed
    "#### 41 ... #### 42"     42        the last `#### number` is read
    "#### $42", "####42"      nothing   only a digit, dot, comma or minus after `#### ` makes an answer
    "#### 42."                "42."     compared as text: neither "42." nor "42.0" equals "42"

One difference: verl reads only the last 300 characters of the response. ppoctl reads the whole response, unless
`last_chars` is 300. Results differ only if a response continues for over 300 characters after its last answer: verl
gives such a response the score 0.

Lenient reading, specific to ppoctl: the last number anywhere, compared as a number ("$42", "42." and "42.0" are all
42). verl's `flexible` compares text, and so rejects an answer at the end of a sentence.
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
    """Reward 1 if the number after the last `####` equals the number of the answer, else 0. Commas are removed, and
    the numbers are compared as text."""

    needs_truth: ClassVar[bool] = True
    finds_answers: ClassVar[bool] = True

    kind: Annotated[Literal["gsm8k"], RESULTS]
    """Compare the number after `####`."""
    strict: Annotated[bool, RESULTS] = True
    """Read only the number after `####`. False: read the last number anywhere in the response. The score of the other
    reading is reported too."""
    last_chars: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Number of characters that are read from the end of a response (verl: 300); absent: all."""

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("ppoctl.rewards.gsm8k:score", {"strict": self.strict, "last_chars": self.last_chars})

    def candidates(self, truth: str) -> Candidates:
        try:
            number = gold_number(truth)
        except ValueError as error:
            raise RewardError(str(error), hint="name the column with the number as `answer`") from error
        # A ground truth that is only a number, as in verl's parquet files, is put into the text of a good response.
        worked = truth if strict_number(truth) is not None else f"The answer is\n{MARK} {number}"
        before = worked[: worked.rindex(MARK)]
        # The lenient reading accepts an answer in the worked solution, so the text must be truncated before that
        # answer.
        truncated = before if self.strict else before_number(before, number)
        wrong = f"{before}{MARK} {_other_number(number)}"
        return Candidates(gold=worked, wrong=wrong, empty="", truncated=truncated.rstrip())


def score(request: ScoreRequest, *, strict: bool = True, last_chars: int | None = None) -> RewardValue:
    """Return 1 if the answer is correct by the configured reading, else 0. `extras` has the score of the other
    reading, under the name of that reading.

    Raises ValueError if the ground truth has no number: that is a fault of the data, not a wrong response.
    """
    gold = gold_number(request.required_truth())
    read = ending(request.response, last_chars)
    marked, last = strict_number(read), lenient_number(read)
    by_strict = float(marked == gold)
    by_lenient = float(_same_number(last, gold))
    if strict:
        return RewardValue(by_strict, {"lenient": by_lenient}, answer=marked)
    # 42, 42.0 and 42.00 are the same answer.
    answer = None if last is None else f"{Decimal(last).normalize():f}"
    return RewardValue(by_lenient, {"strict": by_strict}, answer=answer)


def strict_number(text: str) -> str | None:
    """Return the number after the last `#### `, commas removed; None if there is none."""
    numbers = _STRICT.findall(text)
    return str(numbers[-1]).replace(",", "") if numbers else None


def lenient_number(text: str) -> str | None:
    """Return the last number in a text, commas removed; None if there is none."""
    numbers = _LENIENT.findall(text)
    return str(numbers[-1]).replace(",", "") if numbers else None


def gold_number(truth: str) -> str:
    """Return the number of a gold answer: after `####`, or the whole text if it is a number. Raises ValueError if the
    text is neither."""
    number = strict_number(truth)
    bare = truth.strip()
    if number is None and _BARE.fullmatch(bare):
        number = bare.replace(",", "")
    if number is None:
        raise ValueError(f"the ground truth `{bare[:80]}` is neither a number nor a text with `#### number`")
    return number


def before_number(text: str, number: str) -> str:
    """Return the text before the first occurrence of the number, in any spelling; the whole text if the number does
    not occur."""
    for match in _LENIENT.finditer(text):
        if _same_number(match.group().replace(",", ""), number):
            return text[: match.start()]
    return text


def _same_number(number: str | None, gold: str) -> bool:
    if number is None:
        return False
    # A gold answer such as "1.2.3" is not a decimal number; it is compared as text.
    readable = _LENIENT.fullmatch(gold)
    return Decimal(number) == Decimal(gold) if readable else number == gold


def _other_number(number: str) -> str:
    """Return the number plus 1, in the same spelling if that is possible."""
    whole, dot, fraction = number.partition(".")
    return f"{int(whole) + 1}{dot}{fraction}" if whole.lstrip("-").isdecimal() else f"1{number}"
