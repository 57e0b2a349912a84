r"""Mathematics: is the answer correct, in any notation? The grading is in `math_grading` (math-verify) and `boxed`
(text), which scorer processes import.

    rule            reads                                      compares                     as in
    "math_verify"   an answer anywhere, by math-verify         by math-verify               NeMo-RL `hf_math_verify`
    "last_box"      the last `\boxed{...}`                     by math-verify
    "hendrycks"     the last `\boxed{...}`                     as text, in normal form      verl for MATH

math-verify treats `0.5`, `\frac12` and `1/2` as the same number. It ignores the order within a set, but not within an
interval. With `math_verify`, a response without a box is graded by its last formula or number. A response that only
mentions the answer, or repeats a question that contains it, therefore gets credit. With `last_box`, such a response
gets no credit, and the time for grading does not grow with the length of the response.

A ground truth must be read to its end. The rules of math-verify also read numbers such as `1e5`, U+2212 and `3 1/2`
(`written_numbers`), which math-verify alone reads as other numbers.
"""

from typing import Annotated, ClassVar, Literal

from ppoctl.core.errors import RewardError
from ppoctl.core.recipe_table import RESULTS, AtLeastOne
from ppoctl.rewards.boxed import stated
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_table import Candidates, ProcessScorer
from ppoctl.rewards.verbatim import other_answer, verbatim_answer
from ppoctl.rewards.written_numbers import require_numbers


class MathScorer(ProcessScorer):
    r"""Reward 1 if the answer of the response is mathematically equal to the answer of the ground truth, else 0. A
    ground truth is an answer, or a text with `\boxed{answer}` or a line `#### answer`.

    Formula: [answer = truth]
    Source: math-verify (github.com/huggingface/Math-Verify); hendrycks: arXiv:2103.03874
    Default of: NeMo-RL for math (`hf_math_verify`); verl uses hendrycks for MATH
    Figures: reward/score_mean
    """

    needs_truth: ClassVar[bool] = True
    finds_answers: ClassVar[bool] = True

    kind: Annotated[Literal["math"], RESULTS]
    """Compare answers as mathematical expressions."""
    rule: Annotated[Literal["math_verify", "last_box", "hendrycks"], RESULTS] = "math_verify"
    r"""How the answer is found and compared. math_verify: anywhere, compared by math-verify; last_box: in the last
    `\boxed{}`, compared by math-verify; hendrycks: in the last `\boxed{}`, compared as normalized text."""
    last_chars: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Number of characters that are read from the end of a response; absent: all."""

    @property
    def scores_by(self) -> ScorerSpec:
        if self.rule == "hendrycks":
            return ScorerSpec("ppoctl.rewards.boxed:score", {"last_chars": self.last_chars})
        options = {"boxed": self.rule == "last_box", "last_chars": self.last_chars}
        return ScorerSpec("ppoctl.rewards.math_grading:score", options)

    @property
    def required_text(self) -> str:
        return "" if self.rule == "math_verify" else "\\boxed{"

    def require_truth(self, truth: str) -> None:
        try:
            answer = stated(truth)
            if self.rule != "hendrycks":  # compares texts, which have no numbers
                require_numbers(answer)
        except ValueError as error:
            hint = "correct the row, or name a column that has only the answer"
            raise RewardError(str(error), hint=hint) from error

    def response_with(self, answer: str, truth: str) -> str:  # noqa: ARG002 - the same for each ground truth
        return "It follows.\nThe answer is $\\boxed{%s}$." % answer  # noqa: UP031 - braces would be doubled

    def candidates(self, truth: str) -> Candidates:
        self.require_truth(truth)
        answer = verbatim_answer(truth)
        gold, wrong = (self.response_with(text, truth) for text in (answer, other_answer(answer)))
        return Candidates(gold=gold, wrong=wrong, empty="", truncated="It follows.\nThe answer is")
