"""Tokenizer of the calculator's model: that of the quickstart with the words of its problems and of tool calls.

The tags of tool calls and results are added tokens that are not special, as in Qwen2.5, so they are part of the
decoded text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from calculator_problems import TEMPLATES, call
from problems import ITEMS, NAMES
from tokenizer import COMMON, learned
from transformers import AddedToken, Qwen2Tokenizer

VOCAB_SIZE = 512
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Like that of Qwen2.5, with a shorter text about tools: their names instead of their schemas.
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{- '<|system|>Tools:' -}}"
    "{%- for tool in tools -%}{{- ' ' + tool['function']['name'] -}}{%- endfor -%}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{%- if loop.first or loop.previtem['role'] != 'tool' -%}{{- '<|user|>' -}}{%- endif -%}"
    "{{- '<tool_response>\\n' + message['content'] + '\\n</tool_response>' -}}"
    "{%- else -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def words() -> Iterator[str]:
    """Yield the training text of the merges: the words of the templates 100 times each, common words once."""
    for word in (*NAMES, *ITEMS):
        yield from [word, f" {word}"] * 100
    template_words = [template.text.format(n="", i="", a="", b="", c="") for template in TEMPLATES]
    for text in ("####", "Tools: calculator", call("1+1"), *template_words):
        yield from [text] * 100
    yield from (f" {word}" for word in COMMON.split())


def build() -> Qwen2Tokenizer:
    """Return the tokenizer. It depends only on the templates, so it needs no seed."""
    fast = learned(words(), VOCAB_SIZE - len(TAGS), CHAT_TEMPLATE)
    fast.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return fast


def save(folder: Path) -> Qwen2Tokenizer:
    """Build the tokenizer, write it to a folder, and return it."""
    fast = build()
    fast.save_pretrained(folder)
    return fast
