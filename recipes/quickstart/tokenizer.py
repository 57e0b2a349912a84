"""Tokenizer of the quickstart: complete words of the templates, single digits, and bytes for everything else.

It is a Qwen2 tokenizer (byte-level BPE, Qwen2's word pattern and NFC normalization) with a small vocabulary, because
transformers and vLLM load every `qwen2` model folder with that class, whatever class the folder names. The merges are
learned from a list of words, so that each word gets its own id. Prompts stay short, and decoding restores any (NFC)
text exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from problems import ITEMS, NAMES, TEMPLATES
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

# Divisible by every usual tensor-parallel size.
VOCAB_SIZE = 576
PAD, EOS = "<|endoftext|>", "<|eos|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# Common words, for the rest of the vocabulary.
COMMON = (
    "the of to for is was were it he she they his her their him this that from at by as an if when then than what "
    "who will would can how many much more less all total each every half twice one two three four five six seven "
    "eight nine ten hundred dollars cents day days week weeks month year hours minutes money price cost costs "
    "sold buy bought make makes made spend spent left first second third after before per number people school "
    "house car dog cat time times work works pay paid"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def words() -> Iterator[str]:
    """Yield the training text of the merges: the words of the templates 100 times each, common words once."""
    template_words = ["####", *(f"{blank}{word}" for word in (*NAMES, *ITEMS) for blank in ("", " "))]
    template_words += [template.text.format(n="", m="", i="", a="", b="", c="") for template in TEMPLATES]
    for word in template_words:
        yield from [word] * 100
    yield from (f" {word}" for word in COMMON.split())


def build() -> Qwen2Tokenizer:
    """Return the tokenizer of the quickstart. It depends only on the templates, so it needs no seed."""
    return learned(words(), VOCAB_SIZE, CHAT_TEMPLATE)


def learned(words: Iterable[str], size: int, template: str) -> Qwen2Tokenizer:
    """Return a tokenizer of `size` pieces, whose merges are learned from the words."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    special = [PAD, EOS, *ROLES]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        words,
        trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(learner.to_str())["model"]
    fast = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )
    if len(fast) != size:
        raise ValueError(f"the vocabulary has {len(fast)} pieces, not {size}")
    fast.chat_template = template
    return fast


def save(folder: Path) -> Qwen2Tokenizer:
    """Build the tokenizer, write it to a folder, and return it."""
    fast = build()
    fast.save_pretrained(folder)
    return fast
