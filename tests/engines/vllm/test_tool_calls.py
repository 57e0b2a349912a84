"""Tool calls of turns in every format: vLLM's parsers, in this process, against calls written by hand."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm_bench import Bench, prompts

from ppoctl.core.batch.episodes import ToolCall
from ppoctl.core.errors import RecipeError
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.vllm.tool_calls import MOST_CALLS, ParsedCalls, VllmToolCalls, parsed_calls
from ppoctl.recipe.call_format import CALL_TOKENS

pytestmark = pytest.mark.engines

BAR = "\uff5c"
DEEPSEEK_NAMES = ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
DEEPSEEK = tuple(f"<{BAR}tool\u2581{name}{BAR}>" for name in DEEPSEEK_NAMES)
TOKENS = {
    "hermes": (),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "mistral v11": ("[TOOL_CALLS]", "[ARGS]"),
    "deepseek_v3": DEEPSEEK,
}
"""Added tokens of a tokenizer of each format. Mistral's tokenizers from version 11 have another form of calls."""


@pytest.fixture(scope="module", autouse=True)
def imported(benches: Callable[[str], Bench]) -> None:
    """Start the engine that other files use, so that vLLM is imported as in an engine's process."""
    benches("tied").generate(prompts(1), SamplingParams(temperature=1.0, max_new_tokens=1))


@pytest.fixture(scope="module")
def parsers() -> dict[str, VllmToolCalls]:
    return {name: VllmToolCalls(name.split()[0], tokenizer(tokens), "model") for name, tokens in TOKENS.items()}


def tokenizer(added: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: n for n, char in enumerate(alphabet)}, merges=[]))
    core.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=core)


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def deepseek(*calls: tuple[str, str]) -> str:
    begin, end, call_begin, call_end, separator = DEEPSEEK
    inner = (f"{call_begin}function{separator}{name}\n```json\n{json}\n```{call_end}" for name, json in calls)
    return begin + "\n".join(inner) + end


ADD = {"a": 3, "b": -0.5}
NESTED = {"query": {"names": ["Zo\u00eb", "\u65e5\u672c {x}"], "deep": [[1], {"k": None}]}, "exact": True}
ADD_JSON = '{"a": 3, "b": -0.5}'
NESTED_JSON = '{"query": {"names": ["Zo\\u00eb", "\u65e5\u672c {x}"], "deep": [[1], {"k": null}]}, "exact": true}'

GOOD: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("hermes", hermes(f'{{"name": "add", "arguments": {ADD_JSON}}}'), [("add", ADD)]),
    ("hermes", f'I add.\n{hermes(f"""{{"name": "add", "arguments": {ADD_JSON}}}""")}\n Done.', [("add", ADD)]),
    ("hermes", hermes(f'{{"arguments": {NESTED_JSON}, "name": "find"}}'), [("find", NESTED)]),
    ("hermes", hermes('{"name": "b", "arguments": {}}', '{"name": "a", "arguments": {}}'), [("b", {}), ("a", {})]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}', [("add", {})]),  # complete JSON, no end mark
    ("llama3_json", f'{{"name": "add", "parameters": {ADD_JSON}}}', [("add", ADD)]),
    ("llama3_json", f'<|python_tag|>{{"name": "add", "parameters": {ADD_JSON}}}', [("add", ADD)]),
    ("llama3_json", f'I look. {{"parameters": {NESTED_JSON}, "name": "find"}} Done.', [("find", NESTED)]),
    (
        "llama3_json",
        f'{{"name": "b", "parameters": {{}}}}; {{"name": "a", "arguments": {ADD_JSON}}}',
        [("b", {}), ("a", ADD)],
    ),
    ("mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD_JSON}}}]', [("add", ADD)]),
    ("mistral", f'I look.[TOOL_CALLS][{{"name": "find", "arguments": {NESTED_JSON}}}] Done.', [("find", NESTED)]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "b", "arguments": {{}}}}, {{"name": "a", "arguments": {ADD_JSON}}}]',
        [("b", {}), ("a", ADD)],
    ),
    ("mistral v11", f"[TOOL_CALLS]add[ARGS]{ADD_JSON}", [("add", ADD)]),
    ("mistral v11", f"I look.[TOOL_CALLS]find{NESTED_JSON}[TOOL_CALLS]b[ARGS]{{}}", [("find", NESTED), ("b", {})]),
    ("deepseek_v3", deepseek(("add", ADD_JSON)), [("add", ADD)]),
    ("deepseek_v3", f"I look.{deepseek(('find', NESTED_JSON), ('add', ADD_JSON))}", [("find", NESTED), ("add", ADD)]),
]

NO_CALL = [
    ("hermes", ""),
    ("hermes", 'The answer is {"name": "add", "arguments": {}}.'),
    ("hermes", "a tool_call"),
    ("llama3_json", ""),
    ("llama3_json", r"so \boxed{72} of {a, b}, and {'name': 'add'}"),
    ("mistral", ""),
    ("mistral", '[{"name": "add", "arguments": {}}]'),
    ("mistral v11", "add{}"),
    ("deepseek_v3", ""),
    ("deepseek_v3", '```json\n{"a": 1}\n```'),
]

