"""Rows from a user's function, from dialogues, and from the library `datasets`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import DataError, MissingAssetError, PpoctlError, RecipeError
from ppoctl.data.index import read_set
from ppoctl.data.row_tables import ColumnRows, DatasetTable, DialogueRows, PythonRows
from ppoctl.data.rows import read_rows

Write = Callable[[str], PythonRows]


@pytest.fixture
def python(tmp_path: Path) -> Write:
    """Return a function that writes a Python file, and returns the table that takes rows from its function `rows`."""

    def write(code: str, **keys: Any) -> PythonRows:
        (tmp_path / "loader.py").write_text(code)
        return PythonRows(**{"format": "python", "function": f"{tmp_path}/loader.py:rows", **keys})

    return write


GOOD = (
    "def rows(word='w', count=2):\n    for n in range(count):\n        yield {'prompt': f'{word} {n}', 'level': n}\n"
)


def test_loader_function_returns_rows_as_mappings(python: Any, tmp_path: Path) -> None:
    first, second = read_rows(python(GOOD, options={"word": "x"}), name="train")
    assert (first.question, first.answer, first.fields) == ("x 0", None, {"level": 0})
    assert second.place == f"`{tmp_path}/loader.py:rows` row 2"


def test_function_rows_are_read_lazily(python: Any) -> None:
    endless = "def rows():\n    while True:\n        yield {'prompt': 'x', 'answer': 1}\n"
    assert len(read_rows(python(endless, max_rows=3), name="train")) == 3


def test_digest_of_function_rows_includes_its_file(python: Any) -> None:
    digests = [read_set(python(code), name="train").digest for code in (GOOD, GOOD, f"{GOOD}\n# other")]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("def rows():\n    yield 7\n", DataError, "loader.py:rows` row 1 is a int, but a row must be a mapping with"),
        (
            "def rows():\n    yield {'answer': 1}\n",
            DataError,
            "row 1 has no column `prompt`; its columns are `answer`",
        ),
        (
            "def rows():\n    1 / 0\n    yield\n",
            DataError,
            "which failed after 0 rows: ZeroDivisionError: division by",
        ),
        ("def rows(n):\n    return []\n", DataError, "failed after 0 rows: TypeError: rows() missing 1 required"),
        ("def rows():\n    return []\n", DataError, "[data.train] has no rows"),
        ("other = 1\n", RecipeError, "loader.py` has no `rows`; it defines nothing"),
        ("def rows():\n    raise SystemExit(3)\n    yield\n", DataError, "failed after 0 rows: SystemExit: 3"),
        ("import sys; sys.exit()\n", RecipeError, "cannot be imported: SystemExit"),
        ("import nothing_of_this_name\n", RecipeError, "cannot be imported: ModuleNotFoundError: No module named"),
    ],
)
def test_function_without_valid_rows_is_one_clear_error(
    python: Any, code: str, kind: type[PpoctlError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        read_rows(python(code), name="train")
    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        ("{0}/no.py:rows", MissingAssetError, "`{0}/no.py` cannot be read: no such file or directory"),
        ("{0}/no.py", RecipeError, "a function is written as `path.py:name`"),
        ("module:rows", RecipeError, "a function is written as `path.py:name`"),
    ],
)
def test_missing_function_is_one_clear_error(
    tmp_path: Path, function: str, kind: type[PpoctlError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        read_rows(PythonRows(format="python", function=function.format(tmp_path)), name="train")
    assert message.format(tmp_path) in caught.value.message


HH = "\n\nHuman: Hi.\n\nAssistant: Hello!\n\nHuman: A joke?\n\nAssistant:"


def dialogues(folder: Path, *rows: tuple[Any, Any]) -> DialogueRows:
    lines = [json.dumps({"chosen": chosen, "rejected": rejected}) for chosen, rejected in rows]
    (folder / "hh.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return DialogueRows(format="dialogues", path=str(folder / "hh.jsonl"))


def test_prompt_of_two_dialogues_is_their_common_prefix(tmp_path: Path) -> None:
    chat = (Message("user", "Hi."), Message("assistant", "Hello!"), Message("user", "A joke?"))
    as_chat = [{"role": message.role, "content": message.content} for message in chat]
    good, bad = ([*as_chat, {"role": "assistant", "content": text}] for text in ("Ha.", ""))
    rows = read_rows(
        dialogues(
            tmp_path,
            (f"{HH} Ha.", f"{HH} No."),
            (f"{HH} Ha.\n\nHuman: More!\n\nAssistant: Ho.", f"{HH} Ha.\n\nHuman: Less!\n\nAssistant: Hm."),
            (f"{HH} Ha.", f"{HH} Ha."),
            (f"{HH}", f"{HH} No."),
            (good, bad),
        ),
        name="train",
    )
    assert [row.question for row in rows] == [chat] * 5
    assert [row.answer for row in rows] == [None] * 5
    answers = [("Ha.", "No."), ("Ha.", "Ha."), ("Ha.", "Ha."), ("", "No."), ("Ha.", "")]
    assert [(row.fields["chosen"], row.fields["rejected"]) for row in rows] == answers


def test_turns_after_the_answers_of_dialogues_are_noted(tmp_path: Path) -> None:
    more = f"{HH} Ha.\n\nHuman: More!\n\nAssistant: Ho."
    rows = read_set(dialogues(tmp_path, (more, f"{HH} No."), (f"{HH} Yes.", f"{HH} No.")), name="train")
    assert list(rows.remarks()) == ["`data.train`: the reward cannot read `chosen` of 1 row after the first answer"]


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        (
            "\n\nHuman: a\n\nAssistant: x",
            "\n\nHuman: b\n\nAssistant: x",
            "do not begin with the same user turn",
        ),
        ("no turns", "no turns", "`chosen` is `no turns` (a str), but a dialogue must be text with `Human:`"),
        (None, "x", "`chosen` is null"),
        ("\n\nHuman: a", "\n\nHuman: a\n\nAssistant: x", "`chosen` has no assistant turn after the common"),
    ],
)
def test_invalid_dialogue_pair_is_one_clear_error(tmp_path: Path, chosen: Any, rejected: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(dialogues(tmp_path, (chosen, rejected)), name="train")
    assert message in caught.value.message
    assert "hh.jsonl` line 1" in caught.value.message


def test_dataset_that_cannot_be_loaded_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("Couldn't reach 'org/rows' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    table = ColumnRows(format="columns", prompt="q", dataset=DatasetTable(path="org/rows", split="test"))
    with pytest.raises(MissingAssetError) as caught:
        read_rows(table, name="train")
    assert caught.value.message == (
        "`data.train.dataset.path` is `org/rows` (split `test`): it cannot be loaded: "
        "Couldn't reach 'org/rows' on the Hub"
    )
    assert caught.value.hint == "hf download --repo-type dataset org/rows"


def test_saved_dataset_is_read_with_further_columns(tmp_path: Path) -> None:
    import datasets

    rows = [{"q": f"number {n % 2}", "a": str(n), "tags": ["x"] * n, "s": {"level": n}} for n in range(4)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    named = DatasetTable(path=str(tmp_path / "saved"))
    table = ColumnRows(format="columns", prompt="q", answer="a", fields=("tags", "s.level"), dataset=named)
    rows_read = read_rows(table, name="train")
    assert [(row.question, row.answer) for row in rows_read] == [(row["q"], row["a"]) for row in rows]
    assert rows_read[2].fields == {"tags": ["x", "x"], "s.level": 2}
    assert rows_read[2].place == f"`{tmp_path}/saved` (train) row 3"
    assert len(read_rows(table.model_copy(update={"max_rows": 3}), name="train")) == 3
    with pytest.raises(DataError, match=r"has no column `x`; its columns are `q`, `a`, `tags`, `s.level`"):
        read_rows(table.model_copy(update={"prompt": "x"}), name="train")


def test_split_of_a_saved_dataset_is_selected_by_name(tmp_path: Path) -> None:
    import datasets

    splits = {name: datasets.Dataset.from_list([{"q": name, "a": "1"}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    for split in splits:
        named = DatasetTable(path=str(tmp_path / "saved"), split=split)
        (row,) = read_rows(ColumnRows(format="columns", prompt="q", answer="a", dataset=named), name="train")
        assert row.question == split
