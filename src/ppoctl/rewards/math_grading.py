"""Mathematical equality of a response and a truth, by math-verify. Imported in the children that need it: sympy takes
a second and more, which is spent before the child is ready.

math-verify's own timeouts are off: they count what was not finished as different, and an error is never a score of 0.
The deadline of the table ends a child over which sympy lingers, wherever it does: also in C, where no signal helps.
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
    """1 where the response's answer equals the truth's, else 0; `boxed` reads its last box only, else math-verify
    looks for an answer anywhere. Raises ValueError on a truth that is empty or that math-verify cannot read."""
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
    # Right answers are one answer, however they are written; of two wrong ones nobody asks sympy.
    found = truth if is_right else answer
    return RewardValue(float(is_right), answer=str(found[0]) if found else None)


@lru_cache(maxsize=4096)
def _truth(text: str) -> list[Any]:
    """What math-verify reads in a truth: a row has many responses."""
    found = _parsed(text)
    if not found:
        raise ValueError(f"math-verify cannot read the ground truth `{text[:80]}`")
    return found


def _parsed(text: str) -> list[Any]:
    return list(parse(f"\\boxed{{{text}}}", _BOXED, parsing_timeout=None))
