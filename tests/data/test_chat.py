"""A chat template gives the same text with and without transformers."""

import json
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from data.conftest import CHAT, MakeTokenizer
from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import EnvironmentProblemError
from ppoctl.data.chat import ChatTemplate

LOOP = "{% for m in messages %}"
TEMPLATES = {
    "plain": CHAT,
    "special tokens": "{{ bos_token }}"
    + LOOP
    + "[{{ m.role }}] {{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "blocks on their lines": LOOP
    + "\n  {% if m.role == 'user' %}\n  <{{ m.content }}>\n  {% endif %}\n{% endfor %}\n",
    "loop controls": LOOP + "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "json": "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': '<\u00e9>'} | tojson(sort_keys=true) }}",
    "what the assistant says": LOOP + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tools and the rest": "{% if tools %}T{% endif %}{% if documents %}D{% endif %}{{ add_generation_prompt }}",
    "a loop around a tag": LOOP
    + "{% generation %}{{ loop.index }}{% if loop.last %}!{% endif %}{% endgeneration %}{% endfor %}",
    "json of other forms": "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }}{{ '<' | tojson }}",
    "a namespace": "{% set n = namespace(k=0) %}" + LOOP + "{% set n.k = n.k + 1 %}{{ n.k }}{% endfor %}",
}
MESSAGES = (Message("system", "Be brief. "), Message("user", "one & <two>?\n"))


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
LEGACY = "chat_template.json"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kept_in", ["file", "config", "list"])
def test_chat_template_renders_like_transformers(
    make_tokenizer: MakeTokenizer, tmp_path: Path, name: str, kept_in: str
) -> None:
    text = TEMPLATES[name]
    tokenizer = make_tokenizer(chat_template=text)
    tokenizer.save_pretrained(tmp_path)
    if kept_in != "file":
        (tmp_path / "chat_template.jinja").unlink()
        several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": text}]
        edit(tmp_path, chat_template=text if kept_in == "config" else several)
        edit(tmp_path, bos_token={"__type": "AddedToken", "content": "<bos>"})
    assert ChatTemplate.of_folder(tmp_path).render(MESSAGES) == theirs(tmp_path)


def edit(folder: Path, **keys: object) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **keys}), "utf-8")


def theirs(folder: Path, **arguments: Any) -> str:
    """Return what transformers renders with the files of the folder."""
    chat = [{"role": message.role, "content": message.content} for message in MESSAGES]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **arguments))


