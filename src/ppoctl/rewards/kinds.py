"""The kinds of reward that score a response by themselves: one line each. `reward` has those that are made of
others."""

from typing import Any

from ppoctl.rewards.code import CodeScorer
from ppoctl.rewards.dapo_math import DapoMathScorer
from ppoctl.rewards.exact_match import ExactMatchScorer
from ppoctl.rewards.format import FormatScorer
from ppoctl.rewards.gsm8k import Gsm8kScorer
from ppoctl.rewards.http import HttpScorer
from ppoctl.rewards.length import LengthScorer
from ppoctl.rewards.math import MathScorer
from ppoctl.rewards.model import ModelScorer
from ppoctl.rewards.python import PythonScorer
from ppoctl.rewards.table import PartTable, ScorerTable

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
)
"""What `[reward.cases.VALUE]` may be."""


def joined(scorer: type[ScorerTable], use: type, suffix: str) -> Any:
    """A table with the keys of a scorer and of what it is used as; it is described as the scorer is."""
    name = scorer.__name__.removesuffix("Scorer") + suffix
    return type(name, (scorer, use), {"__doc__": scorer.__doc__, "__module__": scorer.__module__})


PARTS: tuple[type[PartTable], ...] = tuple(joined(scorer, PartTable, "Part") for scorer in SCORERS)
"""What `[reward.parts.NAME]` may be."""
