r"""DAPO's rule for mathematics: is the text after the last `Answer:` the ground truth? Scorer processes import this
module, so it imports only the standard library and recipe tables.

    "... Answer: 42"                      42
    "Answer: 41\nAnswer: $x = 42$"        42              the line of the last `Answer:`, after its last `=`
    "answer : 1,234 dollars"              1234            any case; units and thousands separators are removed
    "Answer: \frac12"                     \frac{1}{2}     shorthand is expanded
    "The answer is 42"                    nothing         the colon is missing

Response and ground truth are normalized as in Lewkowycz et al. 2022 (arXiv:2206.14858, appendix D.1), and compared as
text. verl (`math_dapo`) and NeMo-RL (`dapo_math_verify`) use exactly this rule. verl returns 1 and -1, NeMo-RL 1 and
0. ppoctl returns 1 and 0; `scale = {from = [0, 1], to = [-1, 1]}` maps them to verl's scores.
"""

import re
from typing import Annotated, ClassVar, Literal

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.errors import RewardError
from ppoctl.core.recipe_table import RESULTS, AtLeastOne
from ppoctl.rewards.function import RewardValue, ScorerSpec, ending
from ppoctl.rewards.scorer_table import Candidates, ProcessScorer
from ppoctl.rewards.verbatim import other_answer, verbatim_answer
from ppoctl.rewards.written_numbers import joined

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_FORMULA = re.compile(r"(?<!\\)\$")
_UNIT_POWER = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}\s*\^\s*\{?[23]\}?")
_OTHER_ANSWER = re.compile(
    r"(?i)\b(?:or|and|minus|negative|hundred|thousand|[mbtr]+illion|dozen)\b|[0-9\\$*/^+\u2212-]"
)
"""Text next to a formula that changes the answer. The rule drops this text."""
_NAME = re.compile(r"[\s$]*\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?\s*")
"""The name before the `=` of an answer such as `x = 42`."""
_RAISED = re.compile(r"[0-9]\s*\^")
_REPLACED = (
    *((word, "") for word in ("an ", "a ")),
    (".$", "$"),
    *((space, "") for space in ("\\$", "\\ ", " ")),
    ("mbox", "text"),
    *((word, ",") for word in (",\\text{and}", "\\text{and}")),
    ("\\text{m}", "\\text{}"),
)
"""Replacements, applied in this order."""
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
"""Units and decorations, removed in this order."""


class DapoMathScorer(ProcessScorer):
    """Reward 1 if the text after the last `Answer:` equals the ground truth after both are normalized, else 0.

    Formula: [normal(line after the last Answer:) = normal(truth)]
    Source: DAPO (arXiv:2503.14476); the normal form: Lewkowycz et al. 2022 (arXiv:2206.14858), appendix D.1
    Default of: verl for DAPO-Math and AIME (1 and -1), NeMo-RL (1 and 0)
    Figures: reward/score_mean
    """

    needs_truth: ClassVar[bool] = True
    finds_answers: ClassVar[bool] = True

    kind: Annotated[Literal["dapo_math"], RESULTS]
    """Compare the line after the last `Answer:` as text."""
    last_chars: Annotated[int, RESULTS, AtLeastOne] = 300
    """Number of characters that are read from the end of a response."""

    @property
    def scores_by(self) -> ScorerSpec:
        return ScorerSpec("ppoctl.rewards.dapo_math:score", {"last_chars": self.last_chars})

    @property
    def required_text(self) -> str:
        return "Answer:"

    def require_truth(self, truth: str) -> None:
        try:
            _gold(truth)
        except ValueError as error:
            hint = "correct the row, or name a column that has only the answer"
            raise RewardError(str(error), hint=hint) from error

    def response_with(self, answer: str, truth: str) -> str:  # noqa: ARG002 - the same for each ground truth
        return f"It follows.\nAnswer: {answer}"

    def candidates(self, truth: str) -> Candidates:
        self.require_truth(truth)
        answer = verbatim_answer(truth)
        gold, wrong = (self.response_with(text, truth) for text in (answer, other_answer(answer)))
        return Candidates(gold=gold, wrong=wrong, empty="", truncated="It follows.\nAnswer")


def score(request: ScoreRequest, *, last_chars: int = 300) -> RewardValue:
    """Return 1 if the normalized answer equals the normalized ground truth, else 0. Raises ValueError if the
    normalized ground truth is empty."""
    answers = _ANSWER.findall(ending(request.response, last_chars))
    gold = _gold(request.required_truth())
    answer = normal_form(answers[-1]) if answers else None
    return RewardValue(float(answer == gold), answer=answer)


def normal_form(answer: str) -> str:
    """Return the normal form of an answer that contains words and LaTeX: the text after its last `=`, inside the
    first `$...$` if there is one, without units, text commands and thousands separators."""
    answer = answer.split("=")[-1]
    for before, after in _REPLACED:
        answer = answer.replace(before, after)
    for words in _REMOVED:
        answer = answer.replace(words, "")
    answer = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = _braced(answer).replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()


def _braced(answer: str) -> str:
    return re.sub(r"sqrt([^{])", r"sqrt{\1}", re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer))


def _numbers(answer: str) -> list[str]:
    """Return the digits of each number in an answer, in order, without separators of thousands."""
    return re.findall("[0-9]+", re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", joined(_braced(answer))))


def _gold(truth: str) -> str:
    """Return the normal form of a ground truth. Raises ValueError if it is empty, or if it has no part that is an
    answer as a whole: the rule reads only one side of an equation, and only one formula."""
    text = truth.strip()
    before, *formulas = _FORMULA.split(text)
    outside = before + "".join(formulas[1:])
    name, equals, _ = text.partition("=")
    if (
        "\n" in re.sub(r"\{[^{}]*\}", "", text)
        or "####" in text
        or (formulas[1:] and _OTHER_ANSWER.search(outside))
        or re.search(r"\\overline\s*\{?[^{}]*[0-9]", text)
        or (equals and (text.count("=") > 1 or not _NAME.fullmatch(name)))
    ):
        raise ValueError(f"only a part of the ground truth `{' '.join(text.split())[-80:]}` would be read")
    gold = normal_form(truth)
    # A name before `=` is not an answer, and a removed power of a unit is not a part of it.
    read = text.rpartition("=")[2]
    numbers = (_numbers(read), _numbers(_UNIT_POWER.sub("", read)))
    if _numbers(gold) not in numbers or len(_RAISED.findall(gold)) > len(_RAISED.findall(read)):
        raise ValueError(f"the numbers of the ground truth `{text[:80]}` would be read as `{gold[:80]}`")
    if not gold:
        raise ValueError(f"the ground truth `{text[:80]}` is empty after it is normalized")
    return gold
