r"""DAPO's rule for mathematics: is the text behind the last `Answer:` the truth? Imported in the children: nothing
heavy.

    "... Answer: 42"                      42
    "Answer: 41\nAnswer: $x = 42$"        42              the last `Answer:`, its line, what follows the last `=`
    "answer : 1,234 dollars"              1234            any case; units and separators of thousands go
    "Answer: \frac12"                     \frac{1}{2}     shorthand is written out
    "The answer is 42"                    nothing         there is no colon

Both sides are normalised as in Lewkowycz et al. 2022 (arXiv:2206.14858, appendix D.1) and compared as text, exactly
as in verl (`math_dapo`) and NeMo-RL (`dapo_math_verify`). Those give 1 and -1, or 1 and 0: we give 1 and 0, and
`scale = {from = [0, 1], to = [-1, 1]}` makes the other of it.
"""

import re
from typing import Annotated, ClassVar, Literal

from ppoctl.batch.scores import ScoreRequest
from ppoctl.errors import RewardError
from ppoctl.recipe_table import RESULTS, AtLeastOne
from ppoctl.rewards.boxed import other_answer
from ppoctl.rewards.function import RewardValue, ScorerSpec, ending
from ppoctl.rewards.table import Candidates, ProcessScorer

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_REPLACED = (
    *((word, "") for word in ("an ", "a ")),
    (".$", "$"),
    *((space, "") for space in ("\\$", "\\ ", " ")),
    ("mbox", "text"),
    *((word, ",") for word in (",\\text{and}", "\\text{and}")),
    ("\\text{m}", "\\text{}"),
)
"""What is written in another way, in this order."""
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
"""Units and ornaments, which go, in this order."""


class DapoMathScorer(ProcessScorer):
    """Reward 1 where the text behind the last `Answer:` equals the truth once both are normalised, else 0.

    Formula: [normal(line behind the last Answer:) = normal(truth)]
    Source: DAPO (arXiv:2503.14476); the normal form: Lewkowycz et al. 2022 (arXiv:2206.14858), appendix D.1
    Default of: verl for DAPO-Math and AIME (1 and -1), NeMo-RL (1 and 0)
    Figures: reward/score_mean
    """

    needs_truth: ClassVar[bool] = True
    finds_answers: ClassVar[bool] = True

    kind: Annotated[Literal["dapo_math"], RESULTS]
    """The line behind the last `Answer:` is compared as text."""
    last_chars: Annotated[int, RESULTS, AtLeastOne] = 300
    """Characters at the end of a response that are read."""

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("ppoctl.rewards.dapo_math:score", {"last_chars": self.last_chars})

    def candidates(self, truth: str) -> Candidates:
        try:
            _gold(truth)
        except ValueError as error:
            raise RewardError(str(error), hint="name the column with the answer as `answer`") from error
        return Candidates(
            gold=f"It follows.\nAnswer: {truth}",
            wrong=f"It follows.\nAnswer: {other_answer(truth)}",
            empty="",
            truncated="It follows.\nAnswer",
        )


def score(request: ScoreRequest, *, last_chars: int = 300) -> RewardValue:
    """1 or 0. Raises ValueError on a truth of which nothing is left once it is normalised."""
    found = _ANSWER.findall(ending(request.response, last_chars))
    gold = _gold(request.required_truth())
    answer = normal_form(found[-1]) if found else None
    return RewardValue(float(answer == gold), answer=answer)


def normal_form(answer: str) -> str:
    """An answer in words and LaTeX, written in one way: what follows its last `=`, in the first `$...$` where there
    is one, without units, text commands and separators of thousands."""
    answer = answer.split("=")[-1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for words in _REMOVED:
        answer = answer.replace(words, "")
    answer = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def _gold(truth: str) -> str:
    gold = normal_form(truth)
    if not gold:
        raise ValueError(f"nothing is left of the ground truth `{truth[:80]}` once it is normalised")
    return gold
