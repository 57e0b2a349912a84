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

Lenient reading, specific to ppoctl: the last number anywhere, compared as a number. "$42", "42." and "42.0" are all
42, and "1e3" is 1000. A response that ends in a part of a number, such as `3/4` or `2^10`, has no answer. verl's
`flexible` compares text, and so rejects an answer at the end of a sentence.

A ground truth is never shortened: the text after its last `####`, up to the end of the line, must be one number.
"""

import re
from decimal import Decimal
from typing import Annotated, ClassVar, Literal

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.errors import RewardError
from ppoctl.core.recipe_table import RESULTS, AtLeastOne
from ppoctl.rewards.boxed import MARK, marked_answer
from ppoctl.rewards.function import RewardValue, ScorerSpec, ending
from ppoctl.rewards.scorer_table import Candidates, ProcessScorer
from ppoctl.rewards.verbatim import other_answer, verbatim_answer
from ppoctl.rewards.written_numbers import in_ascii

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_LENIENT = re.compile(r"-?(?:\\?\$)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_BEFORE_A_PART = re.compile(
    r"(?:[\^\u221a]|\*\*|[0-9)}]\s?:|[0-9)}]\s*(?:[/\u00f7\u2044\u2215]|//|\\div)\s*|[0-9.][eE][+-]?|\}\s*\{"
    r"|\\[dt]?frac\s*(?:\{[^{}]*\}|[0-9]\b)?\s*|\\sqrt(?:\[[^\]]*\])?\s*|\b0[xXbBoO][0-9A-Fa-f]*)[{(]?$"
)
"""Text before a number that is only a part of the number that is written: an exponent, a denominator, a root."""
_WORDS = re.compile(r"[A-Za-z]{2,}:?\s+(?:\\?\$)?$")
"""Text before a number of a sentence. A `!` after this number usually ends the sentence."""
_SEEN_CHARS = 40
_GOLD = re.compile(r"-?(?:(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")
"""A whole number or decimal number, with or without commas between groups of digits."""


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

    @property
    def required_text(self) -> str:
        return MARK if self.strict else ""

    def require_truth(self, truth: str) -> None:
        try:
            gold_number(truth)
        except ValueError as error:
            hint = "name the column with the number as `answer`"
            if MARK in truth:
                hint = 'set `kind = "math"`, which reads fractions, formulas and units'
            raise RewardError(str(error), hint=hint) from error

    def response_with(self, answer: str, truth: str) -> str:
        return f"{_working(truth)}{MARK} {answer}"

    def candidates(self, truth: str) -> Candidates:
        self.require_truth(truth)
        answer, before = verbatim_answer(truth), _working(truth)
        # The lenient reading accepts an answer in the worked solution, so the text must be truncated before that
        # answer.
        truncated = before if self.strict else before_number(before, gold_number(truth))
        gold, wrong = (self.response_with(text, truth) for text in (answer, other_answer(answer)))
        return Candidates(gold=gold, wrong=wrong, empty="", truncated=truncated.rstrip())


def _working(truth: str) -> str:
    """Return the worked solution of a ground truth. A ground truth that is only a number, as in verl's parquet files,
    is put into the text of a good response."""
    working, mark, _ = truth.rpartition(MARK)
    return working if mark else "The answer is\n"


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
    """Return the last number in a text, without commas. None: there is none, or it is only a part of a number, such
    as an exponent or a denominator."""
    read = in_ascii(text)
    number = None
    for number in _LENIENT.finditer(read):  # noqa: B007 - only the last match is used
        pass
    if number is None:
        return None
    before, after = read[max(number.start() - _SEEN_CHARS, 0) : number.start()], read[number.end() :]
    is_second_group = number.group().startswith(".") and before[-1:].isdigit()
    is_factorial = after.startswith("!") and (not _WORDS.search(before) or after[1:2] not in ("", *" \n!*\"'"))
    if is_second_group or is_factorial or _BEFORE_A_PART.search(before):
        return None
    return _digits(number.group())


def gold_number(truth: str) -> str:
    """Return the number of a gold answer: the line after its last `####`, or the whole text if it has none. Raises
    ValueError if this text is not one number from its first to its last character."""
    marked = marked_answer(truth)
    text = truth.strip() if marked is None else marked
    if _GOLD.fullmatch(text):
        return text.replace(",", "")
    if marked is None:
        raise ValueError(f"the ground truth `{text[:80]}` is neither a number nor a text with `{MARK} number`")
    raise ValueError(f"the ground truth `{MARK} {text[:80]}` is not one number, so only a part of it would be read")


def before_number(text: str, number: str) -> str:
    """Return the text before the first occurrence of the number, in any spelling; the whole text if the number does
    not occur. Numbers are in ASCII."""
    read = in_ascii(text)
    for match in _LENIENT.finditer(read):
        if _same_number(_digits(match.group()), number):
            return read[: match.start()]
    return text


def _digits(number: str) -> str:
    return re.sub(r"[,$\\]", "", number)


def _same_number(number: str | None, gold: str) -> bool:
    return number is not None and Decimal(number) == Decimal(gold)
