r"""Format: does the response match a regular expression? Scorer processes import this module, so it imports only the
standard library and recipe tables.

    pattern = '(?s)<think>.*?</think>\s*<answer>.*?</answer>'    match = "full"      only DeepSeek-R1's format
    pattern = '\\boxed\{'                                        match = "search"    a box anywhere

In TOML, write a pattern in single quotes, so that backslashes need no escaping. The scorer checks only the format: an
empty answer in the right tags gets the full reward, so use it as a component of a sum.
"""

import re
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import AfterValidator

from ppoctl.batch.scores import ScoreRequest
from ppoctl.recipe_table import RESULTS
from ppoctl.rewards.function import RewardValue, ScorerSpec
from ppoctl.rewards.table import ProcessScorer

_LITERAL = re.compile(
    r"(?:\(\?[a-zA-Z]+\))?(?:\^|\\A)?(?:\\s\*)?((?:\\[^A-Za-z0-9]|[^\\.^$*+?{}\[\]|()])+)(?![*?+{])"
)
"""The text at the beginning of a pattern, after flags and optional blanks."""
_GROUP = re.compile(r"\([^()]*\)")
_FEWEST_CHARS = 3


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
        """The literal text at the beginning of a pattern without alternatives."""
        literal = _LITERAL.match(self.pattern)
        has_alternatives = "|" in _GROUP.sub("", self.pattern)
        text = "" if literal is None or has_alternatives else re.sub(r"\\(.)", r"\1", literal[1])
        return text if len(text) >= _FEWEST_CHARS else ""

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("ppoctl.rewards.format:score", {"pattern": self.pattern, "whole": self.match == "full"})


def score(request: ScoreRequest, *, pattern: str, whole: bool = True) -> RewardValue:
    """Return 1 if the response matches, else 0. A pattern with catastrophic backtracking (`(a|aa)+$`) runs until the
    deadline of the table; the sample then has no score."""
    compiled = _compiled(pattern)
    match = compiled.fullmatch(request.response.strip()) if whole else compiled.search(request.response)
    return RewardValue(float(match is not None))


_compiled = lru_cache(maxsize=16)(re.compile)
