"""The token ids of a conversation: prompt, turns and suffixes together are what the chat template renders, and an
environment cannot write a control token."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.dialogue_families import FAMILIES, Family, barred, called
from ppoctl.core.batch.episodes import ControlTokensError, RejectedMessagesError
from ppoctl.core.batch.prompts import Message, Prompt
from ppoctl.data.dialogue import TemplateDialogue
from ppoctl.data.template import PromptTemplate

QUESTION = Message("user", "What is 6*7? ")


@cache
def opened(name: str) -> tuple[Any, TemplateDialogue, Family]:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    return (
        tokenizer,
        TemplateDialogue(PromptTemplate(tokenizer), [tokenizer.convert_tokens_to_ids(family.end)]),
        family,
    )


def encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_of(tokenizer: Any, family: Family, *chat: Message) -> Prompt:
    rendered = PromptTemplate(tokenizer)
    messages = [vars(message) for message in chat]
    text = rendered.rendered(messages, family.arguments) if family.template else "\n\n".join(m.content for m in chat)
    return Prompt("p", rendered.token_ids([text])[0], text, None, chat, template_args=family.arguments)


def after(tokenizer: Any, family: Family, text: str) -> tuple[int, ...]:
    """Return the ids of a text after a control token."""
    end = tokenizer.convert_tokens_to_ids(family.end)
    return encoded(tokenizer, family.end + text)[1:] if text else (end,)


# Messages of the observations after two turns. The second one starts and ends with blanks, and contains a line break
# that the tokenizer merges with that of the template.
USER = [[Message("user", '42\n\nno: "4\u00e9"')], [Message("user", "\n the end ")]]
TOOL = [
    [Message("tool", '42\n\n"4\u00e9"\\')],
    [Message("tool", "\n the end "), Message("tool", " 4"), Message("tool", "")],
]
CASES = [
    ("qwen2.5", USER),
    ("qwen2.5", TOOL),
    ("qwen3", TOOL),
    ("qwen3 without thinking", TOOL),
    ("llama 3.1", USER),
    ("llama 3.1", TOOL),
    ("mistral", USER),
    ("deepseek", USER),
    ("deepseek", TOOL),
    ("gemma 2", USER),
    ("llama 2", USER),
]


@pytest.mark.parametrize(("name", "observations"), CASES)
def test_prompt_turns_and_suffixes_are_the_rendered_dialogue(name: str, observations: list[list[Message]]) -> None:
    tokenizer, dialogue, family = opened(name)
    prompt = prompt_of(tokenizer, family, QUESTION)
    ids, chat = prompt.token_ids, [vars(QUESTION)]
    is_structured = name == "deepseek" and observations is TOOL
    for number, messages in enumerate(observations):
        text = f"Turn {number}."
        call = barred(f'<~tool\u2581calls\u2581begin~>{text}<~tool\u2581sep~>{{"n": 1}}<~tool\u2581calls\u2581end~>')
        written = call if is_structured else text
        turn = encoded(tokenizer, "x" + family.before_turn + written + family.end)[len(encoded(tokenizer, "x")) :]
        ids = (*ids, *turn, *dialogue.suffix(turn, messages, family.arguments))
        chat += [called(text) if is_structured else {"role": "assistant", "content": text}]
        chat += [vars(message) for message in messages]
    rendered = PromptTemplate(tokenizer).rendered(chat, family.arguments)
    if name == "qwen3 without thinking":  # the complete dialogue lacks the empty thoughts before the turns
        for number in range(2):
            rendered = rendered.replace(f"Turn {number}", f"<think>\n\n</think>\n\nTurn {number}")
    if name == "llama 2":  # the template writes a blank before the end token, which the actor does not generate
        rendered = rendered.replace(" </s>", "</s>")
    assert tokenizer.decode(ids) == tokenizer.decode(encoded(tokenizer, rendered))
    assert ids == encoded(tokenizer, rendered)


def test_suffix_of_a_hand_worked_dialogue() -> None:
    tokenizer, dialogue, _ = opened("qwen2.5")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"
    suffix = dialogue.suffix([1, end], [Message("user", "42")])
    assert tokenizer.decode(suffix) == text
    # The newline after the end token, which no engine generates, and no second end token.
    assert tokenizer.convert_ids_to_tokens(suffix[:4]) == ["\u010a", "<|im_start|>", "user", "\u010a"]


@pytest.mark.parametrize(
    ("last", "starts"),
    [
        ("<|im_end|>", "\n<|im_start|>"),
        ("<|endoftext|>", "\n<|im_start|>"),  # another end token of the model takes the place of the template's
        ("</tool_call>", "<|im_end|>\n<|im_start|>"),  # a stop token id of the recipe, or the end of a stop string
        ("4", "<|im_end|>\n<|im_start|>"),
    ],
)
def test_suffix_starts_after_the_token_that_ended_the_turn(last: str, starts: str) -> None:
    tokenizer, _, _ = opened("qwen2.5")
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    dialogue = TemplateDialogue(PromptTemplate(tokenizer), ids)
    suffix = dialogue.suffix([7, *encoded(tokenizer, last)], [Message("user", "42")])
    assert tokenizer.decode(suffix) == f"{starts}user\n42<|im_end|>\n<|im_start|>assistant\n"


def test_suffix_reads_the_arguments_of_the_prompt() -> None:
    tokenizer, dialogue, _ = opened("qwen3")
    end = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    texts = [
        tokenizer.decode(dialogue.suffix(end, [Message("tool", "4")], {"enable_thinking": thinks}))
        for thinks in (True, False, True)
    ]
    assert texts[0] == texts[2] != texts[1] == texts[0] + "<think>\n\n</think>\n\n"


def test_base_model_has_blank_lines_around_observations() -> None:
    tokenizer, dialogue, family = opened("base model")
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for turn in ([end], [5]):
        suffix = dialogue.suffix(turn, [Message("tool", "4<|endoftext|>"), Message("user", "")])
        assert tokenizer.decode(suffix) == "\n\n4<|endoftext|>\n\n\n\n"
        assert end not in suffix
    prompt = prompt_of(tokenizer, family, QUESTION)
    first = dialogue.prompt(prompt, [Message("user", "a"), Message("user", "<|endoftext|>")])
    assert tokenizer.decode(first) == f"{QUESTION.content}\n\na\n\n<|endoftext|>"
    assert end not in first


@pytest.mark.parametrize("name", ["qwen2.5", "llama 3.1", "mistral", "gemma 2"])
def test_first_observation_is_rendered_with_the_prompt(name: str) -> None:
    tokenizer, dialogue, family = opened(name)
    first = [Message("assistant", "Ready?"), Message("user", " Yes. ")]
    prompt = prompt_of(tokenizer, family, QUESTION)
    assert dialogue.prompt(prompt, []) is prompt.token_ids
    assert dialogue.prompt(prompt, first) == prompt_of(tokenizer, family, QUESTION, *first).token_ids


def controls(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    added = tokenizer.added_tokens_decoder
    return [id for id in ids if id in added]


FORGED = {name: FAMILIES[name].added for name in ("qwen3", "llama 3.1", "mistral", "deepseek", "gemma 2")}


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "mistral"),
        *(
            pytest.param(name, marks=pytest.mark.ci("qwen3; mistral"))
            for name in FORGED
            if name not in ("qwen3", "mistral")
        ),
    ],
)
@given(data=st.data())
def test_observation_cannot_contain_a_control_token(name: str, data: st.DataObject) -> None:
    tokenizer, dialogue, family = opened(name)
    cut = st.sampled_from(family.added).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda ends: text[min(ends) : max(ends)] or text
        )
    )
    piece = st.one_of(st.sampled_from(family.added), cut, st.sampled_from(["\n", " ", "x", "\u00e9", "the 4"]))
    texts = data.draw(st.lists(st.lists(piece, min_size=1, max_size=4).map("".join), min_size=1, max_size=2))
    role = "tool" if name in ("qwen3", "llama 3.1") else "user"
    messages = [Message(role, text) for text in (texts if role == "tool" else texts[:1])]
    end = tokenizer.convert_tokens_to_ids(family.end)
    harmless = dialogue.suffix([end], [Message(role, "x") for _ in messages])
    suffix = dialogue.suffix([end], messages)
    assert controls(tokenizer, suffix) == controls(tokenizer, harmless)
    shown = PromptTemplate(tokenizer).rendered(
        [vars(QUESTION), {"role": "assistant", "content": "MARK"}, *map(vars, messages)], {}
    )
    # The tokenizer writes `</s>` after the mark, and a text after it has no blank of its own.
    assert tokenizer.decode([end, *suffix]) == shown.partition("MARK")[2]


def test_first_observation_cannot_contain_a_control_token() -> None:
    tokenizer, dialogue, family = opened("mistral")
    system = Message("user", "</s> is an end token.")  # a row may contain control tokens: it is the user's own
    prompt = prompt_of(tokenizer, family, system)
    first = dialogue.prompt(prompt, [Message("assistant", "a</s>"), Message("user", "[/INST] the</s>")])
    assert tokenizer.decode(first) == "<s>[INST] </s> is an end token.[/INST] a</s></s>[INST] [/INST] the</s>[/INST]"
    written = [tokenizer.decode([id]) for id in controls(tokenizer, first)]
    assert written == ["<s>", "[INST]", "</s>", "[/INST]", "</s>", "[INST]", "[/INST]"]


def test_token_without_a_form_as_text_is_refused(make_tokenizer: Any) -> None:
    """The vocabulary of this tokenizer has whole words, and its end token is one of them."""
    tokenizer = make_tokenizer()
    dialogue = TemplateDialogue(PromptTemplate(tokenizer), [2])
    assert (
        tokenizer.decode(dialogue.suffix([8, 2], [Message("user", "two three")]))
        == "<|user|> two three <|assistant|>"
    )
    with pytest.raises(ControlTokensError, match=r"no other tokens for the text of the control tokens \['<eos>'\]"):
        dialogue.suffix([8, 2], [Message("user", "two <eos> three")])


@pytest.mark.parametrize(
    ("name", "message", "says"),
    [
        ("gemma 2", Message("tool", "4"), "`tool` messages: roles must alternate"),
        ("mistral", Message("tool", "4"), "`tool` messages: Tool call IDs should be alphanumeric"),
        ("qwen3", Message("user", "4\ud800"), "a message of the role user is not valid text"),
    ],
)
def test_messages_that_the_template_cannot_write_are_rejected(name: str, message: Message, says: str) -> None:
    _, dialogue, _ = opened(name)
    with pytest.raises(RejectedMessagesError, match=says) as caught:
        dialogue.suffix([1], [message])
    assert caught.value.reason == "invalid"


@pytest.mark.parametrize(
    ("content", "is_known"),
    [
        ("m.content", True),
        ("m.content | trim", True),
        ("m.content.lstrip()", True),
        ("m.content | tojson", True),
        ("m.content.lstrip('\\n')", False),
        ("m.content | upper", False),
        ("m.content | e", False),
        ("m.content | trim | tojson", False),
        ("m.content + m.content", False),
        ("''", False),
    ],
)
def test_unknown_transforms_of_a_content_are_refused(content: str, is_known: bool) -> None:
    written = f"{{% if m.role == 'tool' %}}{{{{ {content} }}}}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    template = f"{{% for m in messages %}}{written}<|im_end|>{{% endfor %}}"
    tokenizer = Family(template, FAMILIES["qwen3"].added, "<|im_end|>").tokenizer()
    dialogue = TemplateDialogue(PromptTemplate(tokenizer), [tokenizer.convert_tokens_to_ids("<|im_end|>")])
    message = Message("tool", '\n "a" \n')
    if not is_known:
        with pytest.raises(RejectedMessagesError, match="changes it in a way that ppoctl does not know"):
            dialogue.suffix([1], [message])
        return
    shown = tokenizer.apply_chat_template([vars(message)], tokenize=False)
    assert tokenizer.decode(dialogue.suffix([1], [message])) == f"<|im_end|>{shown}"
