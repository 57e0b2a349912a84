r"""Answers in `\boxed{...}`, compared as text by the rule of the MATH dataset. Scorer processes import this module,
so it imports only the standard library.

    "\boxed{\tfrac12}"             \frac{1}{2}    one spelling of fractions, roots, brackets and degrees
    "\boxed{x = 5 \text{ cm}}"     5              units, and a short name before the only `=`, are removed
    "\boxed{1} ... \boxed{2}"      2              the last box is read
    "\boxed{\frac{1}{2}"           nothing        the braces do not close

The rule is from Hendrycks et al. 2021 (arXiv:2103.03874, `math_equivalence.py`). verl scores MATH by this rule. Equal
values in different notation are different answers: `0.25` is not `\frac{1}{4}`.

One difference: an answer that continues after `\text{ ` is compared as a whole. verl reads `19 \text{ and }43`, a
ground truth of MATH, as 19.
"""

import re

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.rewards.function import RewardValue, ending

_BOX = re.compile(r"\\boxed(?:\s*\{|[ ])")
MARK = "####"
"""Text before the answer of a worked solution, as in GSM8K."""
_HEADING = re.compile(r"[A-Za-z]{2,}")
_WRAPPING = re.compile(r"(?<!\\)\$|\\[()\[\]]")
"""Signs around a formula, and a currency sign."""
_JOINED = re.compile(r"[\s$,;]*(?:and|or|\\text\{\s*(?:and|or)\s*\})?[\s$,;]*")
"""Text between two boxes that are one answer."""
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_NESTED = re.compile(r"\{[^{}]*\}|\\begin.*?\\end", re.DOTALL)
_POWER = re.compile(r"\^\s*\{?[23]\}?")
_SIGN = r"\\(?:cdot|times|div|pm|mp|[dt]?frac|sqrt|pi)(?![A-Za-z])|[\u00d7\u00f7]"
_BEFORE_BOX = re.compile(
    rf"(?:[0-9]|(?<!-)[-\u2212]|(?:=\s*|[$(\[])-\s*|[0-9]\*+|[0-9)}}]\s+\*\s*|(?:[+/^]|{_SIGN})\s*(?:\{{[^{{}}]*\}})?\{{?)$"
)
_AFTER_BOX = re.compile(
    r"[.,:]?[0-9]|\s*\^(?!\s*\{?\s*(?:\\(?:circ|text|mathrm|prime)|(?:st|nd|rd|th)\b))|\s*[+/]\s*[0-9(\\{]"
    rf"|\s*(?:{_SIGN})|[-\u2212](?:[0-9(\\]|[A-Za-z]\b)|\s+[-\u2212]\s*[0-9]|\*+[0-9(]|\s+\*\s+[0-9(\\]"
)
r"""Text next to a box that makes the answer another number: `-\boxed{5}`, `\boxed{5}/7`."""
_ANY_BOX = re.compile(r"\\boxed(?![A-Za-z])")
_MAGNITUDE = re.compile(
    r"(?i)[0-9][0-9.,]*\s*[$}]*\s*(?:\\(?:text|mbox|mathrm)\w*\s*\{[^{}A-Za-z]*)?(?:hundred|thousand|[mbtr]+illion|dozen)s?\b"
)
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
"""Replacements, applied in this order."""


def score(request: ScoreRequest, *, last_chars: int | None = None) -> RewardValue:
    """Return 1 if the answer in the last box of the response equals the answer of the ground truth, else 0. Raises
    the error of `stated`."""
    answer = last_boxed(ending(request.response, last_chars))
    is_right = answer is not None and is_same(answer, stated(request.required_truth()))
    return RewardValue(float(is_right), answer=None if answer is None else _normalized(answer))


def _normalized(answer: str) -> str:
    """Return the normal form of an answer, or the answer itself if it has none."""
    try:
        return normal_form(answer)
    except ValueError:
        return answer


