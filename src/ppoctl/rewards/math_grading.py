"""Mathematical equality of a response and a ground truth, by math-verify. Only the scorer processes of kind `math`
import this module: importing sympy takes over a second, and a child process reports that it is ready after its
imports.

math-verify's own timeouts are off: they treat an unfinished comparison as "different", but an error must never be a
score of 0. Instead, the child is killed at the deadline of the table, even while sympy runs C code, which a signal
handler cannot interrupt.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.rewards.boxed import last_boxed, stated
from ppoctl.rewards.function import RewardValue, ending
from ppoctl.rewards.written_numbers import in_ascii, require_numbers

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its timeouts are off

_UNIT_POWER = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*\^\s*\{?[23]\}?")
_BOXED = (LatexExtractionConfig(),)
_ANYWHERE = (ExprExtractionConfig(), LatexExtractionConfig())


def score(request: ScoreRequest, *, boxed: bool = False, last_chars: int | None = None) -> RewardValue:
    """Return 1 if the answer of the response equals the answer of the ground truth, else 0. With `boxed`, only the
    last box is read; otherwise math-verify searches the whole text. Raises ValueError if math-verify cannot read the
    ground truth to its end, and the errors of `stated`."""
    truth = _truth(stated(request.required_truth()))
    read = ending(request.response, last_chars)
    if boxed:
        box = last_boxed(read)
        if box is None:
            return RewardValue(0.0)
        answer = _parsed(box)
    else:
        answer = parse(_without_stops(in_ascii(read)), _ANYWHERE, parsing_timeout=None)
    is_right = verify(truth, answer, timeout_seconds=None)
    # Correct answers in any notation vote for the ground truth. Wrong answers vote for their own text, because sympy
    # does not compare them with each other.
    votes_for = truth if is_right else answer
    return RewardValue(float(is_right), answer=str(votes_for[0]) if votes_for else None)


@lru_cache(maxsize=4096)
def _truth(text: str) -> list[Any]:
    """Return the expressions that math-verify parses from a ground truth. The result is cached, because a row has
    many responses."""
    require_numbers(text)
    # math-verify reads `9:00` as a division by zero, which equals any other division by zero.
    expressions = [part for part in _parsed(text) if str(part) not in ("zoo", "nan")]
    if not expressions:
        raise ValueError(f"math-verify cannot read the ground truth `{text[:80]}`")
    read = expressions[-1]
    if isinstance(read, str) and read != "\\frac{1}{2}" and _digits(read) != _digits(in_ascii(text)):
        raise ValueError(f"math-verify reads only `{read[:80]}` of the ground truth `{text[:80]}`")
    return expressions


def _digits(text: str) -> list[str]:
    """Return the digits of a text in order of value, without 0, which math-verify may add, and without the power of a
    unit."""
    return sorted(digit for digit in _UNIT_POWER.sub("", text) if digit in "123456789")


def _parsed(text: str) -> list[Any]:
    return list(parse(_without_stops(f"\\boxed{{{in_ascii(text).strip()}}}"), _BOXED, parsing_timeout=None))


def _without_stops(text: str) -> str:
    """Return a text without the full stops that end a box or another group: math-verify would not see the formula
    before such a stop. A ground truth and a response are read alike, or `4:30 p.m.` would differ from itself."""
    return text.replace(".}", "}")
