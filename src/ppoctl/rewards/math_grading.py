"""Mathematical equality of a response and a ground truth, by math-verify. Only scorer processes of this kind import
it: importing sympy takes over a second, and a child reports that it is ready only afterwards.

math-verify's own timeouts are off: they treat an unfinished comparison as "different", but an error must never be a
score of 0. The deadline of the table kills the child instead, also while sympy runs C code, which signals do not end.
"""

import logging
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from ppoctl.batch.scores import ScoreRequest
from ppoctl.rewards.boxed import last_boxed, stated
from ppoctl.rewards.function import RewardValue, ending

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its timeouts are off

_BOXED = (LatexExtractionConfig(),)
_ANYWHERE = (ExprExtractionConfig(), LatexExtractionConfig())


def score(request: ScoreRequest, *, boxed: bool = False, last_chars: int | None = None) -> RewardValue:
    """Return 1 if the answer of the response equals the answer of the ground truth, else 0. With `boxed`, only the
    last box is read; otherwise math-verify searches the whole text. Raises ValueError if the ground truth is empty or
    math-verify cannot read it."""
    truth = _truth(stated(request.required_truth()))
    read = ending(request.response, last_chars)
    if boxed:
        box = last_boxed(read)
        if box is None:
            return RewardValue(0.0)
        answer = _parsed(box)
    else:
        answer = parse(read, _ANYWHERE, parsing_timeout=None)
    is_right = verify(truth, answer, timeout_seconds=None)
    # All correct answers vote as one, in any notation. Wrong answers are not compared with each other by sympy.
    votes_for = truth if is_right else answer
    return RewardValue(float(is_right), answer=str(votes_for[0]) if votes_for else None)


@lru_cache(maxsize=4096)
def _truth(text: str) -> list[Any]:
    """Return the expressions that math-verify parses from a ground truth. Cached, since a row has many responses."""
    expressions = _parsed(text)
    if not expressions:
        raise ValueError(f"math-verify cannot read the ground truth `{text[:80]}`")
    return expressions


def _parsed(text: str) -> list[Any]:
    return list(parse(f"\\boxed{{{text}}}", _BOXED, parsing_timeout=None))
