"""A chat template gives the same text with and without transformers."""

import json
from pathlib import Path

import pytest

from data.conftest import CHAT, MakeTokenizer
from ppoctl.batch.prompts import Message
from ppoctl.data.chat import ChatTemplate
from ppoctl.errors import EnvironmentProblemError

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
    "a namespace": "{% set n = namespace(k=0) %}" + LOOP + "{% set n.k = n.k + 1 %}{{ n.k }}{% endfor %}",
}
MESSAGES = (Message("system", "Be brief. "), Message("user", "one & <two>?\n"))


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
        config = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
        several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": text}]
        config["chat_template"] = text if kept_in == "config" else several
        config["bos_token"] = {"content": config["bos_token"], "lstrip": False}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    chat = [{"role": message.role, "content": message.content} for message in MESSAGES]
    theirs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert ChatTemplate(tmp_path).render(MESSAGES) == theirs


def test_special_tokens_come_from_the_config_or_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }} {{ eos_token }} {{ pad_token }}", "utf-8")
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": "map", "eos_token": {"content": "map"}}', "utf-8"
    )
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "own", "pad_token": "own"}', "utf-8")
    template = ChatTemplate(tmp_path)
    assert template.special == {"bos_token": "own", "eos_token": "map", "pad_token": "own"}
    assert template.render(MESSAGES) == "own map own"
    assert template.render(MESSAGES, {"eos_token": "written"}) == "own written own"


def test_template_cannot_escape_the_sandbox(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}", "utf-8")
    with pytest.raises(Exception, match="unsafe"):
        ChatTemplate(tmp_path).render(MESSAGES)


@pytest.mark.parametrize("written", [5, {"default": "x"}, [{"name": "default", "template": 1}]])
def test_template_that_is_not_a_string_is_refused(tmp_path: Path, written: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": written}), "utf-8")
    with pytest.raises(EnvironmentProblemError, match=r"`chat_template` in `.*tokenizer_config.json` is not text"):
        ChatTemplate(tmp_path)


def test_model_without_a_chat_template_has_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}", "utf-8")
    assert ChatTemplate(tmp_path).text is None
