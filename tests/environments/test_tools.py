"""Tools: their schemas, the results of calls, and the explanations of calls that cannot be run."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from environments.conftest import AsInChild
from environments.episodes import CHOOSE, PYTHON, TOOLS, USERS_TOOLS, python_table, tools_table, turn
from ppoctl.core.batch.episodes import Observation, ToolCall, Turn
from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import DataError, MissingAssetError, RecipeError
from ppoctl.environments.answers import InvalidAnswerError
from ppoctl.environments.tool_set import ToolSet, opened
from ppoctl.recipe.paths import PathResolver

OpenTools = Callable[..., ToolSet]


@pytest.fixture
def tool_set(as_in_child: AsInChild) -> OpenTools:
    """Open tools in this process; `:name` is a tool of the test file."""

    def open_tools(*tools: str, seconds: float = 30.0, answer_chars: int = 200) -> ToolSet:
        named = [f"{USERS_TOOLS}{tool}" if tool.startswith(":") else tool for tool in tools]
        options = {"tools": named, "sandbox": "namespaces", "seconds": seconds, "answer_chars": answer_chars}
        found: ToolSet = as_in_child(opened(**options))
        return found

    return open_tools


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def results(tools: ToolSet, *calls: ToolCall) -> Sequence[str]:
    """Return the results of the calls, after checking the rest of the observation."""
    observation = tools.step(turn("x", *calls))
    assert observation == Observation(observation.messages)
    assert {message.role for message in observation.messages} == {"tool"}
    return [message.content for message in observation.messages]


def test_each_call_of_a_turn_gets_one_result_in_order(tool_set: OpenTools) -> None:
    tools = tool_set("calculator", ":weather", ":slow_sum", ":misbehaves")
    assert results(
        tools,
        call("slow_sum", numbers=[1, 2.5]),
        call("calculator", expression="6*7"),
        call("weather", city="Bonn", days="2"),
        call("misbehaves", what="none"),
    ) == ["3.5", "42", '{"city": "Bonn", "degrees": 21.5, "unit": "C", "days": 2}', ""]


def test_turn_without_call_ends_episode(tool_set: OpenTools) -> None:
    assert tool_set("calculator").step(turn("the answer is 7")) == Observation(done=True)


def test_malformed_call_is_explained_and_episode_continues(tool_set: OpenTools) -> None:
    text = "The tool call cannot be read: `{` is not JSON. Write it again in the required format."
    observed = tool_set("calculator").step(Turn("x", malformed="`{` is not JSON"))
    assert observed == Observation((Message("user", text),))


def test_unusable_call_is_explained(tool_set: OpenTools) -> None:
    tools = tool_set("calculator", ":weather", ":misbehaves")
    unknown, wrong, raised, arithmetic = results(
        tools,
        call("clock"),
        call("weather", town="Bonn", unit="K"),
        call("misbehaves", what="raise"),
        call("calculator", expression="1/0"),
    )
    assert unknown == "Error: there is no tool `clock`; the tools are calculator, weather, misbehaves"
    assert wrong.startswith("Error: wrong arguments of `weather`: city: Missing required argument; unit: ")
    assert wrong.endswith("town: Unexpected keyword argument")
    assert raised == "Error: LookupError: nothing found by <object object at 0x..>"
    assert arithmetic == "Error: ValueError: division by zero"


def test_long_result_keeps_start_and_end(tool_set: OpenTools) -> None:
    (result,) = results(tool_set(":misbehaves", answer_chars=7), call("misbehaves", what="0123456789"))
    assert result == "0123\n[3 characters are left out]\n789"
    (large,) = results(tool_set(":misbehaves", answer_chars=100), call("misbehaves", what="large"))
    assert len(large) < 150


@pytest.mark.parametrize("what", ["bytes", "set"])
def test_result_that_is_not_json_is_invalid(tool_set: OpenTools, what: str) -> None:
    with pytest.raises(InvalidAnswerError, match=f"the tool `misbehaves` returned a {what}, not a text or JSON"):
        tool_set(":misbehaves").step(turn("x", call("misbehaves", what=what)))


def test_python_tool_returns_output_and_errors_of_program(tool_set: OpenTools) -> None:
    good, failed = results(
        tool_set("python", seconds=120.0),
        call("python", program="print(6 * 7)"),
        call("python", program="print('before')\n1 / 0"),
    )
    assert good == "42"
    assert failed == (
        'before\nTraceback (most recent call last):\n  File "main.py", line 2, in <module>\n'
        "ZeroDivisionError: division by zero\n[exit code 1]"
    )
    [endless] = results(tool_set("python", seconds=3.0), call("python", program="while True: pass"))
    assert endless == "[killed after 1 s]"


def test_schemas_come_from_signature_and_docstring() -> None:
    calculator, weather = tools_table("calculator", ":weather").schemas()
    assert calculator["function"]["parameters"] == {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    }
    assert weather == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "days": {"type": "integer", "minimum": 1, "default": 1},
                },
                "required": ["city"],
            },
        },
    }


def test_schemas_of_a_class_are_its_tools() -> None:
    assert [tool["function"]["name"] for tool in python_table("WithTools").schemas()] == ["look", "go"]


def test_unusable_tool_raises_when_schemas_are_read(tool_set: OpenTools) -> None:
    for tool, says in {
        ":no_schema": "PydanticSchemaGenerationError",
        ":nothing": "has no `nothing`",
    }.items():
        with pytest.raises(RecipeError, match=f"does not start: .*{says}") as caught:
            tools_table(tool).schemas()
        assert caught.value.hint == f"python -m ppoctl.core.user_functions {USERS_TOOLS}{tool}"
    with pytest.raises(TypeError, match="two tools have the name `weather`"):
        tool_set(":weather", ":weather")


def test_files_of_tools_start_at_recipe_and_changes_are_detected(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f() -> int: return 1\n")
    data: dict[str, Any] = {"environment": {"tools": ["calculator", "mine.py:f", "package.module:g"]}}
    PathResolver(tmp_path, {}, lambda key, error: None).resolve(data, {})
    function = f"{tmp_path}/mine.py:f"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    written = {"tools": ["calculator", function, "package.module:g"], "digests": {function: digest}}
    assert data["environment"] == written
    table = TOOLS(kind="tools", turns=2, tokens=9, **written)
    table.require_there()
    file.write_text("def f() -> int: return 2\n")
    with pytest.raises(RecipeError, match=r"the tool's function has changed: ") as caught:
        table.require_there("eval.environment")
    assert f'eval.environment.tools=["calculator", "{function}"' in str(caught.value.hint)
    file.unlink()
    with pytest.raises(MissingAssetError, match=r"but the file `.*mine.py` does not exist"):
        table.require_there()


def test_file_of_python_environment_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class A: pass\n")
    path = f"{file}:A"
    table = PYTHON(kind="python", path=path, digest="0" * 64, turns=2, tokens=9)
    choose = CHOOSE(kind="choose", cases={"a": {"kind": "python", "path": path, "digest": "1"}}, turns=2, tokens=9)
    with pytest.raises(RecipeError, match="the environment's function has changed") as caught:
        table.require_there()
    assert f"--set environment.path={path}`" in str(caught.value.hint)
    with pytest.raises(RecipeError) as caught:
        choose.kinds["cases", "a"].require_there("environment.cases.a")
    assert f"--set environment.cases.a.path={path}`" in str(caught.value.hint)


def test_row_without_known_environment_is_refused() -> None:
    cases = {"sum": {"kind": "tools", "tools": ["calculator"]}, "code": {"kind": "tools", "tools": ["python"]}}
    table = CHOOSE(kind="choose", field="task", cases=cases, turns=2, tokens=9)
    assert table.of_row({"task": "code"}).tools == ("python",)
    says = "the field `task`, which selects the environment of a row, is `poem`; the cases .* are `sum`, `code`"
    with pytest.raises(DataError, match=says):
        table.of_row({"task": "poem"})
    with pytest.raises(DataError, match="is missing"):
        table.of_row({"level": 3})
