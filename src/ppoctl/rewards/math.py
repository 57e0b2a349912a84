r"""Mathematics: is the answer the right one, however it is written? The grading is in `math_grading` (math-verify)
and `boxed` (text), which the children import.

    rule            reads                                      compares                     as in
    "math_verify"   an answer anywhere, by math-verify         by math-verify               NeMo-RL `hf_math_verify`
    "last_box"      the last `\boxed{...}`                     by math-verify
    "hendrycks"     the last `\boxed{...}`                     as text, written in one way  verl's for MATH

math-verify knows that `0.5`, `\frac12` and `1/2` are one number, that the order within a set does not matter, and
that of an interval does. Looking anywhere it takes the last formula or number where nothing is boxed: that credits a
response that merely mentions the answer, and one that repeats a question in which the answer stands. `last_box` does
not, and is as fast for a long response as for a short one.
"""

from typing import Annotated, ClassVar, Literal

from ppoctl.errors import RewardError
from ppoctl.recipe_table import RESULTS, AtLeastOne
from ppoctl.rewards.boxed import other_answer, stated
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.table import Candidates, ProcessScorer


class MathScorer(ProcessScorer):
    r"""Reward 1 where the response's answer is mathematically the truth's, else 0. A truth is an answer, or a text
    with a `\boxed{answer}` or `#### answer`.

    Formula: [answer = truth]
    Source: math-verify (github.com/huggingface/Math-Verify); hendrycks: arXiv:2103.03874
    Default of: NeMo-RL for math (`hf_math_verify`); verl has hendrycks for MATH
    Figures: reward/score_mean
    """

    needs_truth: ClassVar[bool] = True
    finds_answers: ClassVar[bool] = True

    kind: Annotated[Literal["math"], RESULTS]
    """Answers are compared as mathematics."""
    rule: Annotated[Literal["math_verify", "last_box", "hendrycks"], RESULTS] = "math_verify"
    r"""Where the answer is looked for, and how it is compared: anywhere and by math-verify, in the last `\boxed{}`
    and by math-verify, or there and as text that is written in one way."""
    last_chars: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Characters at the end of a response that are read; absent: all."""

    @property
    def scores_by(self) -> ScorerSpec:
        if self.rule == "hendrycks":
            return ScorerSpec("ppoctl.rewards.boxed:score", {"last_chars": self.last_chars})
        options = {"boxed": self.rule == "last_box", "last_chars": self.last_chars}
        return ScorerSpec("ppoctl.rewards.math_grading:score", options)

    def candidates(self, truth: str) -> Candidates:
        try:
            answer = stated(truth)
        except ValueError as error:
            raise RewardError(str(error), hint="name the column with the answer as `answer`") from error
        said = "It follows.\nThe answer is $\\boxed{%s}$."
        return Candidates(
            gold=said % answer, wrong=said % other_answer(answer), empty="", truncated="It follows.\nThe answer is"
        )
