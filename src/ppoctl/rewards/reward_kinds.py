"""The scorers that do not combine other scorers, one per line. The module `reward` adds the kinds that combine
several scorers."""

from typing import Any

from ppoctl.core.recipe_table import Table, joined
from ppoctl.rewards.code import CodeScorer
from ppoctl.rewards.dapo_math import DapoMathScorer
from ppoctl.rewards.environment_reward import EnvironmentScorer
from ppoctl.rewards.exact_match import ExactMatchScorer
from ppoctl.rewards.format import FormatScorer
from ppoctl.rewards.gsm8k import Gsm8kScorer
from ppoctl.rewards.http import HttpScorer
from ppoctl.rewards.length import LengthScorer
from ppoctl.rewards.math import MathScorer
from ppoctl.rewards.model_reward import ModelScorer
from ppoctl.rewards.python_reward import PythonScorer
from ppoctl.rewards.scorer_table import PartTable, ScorerTable

SCORERS: tuple[type[ScorerTable], ...] = (
    Gsm8kScorer,
    MathScorer,
    DapoMathScorer,
    ExactMatchScorer,
    FormatScorer,
    LengthScorer,
    PythonScorer,
    HttpScorer,
    CodeScorer,
    ModelScorer,
    EnvironmentScorer,
)
"""Tables that `[reward.cases.VALUE]` accepts."""


def scorer_table(scorer: type[ScorerTable], use: type[Table], suffix: str) -> Any:
    """Return a table class with the keys of a scorer and of `use`."""
    return joined(scorer.__name__.removesuffix("Scorer") + suffix, scorer, use)


PARTS: tuple[type[PartTable], ...] = tuple(scorer_table(scorer, PartTable, "Part") for scorer in SCORERS)
"""Tables that `[reward.parts.NAME]` accepts."""
