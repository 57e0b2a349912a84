"""Programs in responses, and tests of a row that they are held to. Standard library only.

    program_of(response)       the last fenced block
    tests_of(truth)            {"inputs": [...], "outputs": [...]}, with "fn_name" for a function
    Test.job, Test.is_passed   what is run, and whether its output is right

An expected output is in no job: what runs cannot know it, and is compared here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppoctl.rewards.sandbox.job import Limits, SandboxJob

_FENCE = "```"
_CALL = """
import json, os
_output = os.dup(1)
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
_space = {{"__name__": "program"}}
for _each in ("typing", "collections", "math", "itertools", "functools", "heapq", "bisect", "string", "re"):
    exec(f"import {{_each}}; from {{_each}} import *", _space)
exec(compile({program!r}, "program.py", "exec"), _space)
_function = _space[{name!r}] if {name!r} in _space else getattr(_space["Solution"](), {name!r})
_said = json.dumps(_function(*json.loads({arguments!r})))
with os.fdopen(_output, "w") as _file:
    _file.write(_said)
"""
"""A call of one function: what the program prints goes nowhere, its result is all of the output."""


@dataclass(frozen=True)
class Test:
    """One input, and the output that is right."""

    given: Any
    """Text of the standard input, or an array of arguments."""
    expected: Any
    """Text of the standard output, or the result."""
    function: str | None = None
    """Name of the function, or of the method of a class `Solution`; None: the program is run as a whole."""

    def job(self, program: str, limits: Limits) -> SandboxJob:
        """What is to be run."""
        if self.function is None:
            return SandboxJob(program, self.given, limits)
        arguments = json.dumps(self.given)
        return SandboxJob(_CALL.format(program=program, name=self.function, arguments=arguments), "", limits)

    def is_passed(self, output: str) -> bool:
        """Whether an output is right: as JSON where it is a result (alone, or as the only one of an array), else line
        by line, without spaces at the ends of lines and without empty lines at the end."""
        if self.function is None:
            return _lines(output) == _lines(self.expected)
        try:
            result = json.loads(output)
        except (ValueError, RecursionError):
            return False
        return bool(result == self.expected or [result] == self.expected)


def program_of(response: str) -> str | None:
    """The program in a response as verl finds it: the last block that is fenced as Python, else the first block, to
    its end or the end of the response; None where nothing is fenced."""
    if f"{_FENCE}python" in response:
        return response.rpartition(f"{_FENCE}python")[2].partition(_FENCE)[0]
    _, fence, rest = response.partition(_FENCE)
    if not fence:
        return None
    block = rest.partition(_FENCE)[0]
    language, newline, text = block.partition("\n")
    return text if newline and language.strip().isalpha() else block


def tests_of(truth: str) -> list[Test]:
    """Tests of a ground truth; raises ValueError where it holds none that can be read."""
    try:
        told = json.loads(truth)
    except (ValueError, RecursionError):
        raise ValueError(f"the ground truth `{truth[:60]}` is no JSON of tests") from None
    if not isinstance(told, Mapping) or not {"inputs", "outputs"} <= told.keys():
        raise ValueError("the ground truth is no object with `inputs` and `outputs`")
    inputs, outputs, name = told["inputs"], told["outputs"], told.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError("the `inputs` and `outputs` of the ground truth are no arrays with tests")
    if len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    if name is None:
        return [Test(_text(given), _text(expected)) for given, expected in zip(inputs, outputs, strict=True)]
    pairs = zip(inputs, outputs, strict=True)
    return [Test(_arguments(given), _value(expected), str(name)) for given, expected in pairs]


def _text(value: object) -> str:
    """Text as it is; an array is lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: object) -> list[Any]:
    """Arguments: an array as it is; of a text each line is one, in JSON."""
    if isinstance(value, str):
        return [_value(line) for line in value.splitlines()]
    return value if isinstance(value, list) else [value]


def _value(value: object) -> Any:
    """What a text holds in JSON; what holds none is itself."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
