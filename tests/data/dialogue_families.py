"""Chat templates with the output format of real families, in as few lines as possible, and small tokenizers with the
added tokens of these families."""

import json
from dataclasses import dataclass, field
from typing import Any


def barred(text: str) -> str:
    """Return a text with DeepSeek's wide bars in the place of `~`."""
    return text.replace("~", "\uff5c")


TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]

_QWEN_SYSTEM = (
    "{%- if tools %}<|im_start|>system\nYou help.\n\n# Tools\n"
    "{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}<|im_end|>\n{%- endif %}"
)
_QWEN_TOOL = (
    "{%- elif m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
)
QWEN25 = (
    _QWEN_SYSTEM + "{%- for m in messages %}"
    "{%- if m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{{- m.content if m.content else '<tool_call>\\n' ~ (m.tool_calls | tojson) ~ '\\n</tool_call>' }}"
    "{{- '<|im_end|>\\n' }}" + _QWEN_TOOL + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
QWEN3 = (
    _QWEN_SYSTEM + "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' and m.content and loop.index0 < ns.last %}"
    "{{- '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}"
    "{%- elif m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\\n' }}"
    "{{- m.content if m.content else '<tool_call>\\n' ~ (m.tool_calls | tojson) ~ '\\n</tool_call>' }}"
    "{{- '<|im_end|>\\n' }}" + _QWEN_TOOL + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
LLAMA31 = (
    "{{- bos_token }}{%- set head = '<|start_header_id|>system<|end_header_id|>\\n\\nToday: 26 Jul 2024\\n\\n' %}"
    "{{- head + '<|eot_id|>' }}"
    "{%- for m in messages %}"
    "{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}"
    "{%- if m.role == 'tool' %}{{- m.content | tojson if m.content is iterable else m.content }}"
    "{%- elif m.tool_calls %}{{- m.tool_calls | tojson }}"
    "{%- elif tools and loop.first %}{{- 'Functions: ' ~ (tools | tojson) ~ '\\n\\n' ~ m.content | trim }}"
    "{%- else %}{{- m.content | trim }}{%- endif %}{{- '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'user' %}"
    "{%- if tools and m == users[-1] %}"
    "{{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' and m.content %}{{- ' ' + m.content + eos_token }}"
    "{%- elif m.role == 'assistant' %}{{- '[TOOL_CALLS] ' ~ (m.tool_calls | tojson) ~ eos_token }}"
    "{%- else %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}"
    "{%- endfor %}"
)
DEEPSEEK = barred(
    "{{- bos_token }}{%- set ns = namespace(is_tool=false, is_first=true) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{%- set ns.is_tool = false %}{{- '<~User~>' + m.content }}"
    "{%- elif m.role == 'system' %}{{- m.content }}"
    "{%- elif m.role == 'assistant' and m.content is none %}{%- set ns.is_first = true %}"
    "{{- '<~tool\u2581outputs\u2581end~>' if ns.is_tool else '<~Assistant~>' }}{%- set ns.is_tool = false %}"
    "{%- for c in m.tool_calls %}{{- '<~tool\u2581calls\u2581begin~>' + c.function.name + '<~tool\u2581sep~>' }}"
    "{{- c.function.arguments + '<~tool\u2581calls\u2581end~>' }}{%- endfor %}{{- eos_token }}"
    "{%- elif m.role == 'assistant' %}"
    "{{- '<~tool\u2581outputs\u2581end~>' if ns.is_tool else '<~Assistant~>' }}{%- set ns.is_tool = false %}"
    "{{- m.content.split('</think>')[-1] + eos_token }}"
    "{%- else %}{%- set ns.is_tool = true %}"
    "{{- '<~tool\u2581outputs\u2581begin~>' if ns.is_first else '\\n' }}{%- set ns.is_first = false %}"
    "{{- '<~tool\u2581output\u2581begin~>' + m.content + '<~tool\u2581output\u2581end~>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if ns.is_tool %}{{- '<~tool\u2581outputs\u2581end~>' }}"
    "{%- elif add_generation_prompt %}{{- '<~Assistant~>' }}{%- endif %}"
)
GEMMA2 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{{- m.content | trim + '<end_of_turn>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
LLAMA2 = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + ' ' + eos_token }}"
    "{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}{%- endfor %}"
)
NO_TOOLS = (  # ChatML, which ignores `tools`
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
_CHATML = (*_CHATML, "<tool_response>", "</tool_response>")
_LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_DEEPSEEK = tuple(
    barred(f"<~{name}~>")
    for name in (
        *(
            "begin\u2581of\u2581sentence",
            "end\u2581of\u2581sentence",
            "User",
            "Assistant",
            "tool\u2581sep",
            "tool\u2581calls\u2581begin",
        ),
        *(
            "tool\u2581calls\u2581end",
            "tool\u2581outputs\u2581begin",
            "tool\u2581outputs\u2581end",
            "tool\u2581output\u2581begin",
            "tool\u2581output\u2581end",
        ),
    )
)
_MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")


@dataclass(frozen=True)
class Family:
    """A chat template, the added tokens of its tokenizer, and how the tokenizer treats blanks."""

    template: str | None
    added: tuple[str, ...]
    end: str
    """Token that the template writes at the end of a turn."""
    bos: str | None = None
    eos: str | None = None
    is_metaspace: bool = False
    before_turn: str = ""
    """Text before a turn that the model generates, and that the template writes."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def tokenizer(self) -> Any:
        """Return the tokenizer: byte-level with merges, or SentencePiece-like with a blank before the first word."""
        from tokenizers import AddedToken
        from transformers import PreTrainedTokenizerFast

        core = _metaspace() if self.is_metaspace else _byte_level()
        tokens = [
            AddedToken(text, special=not text.startswith(("<t", "</t")), normalized=False) for text in self.added
        ]
        core.add_tokens(tokens)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=self.bos, eos_token=self.eos or self.end)
        tokenizer.chat_template = self.template
        return tokenizer


FAMILIES = {
    "qwen2.5": Family(QWEN25, _CHATML, "<|im_end|>", arguments={"tools": TOOLS}),
    "qwen3": Family(QWEN3, _CHATML, "<|im_end|>", arguments={"tools": TOOLS}),
    "qwen3 without thinking": Family(QWEN3, _CHATML, "<|im_end|>", arguments={"enable_thinking": False}),
    "llama 3.1": Family(LLAMA31, _LLAMA3, "<|eot_id|>", "<|begin_of_text|>", arguments={"tools": TOOLS}),
    "mistral": Family(MISTRAL, _MISTRAL, "</s>", "<s>", is_metaspace=True, before_turn=" "),
    "deepseek": Family(DEEPSEEK, _DEEPSEEK, _DEEPSEEK[1], _DEEPSEEK[0]),
    "gemma 2": Family(
        GEMMA2, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "<bos>", "<eos>", True
    ),
    "llama 2": Family(LLAMA2, ("<s>", "</s>"), "</s>", "<s>", is_metaspace=True, before_turn=" "),
    "base model": Family(None, ("<|endoftext|>",), "<|endoftext|>"),
}


def _byte_level() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("\u010a", "\u010a"),
        ("\u0120", "4"),
        ("i", "m"),
        ("im", "_"),
        ("e", "n"),
        ("en", "d"),
        ("u", "s"),
        ("e", "r"),
        ("us", "er"),
    ]
    merged = ["".join(pair) for pair in merges]
    core = Tokenizer(models.BPE({token: id for id, token in enumerate([*alphabet, *merged])}, merges))
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(words, "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    return core


def _metaspace() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [chr(code) for code in range(33, 127)]
    merges = [("\u2581", "4"), ("t", "h"), ("th", "e"), ("\u2581", "the")]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters, *map("".join, merges)]
    core = Tokenizer(
        models.BPE({token: id for id, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def called(text: str) -> dict[str, Any]:
    """Return an assistant message with a tool call that is not part of its content."""
    function = {"name": text, "arguments": json.dumps({"n": 1})}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
