"""Chat template of a model, rendered in jinja's sandbox.

The text equals the text that transformers renders, but transformers is not imported. tests/data/test_chat.py compares
both texts.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ppoctl.batch.prompts import Message
from ppoctl.errors import EnvironmentProblemError
from ppoctl.model.folder import read_json_object

_FILE = "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Chat template of a model folder. `text` is None if the model has no template."""

    def __init__(self, folder: Path) -> None:
        """Read the template.

        Raises EnvironmentProblemError if the files of the template cannot be read, or if it is not valid jinja.
        """
        self._folder = folder
        config = read_json_object(folder / "tokenizer_config.json")
        special = {**read_json_object(folder / "special_tokens_map.json"), **config}
        self.special = {name: _token(special[name]) for name in _SPECIAL if special.get(name) is not None}
        """Name of a special token (`bos_token`) -> its text."""
        self.text = _text(folder, config)
        self._compiled = None if self.text is None else self._compile(self.text)

    def render(self, chat: Sequence[Message], arguments: Mapping[str, object] = MappingProxyType({})) -> str:
        """Return the chat as text, ending with the generation prompt that opens the assistant's turn.

        `arguments` are the `template_args` of the recipe, and `tools`. The model must have a template. A template is
        code, so any error may be raised.
        """
        return self.rendered([message.as_json() for message in chat], arguments)

    def rendered(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, object]) -> str:
        """Return what `render` returns, for messages that may have further keys, such as `tool_calls`."""
        assert self._compiled is not None
        defaults = {"tools": None, "documents": None}
        return self._compiled.render(
            messages=messages, add_generation_prompt=True, **{**defaults, **self.special, **arguments}
        )

    def _compile(self, text: str) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return environment.from_string(text)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f" (line {line})"
            raise EnvironmentProblemError(
                f"the chat template of `{self._folder}` is not valid jinja: {error}{where}",
                hint="fetch the model again",
            ) from error


class _Generation(jinja2.ext.Extension):
    """Jinja tag `{% generation %}`, which marks the text of the assistant without changing it."""

    tags = {"generation"}  # noqa: RUF012 - jinja requires this form

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _text(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / _FILE
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EnvironmentProblemError(
                f"`{file}` cannot be read: {error}", hint="fetch the model again"
            ) from error
    template = config.get("chat_template")
    if isinstance(template, list):  # the file has several templates with names
        template = {row.get("name"): row.get("template") for row in template if isinstance(row, Mapping)}.get(
            "default"
        )
    if template is not None and not isinstance(template, str):
        raise EnvironmentProblemError(
            f"`chat_template` in `{folder / 'tokenizer_config.json'}` is not text", hint="fetch the model again"
        )
    return template


def _token(written: Any) -> str:
    """Return the text of a special token. The files contain the token as text, or as an object with `content`."""
    return str(written.get("content")) if isinstance(written, Mapping) else str(written)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass these names
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
