r"""Answers in `\boxed{...}`, and when two of them are the same text to the authors of MATH. Imported in the children:
standard library only.

    "\boxed{\tfrac12}"             \frac{1}{2}    one spelling of fractions, roots, brackets and degrees
    "\boxed{x = 5 \text{ cm}}"     5              a name of one or two letters before the only `=`, and units, go
    "\boxed{1} ... \boxed{2}"      2              the last one counts
    "\boxed{\frac{1}{2}"           nothing        as its braces do not close

It is the rule of Hendrycks et al. 2021 (arXiv:2103.03874, `math_equivalence.py`), by which verl scores MATH. Two
texts that mean the same in other words are different: `0.25` is not `\frac{1}{4}`.
"""

import re

from ppoctl.batch.scores import ScoreRequest
from ppoctl.rewards.function import RewardValue, ending

_BOX = re.compile(r"\\boxed(?:\s*\{|[ ])")
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_REPLACED = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)
"""What is written in another way, in this order."""


def score(request: ScoreRequest, *, last_chars: int | None = None) -> RewardValue:
    """1 where the last box of the response has the text of the truth, else 0. Raises ValueError on an empty truth."""
    answer = last_boxed(ending(request.response, last_chars))
    is_right = answer is not None and is_same(answer, stated(request.required_truth()))
    return RewardValue(float(is_right), answer=None if answer is None else _written(answer))


def _written(answer: str) -> str:
    """The answer written in one way, where that can be."""
    try:
        return normal_form(answer)
    except ValueError:
        return answer


def stated(truth: str) -> str:
    """The answer that a ground truth states: in its last box, after its last `#### `, or the whole of it. Raises
    ValueError where that is empty."""
    marked = _MARKED.findall(truth)
    answer = last_boxed(truth)
    if answer is None:
        answer = str(marked[-1]).replace(",", "") if marked else truth
    if not answer.strip():
        raise ValueError("the ground truth is empty")
    return answer.strip()


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, or behind a last `\boxed ` up to the next `$`; None where there is
    none, or where its braces do not close."""
    found = None
    for found in _BOX.finditer(text):  # noqa: B007 - the last one is meant
        pass
    if found is None:
        return None
    rest = text[found.end() :]
    if not found.group().endswith("{"):
        return rest.partition("$")[0]
    depth = 1
    for position, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:position]
    return None


def is_same(answer: str, truth: str) -> bool:
    """Whether both are the same text once each is written in one way; where one of them cannot be, as they are."""
    try:
        return normal_form(answer) == normal_form(truth)
    except ValueError:
        return answer == truth


def normal_form(text: str) -> str:
    """A LaTeX answer written in one way. Raises ValueError on one with several units, or a root or fraction of
    nothing."""
    for before, after in _REPLACED:
        text = text.replace(before, after)
    text = _without_units(text).replace("\\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    name, equals, value = text.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        text = value
    text = _braced_roots(text).replace(" ", "")
    text = _braced_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    quotient = re.fullmatch(r"(-?[1-9][0-9]*|0)/(-?[1-9][0-9]*|0)", text)
    return f"\\frac{{{quotient[1]}}}{{{quotient[2]}}}" if quotient else text


def _without_units(text: str) -> str:
    r"""Cut at `\text{ `, which in MATH only units begin with."""
    value, *units = text.split("\\text{ ")
    if len(units) > 1:
        raise ValueError("two units")
    return value


def _braced_roots(text: str) -> str:
    r"""`\sqrt3` as `\sqrt{3}`."""
    before, *roots = text.split("\\sqrt")
    if not all(roots):
        raise ValueError("a root of nothing")
    return before + "".join("\\sqrt" + (root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}") for root in roots)


def _braced_fractions(text: str) -> str:
    r"""`\frac12` and `\frac1{2}` as `\frac{1}{2}`; unchanged where a fraction lacks its lower part."""
    before, *fractions = text.split("\\frac")
    written = before
    for fraction in fractions:
        if not fraction:
            raise ValueError("a fraction of nothing")
        if fraction.startswith("{"):
            written += "\\frac" + fraction
        elif len(fraction) < 2:
            return text
        else:
            lower = fraction[1:] if fraction[1] == "{" else f"{{{fraction[1]}}}{fraction[2:]}"
            written += f"\\frac{{{fraction[0]}}}{lower}"
    return written


def other_answer(truth: str) -> str:
    """A wrong answer that looks like the truth: its first number is one more; `1729` where it has none."""
    wrong = re.sub(r"[0-9]+", lambda number: str(int(number.group()) + 1), truth, count=1)
    return wrong if wrong != truth else "1729"
