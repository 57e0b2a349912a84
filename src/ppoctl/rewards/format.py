r"""Format: does the response match a regular expression? Scorer processes import this module, so it imports only the
standard library and recipe tables.

    pattern = '(?s)<think>.*?</think>\s*<answer>.*?</answer>'    match = "full"      only DeepSeek-R1's format
    pattern = '\\boxed\{'                                        match = "search"    a box anywhere

In TOML, write a pattern in single quotes, so that backslashes need no escaping. The scorer checks only the format: an
empty answer in the right tags gets the full reward, so use it as a component of a sum.
"""

import importlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.recipe_table import RESULTS
from ppoctl.rewards.function import RewardValue, ScorerSpec
from ppoctl.rewards.scorer_table import ProcessScorer

_OPTIONAL, _UNKNOWN = "\ue000", "\ue001"
"""Marks in the text of a pattern: here is text that may be absent, or some text that is not known."""
_TAG = re.compile(r"<[^<>]*>")
_FEWEST_CHARS = 3
_MOST_REPEATS = 40


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a Python regular expression: {error}") from error
    return pattern


class FormatScorer(ProcessScorer):
    """Reward 1 if the response matches a regular expression, else 0. This kind requires no ground truth.

    Formula: [pattern matches]
    Source: DeepSeek-R1 (arXiv:2501.12948), format rewards
    Default of: none
    Figures: reward/score_mean
    """

    kind: Annotated[Literal["format"], RESULTS]
    """Check the format of the response."""
    pattern: Annotated[str, RESULTS, AfterValidator(_compiles)]
    """Regular expression for Python's `re`. With `(?s)` at the beginning, a dot also matches line breaks."""
    match: Annotated[Literal["full", "search"], RESULTS] = "full"
    """Text that must match. full: the whole response, without surrounding whitespace; search: any part of the
    response."""

    @property
    def required_text(self) -> str:
        """The first literal text of the pattern, after text that may be absent; of a tag and text, only the tag."""
        known = _text_of(_parsed(self.pattern)).partition(_UNKNOWN)[0]
        text = next((text for text in known.split(_OPTIONAL) if len(text.strip()) >= _FEWEST_CHARS), "")
        tag = _TAG.match(text.strip())
        return tag.group() if tag else text

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("ppoctl.rewards.format:score", {"pattern": self.pattern, "whole": self.match == "full"})


def score(request: ScoreRequest, *, pattern: str, whole: bool = True) -> RewardValue:
    """Return 1 if the response matches, else 0. A pattern with catastrophic backtracking (`(a|aa)+$`) runs until the
    deadline of the table; the sample then has no score."""
    compiled = _compiled(pattern)
    match = compiled.fullmatch(request.response.strip()) if whole else compiled.search(request.response)
    return RewardValue(float(match is not None))


def _text_of(items: Iterable[tuple[Any, Any]]) -> str:
    """Return the literal text that each match of a parsed pattern contains, with marks where other text may be."""
    text = ""
    for code, value in items:
        match str(code):
            case "LITERAL":
                text += chr(value)
            case "SUBPATTERN":
                text += _text_of(value[-1])
            case "ATOMIC_GROUP":
                text += _text_of(value)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                least, most, repeated = value
                text += _text_of(repeated) * min(least, _MOST_REPEATS) + (_OPTIONAL if most != least else "")
            case "ASSERT":
                text += _OPTIONAL + (_text_of(value[1]) + _OPTIONAL if value[0] > 0 else "")
            case "AT" | "ASSERT_NOT":
                pass
            case _:
                text += _UNKNOWN
    return text


_parsed = importlib.import_module("re._parser").parse  # no public function parses a pattern
_compiled = lru_cache(maxsize=16)(re.compile)
