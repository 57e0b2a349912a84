"""Exact match: does the response equal the answer? Scorer processes import this module, so it imports only the
standard library and recipe tables."""

from typing import Annotated, ClassVar, Literal

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.errors import RewardError
from ppoctl.core.recipe_table import RESULTS
from ppoctl.rewards.function import RewardValue, ScorerSpec
from ppoctl.rewards.scorer_table import Candidates, ProcessScorer


class ExactMatchScorer(ProcessScorer):
    """Reward 1 if the stripped response equals the stripped answer, else 0."""

    needs_truth: ClassVar[bool] = True
    finds_answers: ClassVar[bool] = True

    kind: Annotated[Literal["exact_match"], RESULTS]
    """Compare the whole response with the answer."""
    ignore_case: Annotated[bool, RESULTS] = False
    """Ignore case in the comparison."""

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("ppoctl.rewards.exact_match:score", {"ignore_case": self.ignore_case})

    def require_truth(self, truth: str) -> None:
        if not truth.strip():
            raise RewardError("the ground truth is empty", hint="name another column as `answer`")

    def candidates(self, truth: str) -> Candidates:
        self.require_truth(truth)
        gold = truth.strip()
        return Candidates(gold=gold, wrong=_other_text(gold), empty="", truncated=gold[:-1])


def score(request: ScoreRequest, *, ignore_case: bool = False) -> RewardValue:
    """Return 1 if response and ground truth are equal after surrounding whitespace is removed, else 0. Raises
    ValueError if the ground truth is empty, because an empty response would match it."""
    truth, response = request.required_truth().strip(), request.response.strip()
    if not truth:
        raise ValueError("the ground truth is empty")
    if ignore_case:
        truth, response = truth.casefold(), response.casefold()
    return RewardValue(float(response == truth), answer=response)


def _other_text(text: str) -> str:
    """Return a plausible wrong answer: the next number, another letter, or another text."""
    if text.lstrip("-").isdecimal():
        return str(int(text) + 1)
    if len(text) == 1 and text.isascii() and text.isalpha():
        return "B" if text in "Aa" else "A"
    return f"not {text}"
