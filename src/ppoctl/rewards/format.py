r"""Form: does the response match a regular expression? Imported in the children: nothing heavy.

    pattern = '(?s)<think>.*?</think>\s*<answer>.*?</answer>'    match = "full"      DeepSeek-R1's form, nothing else
    pattern = '\\boxed\{'                                        match = "search"    a box anywhere

In TOML a pattern stands in single quotes, in which a backslash is one. Only the form is looked at: alone it is
earned by an empty answer in the right tags, so it is a part of a sum.
"""

import re
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import AfterValidator

from ppoctl.batch.scores import ScoreRequest
from ppoctl.recipe_table import RESULTS
from ppoctl.rewards.function import RewardValue, ScorerSpec
from ppoctl.rewards.table import ProcessScorer


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression of Python's: {error}") from error
    return pattern


class FormatScorer(ProcessScorer):
    """Reward 1 where the response matches a regular expression, else 0; no ground truth is needed.

    Formula: [pattern matches]
    Source: DeepSeek-R1 (arXiv:2501.12948), format rewards
    Default of: nobody
    Figures: reward/score_mean
    """

    kind: Annotated[Literal["format"], RESULTS]
    """The form of the response is looked at."""
    pattern: Annotated[str, RESULTS, AfterValidator(_compiles)]
    """Regular expression of Python's `re`; `(?s)` at its beginning lets a dot match line breaks too."""
    match: Annotated[Literal["full", "search"], RESULTS] = "full"
    """Whether the whole response must match, without the whitespace around it, or any part of it."""

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("ppoctl.rewards.format:score", {"pattern": self.pattern, "whole": self.match == "full"})


def score(request: ScoreRequest, *, pattern: str, whole: bool = True) -> RewardValue:
    """1 or 0. A pattern that runs away (`(a|aa)+$`) is ended by the deadline of the table: the sample has no
    score."""
    compiled = _compiled(pattern)
    found = compiled.fullmatch(request.response.strip()) if whole else compiled.search(request.response)
    return RewardValue(float(found is not None))


_compiled = lru_cache(maxsize=16)(re.compile)
