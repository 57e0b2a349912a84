"""Exact match: is the response the answer? Imported in the children: nothing heavy."""

from typing import Annotated, ClassVar, Literal

from ppoctl.batch.scores import ScoreRequest
from ppoctl.errors import RewardError
from ppoctl.recipe_table import RESULTS
from ppoctl.rewards.function import RewardValue, ScorerSpec
from ppoctl.rewards.table import Candidates, ProcessScorer


class ExactMatchScorer(ProcessScorer):
    """Reward 1 where the stripped response equals the stripped answer, else 0."""

    needs_truth: ClassVar[bool] = True
    finds_answers: ClassVar[bool] = True

    kind: Annotated[Literal["exact_match"], RESULTS]
    """The whole response is compared."""
    ignore_case: Annotated[bool, RESULTS] = False
    """Compare without regard to case."""

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("ppoctl.rewards.exact_match:score", {"ignore_case": self.ignore_case})

    def candidates(self, truth: str) -> Candidates:
        gold = truth.strip()
        if not gold:
            raise RewardError("the ground truth is empty", hint="name another column as `answer`")
        return Candidates(gold=gold, wrong=_other_text(gold), empty="", truncated=gold[:-1])


def score(request: ScoreRequest, *, ignore_case: bool = False) -> RewardValue:
    """1 where response and truth are equal without the whitespace around them, else 0; raises ValueError on an empty
    truth, which an empty response would match."""
    wanted, given = request.required_truth().strip(), request.response.strip()
    if not wanted:
        raise ValueError("the ground truth is empty")
    if ignore_case:
        wanted, given = wanted.casefold(), given.casefold()
    return RewardValue(float(given == wanted), answer=given)


def _other_text(text: str) -> str:
    """A plausible other answer: the next number, the next letter, else another text."""
    if text.lstrip("-").isdecimal():
        return str(int(text) + 1)
    if len(text) == 1 and text.isascii() and text.isalpha():
        return "B" if text in "Aa" else "A"
    return f"not {text}"