PLACES: dict[str, tuple[dict[str, str], object]] = {
    "a file and a text": ({"chat_template.jinja": "file"}, "config"),
    "a file and more": (
        {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools"},
        "config",
    ),
    "a file and others": ({"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "rag"}, None),
    "only a folder": (
        {f"additional_chat_templates/{name}.jinja": name for name in ("default", "tool_use")},
        "config",
    ),
    "a list": ({}, [{"name": name, "template": name} for name in ("tool_use", "default")]),
    "a table": ({}, {"default": "own", "tool_use": "tools"}),
    "a text and the file of a processor": ({LEGACY: '{"chat_template": "processor"}'}, "config"),
    "an empty text": ({LEGACY: '{"chat_template": "processor"}'}, ""),
    "an empty file": ({"chat_template.jinja": ""}, "config"),
    "lines of Windows": ({"chat_template.jinja": "one\r\n{{ bos_token }}\r\n"}, None),
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_template_of_several_is_that_of_transformers(
    make_tokenizer: MakeTokenizer, tmp_path: Path, case: str, tools: object
) -> None:
    make_tokenizer(chat_template=None).save_pretrained(tmp_path)
    files, config = PLACES[case]
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())
    if config is not None:
        edit(tmp_path, chat_template=config)
    arguments = {} if tools is None else {"tools": tools}
    template = ChatTemplate.of_folder(tmp_path)
    assert template.render(MESSAGES, arguments) == theirs(tmp_path, **arguments)
    assert template.written == AutoTokenizer.from_pretrained(tmp_path).chat_template  # it is part of a digest


def test_template_of_a_processor_is_used_if_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / LEGACY).write_text('{"chat_template": "processor"}', "utf-8")
    assert ChatTemplate.of_folder(tmp_path).text == "processor"


def test_templates_without_default_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "config"}', "utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(name, "utf-8")
    with pytest.raises(
        EnvironmentProblemError, match=r"templates `rag`, `tool_use`, but none .* `default`"
    ) as caught:
        ChatTemplate.of_folder(tmp_path)
    subprocess.run(caught.value.hint, shell=True, check=True)
    assert ChatTemplate.of_folder(tmp_path).text == "rag"


@pytest.mark.parametrize("place", ["file", "config", LEGACY])
def test_byte_order_mark_is_not_part_of_a_template(tmp_path: Path, place: str) -> None:
    written = json.dumps({"chat_template": "\ufefftext"})
    if place == "file":
        (tmp_path / "chat_template.jinja").write_bytes(b"\xef\xbb\xbftext")
    else:
        (tmp_path / ("tokenizer_config.json" if place == "config" else place)).write_text(written, "utf-8")
    assert ChatTemplate.of_folder(tmp_path).render(MESSAGES) == "text"


def test_clock_of_a_template_is_given_or_now(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    text = "{{ strftime_now(format='%Y-%m-%d %H:%M') }}"
    tokenizer = make_tokenizer(chat_template=text)
    tokenizer.save_pretrained(tmp_path)
    template = ChatTemplate.of_folder(tmp_path, datetime(2024, 7, 26, 13, 5))
    assert (template.render(MESSAGES), template.reads_clock) == ("2024-07-26 13:05", True)
    before = theirs(tmp_path)
    assert before <= ChatTemplate.of_folder(tmp_path).render(MESSAGES) <= theirs(tmp_path)
    assert not ChatTemplate("{# strftime_now #}{{ messages }}", {}).reads_clock


@pytest.mark.parametrize("lists_added", [True, False])
def test_special_tokens_are_those_of_transformers(
    make_tokenizer: MakeTokenizer, tmp_path: Path, lists_added: bool
) -> None:
    make_tokenizer(chat_template="{{ [bos_token, eos_token, pad_token, image_token] }}").save_pretrained(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": "map", "eos_token": {"content": "map"}, "pad_token": null}', "utf-8"
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    config = {name: value for name, value in config.items() if name != "added_tokens_decoder"}
    added = {"added_tokens_decoder": {"0": {"content": "<unk>", "special": True}}} if lists_added else {}
    own = {"bos_token": "own", "pad_token": "own", "image_token": "<image>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **own, **added}), "utf-8")
    template = ChatTemplate.of_folder(tmp_path)
    assert template.render(MESSAGES) == theirs(tmp_path)
    assert template.render(MESSAGES, {"eos_token": "written"}) == theirs(tmp_path, eos_token="written")


def test_template_with_another_text_each_time_is_refused() -> None:
    with pytest.raises(Exception, match="filter `random` would make another prompt each time"):
        ChatTemplate("{{ ['A', 'B'] | random }}", {}).render(MESSAGES)


def test_template_cannot_escape_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}", "utf-8")
    with pytest.raises(Exception, match="unsafe"):
        ChatTemplate.of_folder(tmp_path).render(MESSAGES)


@pytest.mark.parametrize("written", [5, {"default": 1}, ["x"], [{"name": "default", "template": 1}]])
def test_template_that_is_not_a_string_is_refused(tmp_path: Path, written: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": written}), "utf-8")
    with pytest.raises(EnvironmentProblemError, match=r"`chat_template` in `.*tokenizer_config.json` is not text"):
        ChatTemplate.of_folder(tmp_path)


def test_model_without_a_chat_template_has_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}", "utf-8")
    assert ChatTemplate.of_folder(tmp_path).text is None
