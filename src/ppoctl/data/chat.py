"""Chat template of a model, rendered in jinja's sandbox. Training and all commands use it.

The text equals the text that transformers renders, but transformers is not imported. tests/data/test_chat.py compares
both texts. As in transformers, the first of these that exists is read:

    1. chat_template.jinja, and additional_chat_templates/NAME.jinja
    2. `chat_template` in tokenizer_config.json: a text, or several texts with names
    3. chat_template.json, which transformers reads for processors

Prompts with tools use the template `tool_use`, if there is one, and all others `default`. A byte order mark at the
beginning of a template is not part of it, unlike in transformers.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import EnvironmentProblemError, quoted
from ppoctl.data.tokenizer import special_tokens
from ppoctl.models.folder import NAMED_TEMPLATES, read_json_object

_FILE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_LEGACY = "chat_template.json"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_MARK = "\ufeff"
"""Byte order mark, which some editors write at the beginning of a file."""


class ChatTemplate:
    """Chat templates of a model."""

    def __init__(
        self,
        written: str | Mapping[str, str] | None,
        special: Mapping[str, str],
        *,
        clock: datetime | None = None,
        where: str = "the tokenizer",
    ) -> None:
        """Compile the templates. Raises EnvironmentProblemError if one is not valid jinja.

        `where` describes where they are, for errors.
        """
        self.written = written
        """The template, or templates by name; None: the model has no template."""
        self.special = special
        """Name of a special token (`bos_token`) -> its text. Templates can read it."""
        self.clock = clock
        """Local time that templates read; None: the time at which they are rendered."""
        self._where = where
        texts = {} if written is None else {_DEFAULT: written} if isinstance(written, str) else written
        self._compiled = {name: self._compile(text) for name, text in texts.items()}
        self._texts = texts

    @classmethod
    def of_folder(cls, folder: Path, clock: datetime | None = None) -> "ChatTemplate":
        """Read the templates of a model folder.

        Raises EnvironmentProblemError if a file cannot be read, if a template is not valid jinja, or if there are
        several and none is `default`.
        """
        config = read_json_object(folder / _CONFIG)
        written = _written(folder, config)
        return cls(written, special_tokens(folder), clock=clock, where=f"`{folder}`")

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "ChatTemplate":
        """Return the templates that a tokenizer object of transformers has."""
        return cls(getattr(tokenizer, "chat_template", None), getattr(tokenizer, "special_tokens_map", {}))

    @property
    def text(self) -> str | None:
        """Text of the template for prompts without tools; None: the model has no template."""
        return self._texts.get(_DEFAULT)

    @cached_property
    def reads(self) -> frozenset[str]:
        """Names that a template can read: arguments, special tokens and functions."""
        parse = jinja2.Environment(extensions=_EXTENSIONS).parse
        names = (jinja2.meta.find_undeclared_variables(parse(text)) for text in self._texts.values())
        return frozenset[str]().union(*names)

    @property
    def reads_clock(self) -> bool:
        """Whether a template can read the time."""
        return "strftime_now" in self.reads

    def render(self, chat: Sequence[Message], arguments: Mapping[str, object] = MappingProxyType({})) -> str:
        """Return the chat as text, ending with the generation prompt that opens the assistant's turn.

        `arguments` are the `template_args` of the recipe, and `tools`. The model must have a template. A template is
        code, so any error may be raised.
        """
        return self.rendered([message.as_json() for message in chat], arguments)

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, object], *, opens_turn: bool = True
    ) -> str:
        """Return what `render` returns, for messages that may have further keys, such as `tool_calls`. `opens_turn`:
        whether the generation prompt is added."""
        has_tools = arguments.get("tools") is not None and _WITH_TOOLS in self._compiled
        values = {"tools": None, "documents": None, **self.special, **arguments}
        template = self._compiled[_WITH_TOOLS if has_tools else _DEFAULT]
        return template.render(messages=messages, add_generation_prompt=opens_turn, **values)

    def _compile(self, text: str) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=_EXTENSIONS)
        environment.filters["tojson"] = _to_json
        environment.filters["random"] = _random
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = self._now
        try:
            return environment.from_string(text)
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            at = "" if line is None else f" (line {line})"
            raise EnvironmentProblemError(
                f"the chat template of {self._where} is not valid jinja: {error}{at}", hint="fetch the model again"
            ) from error

    def _now(self, format: str) -> str:
        return (self.clock or datetime.now()).strftime(format)


class _Generation(jinja2.ext.Extension):
    """Jinja tag `{% generation %}`, which marks the text of the assistant without changing it."""

    tags = {"generation"}  # noqa: RUF012 - jinja requires this form

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


_EXTENSIONS = [_Generation, jinja2.ext.loopcontrols]


def _written(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the templates of a folder as transformers has them: one text, or texts by name."""
    files = {path.stem: path for path in sorted(folder.glob(NAMED_TEMPLATES))}
    if (folder / _FILE).is_file():
        files = {_DEFAULT: folder / _FILE, **files}
    if files:
        texts = {name: _read(file) for name, file in files.items()}
        _require_default(texts, folder, f"cp {quoted(next(iter(files.values())))} {quoted(folder / _FILE)}")
        return texts[_DEFAULT] if len(texts) == 1 else texts
    template = config.get("chat_template")
    if isinstance(template, list) and all(isinstance(row, Mapping) for row in template):
        template = {str(row.get("name")): row.get("template") for row in template}
    if isinstance(template, Mapping):
        named = {str(name): _checked(text, folder / _CONFIG) for name, text in template.items()}
        editing = f"${{EDITOR:-vi}} {quoted(folder / _CONFIG)}  # name one of them `{_DEFAULT}`"
        _require_default(named, folder, editing)
        return named
    if template is not None:
        return _checked(template, folder / _CONFIG)
    legacy = read_json_object(folder / _LEGACY).get("chat_template")
    return None if legacy is None else _checked(legacy, folder / _LEGACY)


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8").removeprefix(_MARK)
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblemError(f"`{file}` cannot be read: {error}", hint="fetch the model again") from error


def _checked(template: object, file: Path) -> str:
    if not isinstance(template, str):
        raise EnvironmentProblemError(f"`chat_template` in `{file}` is not text", hint="fetch the model again")
    return template.removeprefix(_MARK)


def _require_default(texts: Mapping[str, str], folder: Path, hint: str) -> None:
    if _DEFAULT not in texts:
        names = ", ".join(f"`{name}`" for name in sorted(texts)) or "{}"
        raise EnvironmentProblemError(
            f"the model in `{folder}` has the chat templates {names}, but none with the name `{_DEFAULT}`", hint=hint
        )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass these names
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _random(_: object) -> None:
    raise jinja2.TemplateError("its filter `random` would make another prompt each time")


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
