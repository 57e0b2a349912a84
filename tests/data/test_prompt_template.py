"""The token ids of a question."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import DataError, EnvironmentProblemError
from ppoctl.data.row_tables import ColumnRows
from ppoctl.data.rows import DatasetRow
from ppoctl.data.template import PromptTemplate
from ppoctl.data.tokenizer import load_tokenizer

MakeTokenizer = Callable[..., Any]

QUESTION = DatasetRow("train/000000-0", "one two", "3", "`f` line 1")
CHAT = DatasetRow("train/000001-1", (Message("system", "three"), Message("user", "one")), "3", "`f` line 2")


def table(system: str = "", instruction: str = "") -> ColumnRows:
    return ColumnRows(
        format="columns", path="f.jsonl", prompt="q", answer="a", system=system, instruction=instruction
    )


def rendered(tokenizer: Any, row: DatasetRow, rows_table: ColumnRows) -> tuple[str, str]:
    """Return the text, and its tokens joined by spaces."""
    (prompt,) = PromptTemplate(tokenizer).render([row], rows_table, name="train")
    return prompt.text, " ".join(tokenizer.convert_ids_to_tokens(list(prompt.token_ids)))


@pytest.mark.parametrize(
    ("row", "rows_table", "text", "tokens"),
    [
        (QUESTION, table(), "<|user|> one two <|assistant|>", "<|user|> one two <|assistant|>"),
        (
            QUESTION,
            table(system="Be brief.", instruction="three ?"),
            "<|system|> Be brief. <|user|> one two\nthree ? <|assistant|>",
            "<|system|> Be brief. <|user|> one two three ? <|assistant|>",
        ),
        (CHAT, table(), "<|system|> three <|user|> one <|assistant|>", "<|system|> three <|user|> one <|assistant|>"),
    ],
)
@pytest.mark.parametrize("adds", ["", "<bos> $A <eos>"])
def test_chat_template_frames_the_question_and_opens_the_answer(
    make_tokenizer: MakeTokenizer, adds: str, row: DatasetRow, rows_table: ColumnRows, text: str, tokens: str
) -> None:
    # A templated prompt gets only the tokens that the template writes, even if the tokenizer adds others by itself.
    assert rendered(make_tokenizer(adds=adds), row, rows_table) == (text, tokens)


@pytest.mark.parametrize(
    ("adds", "opening"), [("", ""), ("<bos> $A", "<bos> "), ("<bos> $A <eos>", "<bos> "), ("$A <eos>", "")]
)
def test_prompt_without_a_template_is_plain_text_after_bos(
    make_tokenizer: MakeTokenizer, adds: str, opening: str
) -> None:
    tokenizer = make_tokenizer(chat_template=None, adds=adds)
    text, tokens = rendered(tokenizer, QUESTION, table(system="Be brief.", instruction="three ?"))
    assert text == "Be brief.\n\none two\nthree ?"
    assert tokens == f"{opening}Be brief. one two three ?"


def test_prompt_file_fills_every_slot_and_keeps_whitespace(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "frame.txt"
    file.write_bytes(b"\xef\xbb\xbfthree {question} : {question} \t\r\n\r\n")  # written by an editor on Windows
    text, _ = rendered(
        make_tokenizer(chat_template=None), QUESTION, table().model_copy(update={"prompt_file": str(file)})
    )
    assert text == "three one two : one two \t"


def test_batch_rendering_equals_row_by_row_rendering(make_tokenizer: MakeTokenizer) -> None:
    template = PromptTemplate(make_tokenizer())
    together = template.render([QUESTION, CHAT], table(), name="train")
    apart = [template.render([row], table(), name="train")[0] for row in (QUESTION, CHAT)]
    assert together == apart


@pytest.mark.parametrize(
    ("row", "rows_table", "message"),
    [
        (
            CHAT,
            table(instruction="Be brief."),
            "`data.eval.x.instruction` is set, but the prompt of row `train/000001-1` (`f` line 2) is a chat",
        ),
        (
            CHAT,
            table(system="Be brief."),
            "`data.eval.x.system` is set, but row `train/000001-1` (`f` line 2) already has a system message",
        ),
        (
            DatasetRow("train/000002-2", (Message("tool", "one"),), "3", "`f` line 3"),
            table(),
            "the model's chat template rejects row `train/000002-2` (`f` line 3): no tools here",
        ),
    ],
)
def test_row_that_cannot_be_rendered_is_one_clear_error(
    make_tokenizer: MakeTokenizer, row: DatasetRow, rows_table: ColumnRows, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        PromptTemplate(make_tokenizer()).render([row], rows_table, name="eval.x")
    assert caught.value.message == message
    assert caught.value.hint is not None


def test_template_digest_depends_on_tokenizer_and_template(make_tokenizer: MakeTokenizer) -> None:
    digests = [
        PromptTemplate(make_tokenizer(**keys)).digest
        for keys in ({}, {}, {"adds": "<bos> $A"}, {"chat_template": None}, {"chat_template": "{{ messages }}"})
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    other = make_tokenizer()
    other.bos_token = "<eos>"
    assert PromptTemplate(other).digest not in digests


def test_saved_tokenizer_is_loaded_regardless_of_the_architecture(
    make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    # AutoTokenizer would rebuild it with this architecture's own pre-tokenization rules.
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    loaded = load_tokenizer(str(tmp_path))
    assert rendered(loaded, QUESTION, table()) == rendered(tokenizer, QUESTION, table())
    assert PromptTemplate(loaded).digest == PromptTemplate(tokenizer).digest


def test_missing_model_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblemError) as caught:
        load_tokenizer(str(tmp_path / "no-model"))
    assert f"`model.path` is `{tmp_path}/no-model`, but no tokenizer can be loaded from it" in caught.value.message
    assert caught.value.hint is not None