def stated(truth: str) -> str:
    """Return the answer in a ground truth: the content of its last box, or the line after its last `####`, whichever
    comes last. Return the whole text if it has neither. Raises ValueError if the answer is empty, or if a part of the
    text would be lost."""
    boxes = list(_BOX.finditer(truth))
    unread = [box.start() for box in _ANY_BOX.finditer(truth) if not _BOX.match(truth, box.start())]
    if unread and unread[-1] > max(truth.rfind(MARK), *(box.start() for box in boxes), -1):
        shown = _on_one_line(truth[unread[-1] :])[:80]
        raise ValueError(f"the last `\\boxed` of the ground truth has no braces: `{shown}`")
    if boxes and boxes[-1].start() > truth.rfind(MARK):
        answer = _boxed(truth, boxes)
    elif (marked := marked_answer(truth)) is not None:
        if not marked and truth.rpartition(MARK)[2].strip():
            raise ValueError(f"the line after the last `{MARK}` of the ground truth is empty, but more text follows")
        answer = _WRAPPING.sub("", marked).strip(" *").removesuffix(".").strip(" *")
        if _THOUSANDS.fullmatch(answer):  # GSM8K writes `1,072`, and responses `1072`
            answer = answer.replace(",", "")
    else:
        answer = truth
        if "\n" in _NESTED.sub("", truth.strip()):
            shown = _on_one_line(truth)[-80:]
            raise ValueError(f"the ground truth `{shown}` has several lines, and neither `\\boxed` nor `{MARK}`")
    if not answer.strip():
        raise ValueError("the ground truth is empty")
    if found := _MAGNITUDE.search(answer):
        raise ValueError(
            f"`{found.group()}` of the ground truth `{_on_one_line(answer)[:80]}` is not a number in digits"
        )
    return answer.strip()


def _boxed(truth: str, boxes: list[re.Match[str]]) -> str:
    """Return the content of the last box of a ground truth. Raises ValueError if the answer is more than this box."""
    last = boxes[-1]
    answer = last_boxed(truth)
    if answer is None:
        raise ValueError(
            f"the braces of the last `\\boxed` of the ground truth do not close: `{_on_one_line(truth)[-80:]}`"
        )
    earlier = last_boxed(truth[: last.start()])
    if earlier is not None and _JOINED.fullmatch(truth[boxes[-2].end() + len(earlier) + 1 : last.start()]):
        raise ValueError(
            f"the answer of the ground truth has several boxes: `{_on_one_line(truth[boxes[-2].start() :])[:80]}`"
        )
    before = truth[: last.start()].rpartition("\n")[2]
    after = truth[last.end() + len(answer) + 1 :].partition("\n")[0]
    if MARK in before and _WRAPPING.sub("", before.rpartition(MARK)[2] + after).strip(" \r*."):
        line = before[before.rindex(MARK) :] + truth[last.start() :].partition("\n")[0]
        raise ValueError(f"the line `{line[:80]}` of the ground truth has more than its box")
    outside = before if before[-1:].isdigit() else before.rstrip("$\\")
    if _BEFORE_BOX.search(outside) or _AFTER_BOX.match(after.removeprefix("$")):
        shown = f"{before[-40:]}{truth[last.start() : last.end() + len(answer) + 1]}{after[:40]}"
        raise ValueError(f"the answer of the ground truth is more than its box: `{_on_one_line(shown)[:80]}`")
    return answer


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def marked_answer(truth: str) -> str | None:
    """Return the text after the last `####` of a ground truth, up to the end of its line. None: the text has no mark.
    Raises ValueError if the line is a heading."""
    _, mark, rest = truth.rpartition(MARK)
    if not mark:
        return None
    line, *more = rest.strip(" \t").splitlines() or [""]
    if _HEADING.match(line) and "".join(more).strip():
        raise ValueError(f"`{MARK} {line[:60]}` of the ground truth is a heading, because more text follows")
    return line.strip()


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`, or the text between a last `\boxed ` without braces and the next
    `$`. Return None if the text has no box, or if the braces of the last box do not close."""
    box = None
    for box in _BOX.finditer(text):  # noqa: B007 - only the last match is used
        pass
    if box is None:
        return None
    rest = text[box.end() :]
    if not box.group().endswith("{"):
        return rest.partition("$")[0]
    depth = 1
    for position, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:position]
    return None


def is_same(answer: str, truth: str) -> bool:
    """Whether the normal forms of both answers are equal. If one of the answers has no normal form, the texts are
    compared."""
    try:
        return normal_form(answer) == normal_form(truth)
    except ValueError:
        return answer == truth


def normal_form(text: str) -> str:
    """Return the normal form of a LaTeX answer. Raises ValueError if it has more than one unit, or a root or fraction
    without an argument."""
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
    r"""Return the text before `\text{ `, which begins units in MATH. Raises ValueError if more of the answer follows,
    as in `19 \text{ and } 43`."""
    value, *units = text.split("\\text{ ")
    if len(units) > 1 or (units and re.search("[0-9]", _POWER.sub("", units[0]))):
        raise ValueError("more than one unit")
    return value


def _braced_roots(text: str) -> str:
    r"""Return the text with `\sqrt3` written as `\sqrt{3}`."""
    before, *roots = text.split("\\sqrt")
    if not all(roots):
        raise ValueError("a root of nothing")
    return before + "".join("\\sqrt" + (root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}") for root in roots)


def _braced_fractions(text: str) -> str:
    r"""Return the text with `\frac12` and `\frac1{2}` written as `\frac{1}{2}`; unchanged if a fraction has no
    denominator."""
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
