"""Answers copied from the text of a ground truth, to build responses that test a scorer.

This module shares no code with the scorers. If a scorer built its own gold answer, a scorer that reads only a part of
a ground truth would agree with itself.
"""

import re

_NUMBER = re.compile(r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+")
_OTHER = re.compile(r"(?<!_)(?<!_\{)(?<![0-9])[0-9]+")
"""A number that is not an index, which scorers may ignore."""
_DOLLAR = re.compile(r"(?<!\\)\$")
_BEYOND_A_NUMBER = re.compile(r"\\(?:pi|sqrt|[dt]?frac|infty)|[0-9][xyz]")


def verbatim_answer(truth: str) -> str:
    """Return the answer as the text has it: the rest of the line after its last `####`, the content of its last
    `\\boxed{}`, or the whole text. Signs around a formula, emphasis and a full stop are removed."""
    mark, box = truth.rfind("####"), truth.rfind("\\boxed{")
    if mark == box:
        return truth.strip()
    if mark < box:
        start = end = box + len("\\boxed{")
        depth = 1
        while end < len(truth) and (depth := depth + {"{": 1, "}": -1}.get(truth[end], 0)):
            end += 1
        return truth[start:end].strip()
    line = truth[mark + len("####") :].lstrip(" \t").split("\n")[0]
    return _DOLLAR.sub("", line).strip(" \t\r*").removesuffix(".").strip("*")


def other_answer(answer: str, *, at_the_end: bool = False) -> str:
    """Return a wrong answer that resembles this one: with 1 added to its first or last number. An answer without a
    number becomes `1729`."""
    numbers = list(_OTHER.finditer(answer))
    if not numbers:
        return "1729"
    number = numbers[-1 if at_the_end else 0]
    digits = number.group()
    return f"{answer[: number.start()]}{int(digits) + 1:0{len(digits)}}{answer[number.end() :]}"


def parts_of(answer: str) -> list[str]:
    """Return the first and the last number of an answer that consists of more than one number. Each is a wrong
    answer."""
    numbers = [number.group() for number in _NUMBER.finditer(answer)]
    if len(numbers) > 1 or (numbers and _BEYOND_A_NUMBER.search(answer)):
        return list(dict.fromkeys((numbers[0], numbers[-1])))
    return []
