"""Tools in the process of environments: run the calls of each turn. Processes of environments import this module."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from ppoctl.core.batch.episodes import EnvironmentRow, Observation, ToolCall, Turn
from ppoctl.core.batch.prompts import Message
from ppoctl.core.user_functions import described, imported
from ppoctl.environments.answers import InvalidAnswerError
from ppoctl.environments.calculator import calculator
from ppoctl.environments.tool_schema import WrongArgumentsError, arguments_for, schema_of
from ppoctl.environments.user import EventLoop
from ppoctl.rewards.message_loop import describe
from ppoctl.rewards.sandbox.job import Kind, Limits, Ran, SandboxJob
from ppoctl.rewards.sandbox.sandbox_client import Sandbox, SandboxError
from ppoctl.rewards.user_function import kind_of

_PROGRAM = """
import sys, traceback
def report(kind, error, trace):
    while trace is not None and trace.tb_frame.f_code.co_filename != "main.py":
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace, file=sys.stdout)
sys.excepthook = report
exec(compile({program!r}, "main.py", "exec"), {{"__name__": "__main__"}})
"""
"""Program whose errors are printed to its standard output, the only text that leaves the sandbox."""
_SANDBOX_FRAC = 1 / 3
"""Time limit of a program, as a fraction of the time limit of an answer. The rest is for the sandbox itself."""
_MALFORMED = "The tool call cannot be read: {}. Write it again in the required format."


class ProgramRunner:
    """The tool `python`: programs in one sandbox, which ends with this process."""

    def __init__(self, kind: Kind, seconds: float) -> None:
        self._sandbox = Sandbox(kind)
        self._limits = Limits(timeout_s=seconds * _SANDBOX_FRAC, output_kib=256)

    @cached_property
    def tool(self) -> Callable[[str], str]:
        """The tool as a function, whose signature and docstring are its schema."""

        def python(program: str) -> str:
            """Run a Python program in a new process without network, and return what it prints."""
            ran = self._sandbox.run(SandboxJob(_PROGRAM.format(program=program), limits=self._limits))
            return "\n".join(filter(None, (ran.output.rstrip("\n"), self._note(ran))))

        return python

    def _note(self, ran: Ran) -> str:
        return {
            "ok": "",
            "exit": f"[exit code {ran.code}]",
            "signal": f"[killed by signal {ran.code}]",
            "timeout": f"[killed after {self._limits.timeout_s:g} s]",
            "output": f"[killed: it printed more than {self._limits.output_kib} KiB]",
        }[ran.outcome]


class ToolSet:
    """Environments that run tools. They have no state, so all episodes share one."""

    def __init__(self, tools: Sequence[tuple[str, Callable[..., Any]]], answer_chars: int) -> None:
        """`tools` are the names of the recipe, and the functions."""
        self._tools = {function.__name__: (written, function) for written, function in tools}
        self._answer_chars = answer_chars
        self._loop = EventLoop()
        self._running = ""
        """Tool whose call runs, as the recipe names it."""

    def create(self) -> "ToolSet":
        """Return the environment of an episode."""
        return self

    def schemas(self) -> Sequence[dict[str, Any]]:
        """Return the JSON schemas of the tools, in the order of the recipe."""
        return [schema_of(function) for _, function in self._tools.values()]

    def explain(self, error: BaseException) -> str:
        """Return an error as text, with the line of the user's file."""
        return described(error, self._running, caller=__file__)

    def open(self, row: EnvironmentRow, seed: int) -> None:
        """Add no message to the prompt."""

    def step(self, turn: Turn) -> Observation:
        """Return the result of each call, one message per call. A turn without a call ends the episode."""
        if turn.malformed:
            # Some chat templates accept the role `tool` only after a readable call.
            return Observation((Message("user", _MALFORMED.format(turn.malformed)),))
        return Observation(tuple(Message("tool", self._result(call)) for call in turn.calls), done=not turn.calls)

    def close(self) -> None:
        """Do nothing: there is no state."""

    def _result(self, call: ToolCall) -> str:
        """Return the result of a call, or an explanation. An error of a tool is an explanation too."""
        if call.name not in self._tools:
            return f"Error: there is no tool `{call.name[:50]}`; the tools are {', '.join(self._tools)}"
        self._running, function = self._tools[call.name]
        try:
            positional, named = arguments_for(function, call.arguments)
        except WrongArgumentsError as error:
            return _shortened(f"Error: wrong arguments of `{call.name}`: {error}", self._answer_chars)
        try:
            result = self._loop.resolved(function(*positional, **named))
        except SandboxError:
            raise
        except Exception as error:  # noqa: BLE001 - a tool may raise any error
            return _shortened(f"Error: {describe(error)}", self._answer_chars)
        return _shortened(_as_text(call.name, result), self._answer_chars)


def opened(*, tools: Sequence[str], sandbox: Kind, seconds: float, answer_chars: int) -> ToolSet:
    """Return the environments that run these tools. Raises any error of the import of a tool, and TypeError if two
    tools have the same name."""
    functions = [_function_of(name, sandbox, seconds) for name in tools]
    names = [function.__name__ for function in functions]
    if twice := [name for name in names if names.count(name) > 1]:
        raise TypeError(f"two tools have the name `{twice[0]}`")
    found = ToolSet(list(zip(tools, functions, strict=True)), answer_chars)
    found.schemas()  # raises the error of a signature without a JSON schema
    return found


def _function_of(name: str, sandbox: Kind, seconds: float) -> Callable[..., Any]:
    if name == "calculator":
        return calculator
    return ProgramRunner(sandbox, seconds).tool if name == "python" else imported(name)


def _as_text(name: str, result: Any) -> str:
    """Return a text unchanged, and other results as JSON. Raises InvalidAnswerError."""
    if result is None or isinstance(result, str):
        return result or ""
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidAnswerError(f"the tool `{name}` returned a {kind_of(result)}, not a text or JSON") from None


def _shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters, in addition to the note that replaces the middle of a longer
    text."""
    if len(text) <= most:
        return text
    end = most // 2
    return f"{text[: most - end]}\n[{len(text) - most} characters are left out]\n{text[len(text) - end :]}"
