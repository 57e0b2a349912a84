"""JSON schema of a tool from the signature and docstring of its function, and validation of arguments by pydantic.
Processes of environments import this module."""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.json_schema import GenerateJsonSchema


class _Untitled(GenerateJsonSchema):
    """Schemas without titles, which repeat the names and would lengthen each prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - the same for each field
        return False


class WrongArgumentsError(ValueError):
    """The arguments of a call do not fit the signature of the tool."""


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of a tool in OpenAI's format: name, description (the docstring) and parameters."""
    signature: Any = _arguments_of(function)
    parameters = TypeAdapter(signature).json_schema(schema_generator=_Untitled)
    parameters.pop("additionalProperties", None)
    described = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return {"type": "function", "function": described}


def arguments_for(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that pydantic converts `arguments` to. Raises
    WrongArgumentsError."""
    try:
        positional, named = _arguments_of(function)(**arguments)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise WrongArgumentsError("; ".join(problems)) from error
    return positional, named


def _arguments_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the same signature that validates its arguments and returns them. The tool itself runs
    outside, so that an error of its own code is not mistaken for a wrong argument."""

    @wraps(function)
    def arguments(*positional: Any, **named: Any) -> Any:
        return positional, named

    return validate_call(arguments)