MALFORMED = [
    ("hermes", "<tool_call>", "started"),
    ("hermes", hermes('{"name": "add", "arguments": {"a": 3}'), "started"),
    ("hermes", hermes("add(3, 4)"), "started"),
    ("hermes", hermes('{"name": "add"}'), "started"),
    ("hermes", hermes('{"name": 3, "arguments": {}}'), "started"),
    ("hermes", hermes('["add", {}]'), "started"),
    ("hermes", hermes('{"name": "a", "arguments": {}}', '{"name": "b", "arguments": {}'), "started"),
    ("hermes", hermes('{"name": "", "arguments": {}}'), "does not have a name"),
    ("hermes", hermes('{"name": "\\ud800", "arguments": {}}'), "started|does not have a name"),
    ("hermes", hermes('{"name": "add", "arguments": [3, 4]}'), "arguments of `add` are not a JSON object"),
    ("hermes", hermes('{"name": "add", "arguments": "{}"}'), "arguments of `add` are not a JSON object"),
    ("hermes", hermes('{"name": "add", "arguments": null}'), "arguments of `add` are not a JSON object"),
    ("hermes", hermes('{"name": "add", "arguments": {"a": NaN}}'), "arguments of `add` are not valid JSON"),
    ("hermes", hermes('{"name": "add", "arguments": {"a": 1e999}}'), "arguments of `add` are not valid JSON"),
    ("hermes", hermes('{"name": "add", "arguments": {"a": "\\ud800"}}'), "started|not valid JSON"),
    ("hermes", hermes(f'{{"name": "add", "arguments": {{"a": {"[" * 64}{"]" * 64}}}}}'), "more than 64 levels"),
    (
        "hermes",
        hermes(f'{{"name": "add", "arguments": {{"a": {"[" * 9999}{"]" * 9999}}}}}'),
        "started|not valid JSON",
    ),
    ("hermes", hermes(f'{{"name": "add", "arguments": {{"a": {"9" * 9999}}}}}'), "started|not valid JSON"),
    ("llama3_json", "<|python_tag|>", "started"),
    ("llama3_json", "<|python_tag|>add.call(a=3)", "started"),
    ("llama3_json", '{"name": "add", "parameters": {"a": 3}', "started"),
    ("llama3_json", 'I add. {"name": "add", "params": {"a": 3}}', "started"),
    ("llama3_json", r'\boxed{72} {"name": "add", "parameters": {}}', "started"),
    ("llama3_json", '{"name": "add", "parameters": "a=3"}', "arguments of `add` are not a JSON object"),
    ("mistral", "[TOOL_CALLS]", "started"),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 3}', "started"),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"a": 3}}]', "does not have a name"),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": "a=3"}]', "arguments of `add` are not valid JSON"),
    ("mistral v11", '[TOOL_CALLS]add[ARGS]{"a": 3', "arguments of `add` are not valid JSON"),
    ("mistral v11", "[TOOL_CALLS][ARGS]{}", "started|does not have a name"),
    ("deepseek_v3", DEEPSEEK[0], "started"),
    ("deepseek_v3", deepseek(("add", '{"a": 3')), "arguments of `add` are not valid JSON"),
    ("deepseek_v3", deepseek(("add", '{\n"a": 3}')), "started"),  # vLLM reads one line
    ("deepseek_v3", deepseek(("add", ADD_JSON), ("add", "{\n}")), "1 of 2 tool calls could be read"),
    ("deepseek_v3", deepseek(("add", "[3, 4]")), "arguments of `add` are not a JSON object"),
    ("deepseek_v3", deepseek(*[("add", "{}")] * (MOST_CALLS + 1)), "at most 64 tool calls"),
]


def test_calls_of_well_formed_turns_are_read(parsers: dict[str, VllmToolCalls]) -> None:
    for name, text, calls in [*GOOD, *reversed(GOOD)]:  # a parser has no memory of the turn before
        expected = tuple(ToolCall(*call) for call in calls)
        assert parsed_calls(parsers[name], text) == ParsedCalls(expected), (name, text)


def test_text_that_starts_no_call_has_no_call(parsers: dict[str, VllmToolCalls]) -> None:
    for name, text in NO_CALL:
        assert parsed_calls(parsers[name], text) == ParsedCalls(), (name, text)


def test_malformed_calls_are_reported_in_one_sentence(
    parsers: dict[str, VllmToolCalls], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for name, text, reason in MALFORMED:
            parsed = parsed_calls(parsers[name], text)
            assert parsed.calls == (), (name, text)
            assert any(part in parsed.malformed for part in reason.split("|")), (name, text, parsed.malformed)
            assert parsed.malformed.isprintable()
    assert caplog.text == ""


def test_turn_of_repeated_marks_is_parsed_in_seconds(parsers: dict[str, VllmToolCalls]) -> None:
    """A policy that fails repeats such marks up to its limit of tokens."""
    _, _, call_begin, _, separator = DEEPSEEK
    cases = [
        ("deepseek_v3", DEEPSEEK[0] + f"{call_begin}function{separator}" * 4000),
        ("deepseek_v3", DEEPSEEK[0] + call_begin + f"{separator}a" * 8000),
        ("hermes", "<tool_call>" * 8000),
        ("llama3_json", '{"name": ' * 8000),
        ("mistral", "[TOOL_CALLS]" + "[{" * 8000),
    ]
    start = time.thread_time()
    assert all(parsed_calls(parsers[name], text).malformed for name, text in cases)
    assert time.thread_time() - start < 10


@pytest.mark.parametrize("form", list(CALL_TOKENS))
def test_tokenizer_without_token_of_format_is_refused(form: str) -> None:
    with pytest.raises(RecipeError, match=f"`{form}` need a token that the tokenizer of `model` lacks"):
        VllmToolCalls(form, tokenizer(()), "model")
    VllmToolCalls(form, tokenizer((CALL_TOKENS[form], *(DEEPSEEK if form == "deepseek_v3" else ()))), "model")
