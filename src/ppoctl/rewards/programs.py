"""Programs in responses, and the tests of a row, which the programs must pass. Imports only the standard library.

    program_of(response)       the last fenced block
    tests_of(truth)            {"inputs": [...], "outputs": [...]}, with "fn_name" for a function
    Test.job, Test.is_passed   the job to run, and whether its output is correct

A job never contains the expected output, so the program cannot read it; outputs are compared in this process.
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
for _module in ("typing", "collections", "math", "itertools", "functools", "heapq", "bisect", "string", "re"):
    exec(f"import {{_module}}; from {{_module}} import *", _space)
exec(compile({program!r}, "program.py", "exec"), _space)
_function = _space[{name!r}] if {name!r} in _space else getattr(_space["Solution"](), {name!r})
_result = json.dumps(_function(*json.loads({arguments!r})))
with os.fdopen(_output, "w") as _file:
    _file.write(_result)
"""
"""Code that calls one function. Text that the program prints is discarded; the output is only the function's
result."""


@dataclass(frozen=True)
class Test:
    """One input, and the expected output."""

    given: Any
    """Text of the standard input, or the function's arguments as a list."""
    expected: Any
    """Text of the standard output, or the function's result."""
    function: str | None = None
    """Name of the function, or of the method of a class `Solution`; None: run the whole program."""

    def job(self, program: str, limits: Limits) -> SandboxJob:
        """Return the sandbox job that runs the program on this input."""
        if self.function is None:
            return SandboxJob(program, self.given, limits)
        arguments = json.dumps(self.given)
        return SandboxJob(_CALL.format(program=program, name=self.function, arguments=arguments), "", limits)

    def is_passed(self, output: str) -> bool:
        """Whether an output is correct. The result of a function is compared as JSON; the expected value may also be
        an array with the result as its only element. Other output is compared line by line, without trailing spaces
        and empty lines at the end."""
        if self.function is None:
            return _lines(output) == _lines(self.expected)
        try:
            result = json.loads(output)
        except (ValueError, RecursionError):
            return False
        return bool(result == self.expected or [result] == self.expected)


def program_of(response: str) -> str | None:
    """Return the program in a response by verl's rule: the last block fenced as Python, or else the first fenced
    block, up to its end or the end of the response. Return None if there is no fenced block."""
    if f"{_FENCE}python" in response:
        return response.rpartition(f"{_FENCE}python")[2].partition(_FENCE)[0]
    _, fence, rest = response.partition(_FENCE)
    if not fence:
        return None
    block = rest.partition(_FENCE)[0]
    language, newline, text = block.partition("\n")
    return text if newline and language.strip().isalpha() else block


def tests_of(truth: str) -> list[Test]:
    """Return the tests of a ground truth. Raises ValueError if it has no readable tests."""
    try:
        fields = json.loads(truth)
    except (ValueError, RecursionError):
        raise ValueError(f"the ground truth `{truth[:60]}` is not JSON with tests") from None
    if not isinstance(fields, Mapping) or not {"inputs", "outputs"} <= fields.keys():
        raise ValueError("the ground truth is not an object with `inputs` and `outputs`")
    inputs, outputs, name = fields["inputs"], fields["outputs"], fields.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs:
        raise ValueError("the `inputs` and `outputs` of the ground truth are not arrays with tests")
    if len(inputs) != len(outputs):
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    if name is None:
        return [Test(_text(given), _text(expected)) for given, expected in zip(inputs, outputs, strict=True)]
    pairs = zip(inputs, outputs, strict=True)
    return [Test(_arguments(given), _value(expected), str(name)) for given, expected in pairs]


def _text(value: object) -> str:
    """Return text unchanged, and an array as lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: object) -> list[Any]:
    """Return the arguments: an array unchanged; a text as one JSON argument per line."""
    if isinstance(value, str):
        return [_value(line) for line in value.splitlines()]
    return value if isinstance(value, list) else [value]


def _value(value: object) -> Any:
    """Return the JSON value of a text; anything that is not JSON text is returned unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
