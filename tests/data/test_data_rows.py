"""Reading of datasets, and the single clear error for each invalid dataset."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppoctl.core.batch.prompts import Message
from ppoctl.core.errors import DataError, ExitCode, MissingAssetError, RecipeError
from ppoctl.data.index import read_set
from ppoctl.data.row_blocks import columns_of, lookup
from ppoctl.data.row_tables import ColumnRows, DataTable, Gsm8kRows
from ppoctl.data.rows import read_rows, require_enough, tables_of

MakeTable = Callable[..., Any]


def test_gsm8k_rows_have_questions_and_complete_gold_answers(gsm8k: MakeTable, tmp_path: Path) -> None:
    table = gsm8k('{"question": "1+1?", "answer": "2 it is\\n#### 2"}', "", '{"question": "q", "answer": "#### 3"}')
    first, second = read_rows(table, name="train")
    assert (first.question, first.answer) == ("1+1?", "2 it is\n#### 2")
    # The digests are of the JSON texts "1+1?" and "q", with quotes. Blank lines are not rows, but count as lines.
    assert (first.id, second.id) == ("train/000000-f938061d", "train/000001-90edba1c")
    assert second.place == f"`{tmp_path}/gsm8k.jsonl` line 3"


def test_row_id_depends_on_the_question_and_not_on_the_answer(jsonl: MakeTable, tmp_path: Path) -> None:
    def ids(*lines: str) -> list[str]:
        return [row.id for row in read_rows(jsonl(*lines), name="eval.aime24")]

    (before,) = ids('{"q": "one", "a": "1"}')
    (other_answer,) = ids('{"q": "one", "a": "2"}')
    (other_question,) = ids('{"q": "one ", "a": "1"}')
    assert before.startswith("eval/aime24/000000-")
    assert before == other_answer != other_question


def test_dataset_digest_changes_with_any_content(jsonl: MakeTable, tmp_path: Path) -> None:
    datasets = [
        ['{"q": "one", "a": "1"}', '{"q": "two", "a": "2"}'],
        ['{"q": "two", "a": "2"}', '{"q": "one", "a": "1"}'],
        ['{"q": "one", "a": "1"}', '{"q": "two", "a": "3"}'],
        ['{"q": "one", "a": "1"}'],
        ['{"q": [{"role": "user", "content": "one"}], "a": "1"}'],
    ]
    digests = [read_set(jsonl(*lines), name="train").digest for lines in datasets]
    repeated = read_set(jsonl(*datasets[0], name="copy.jsonl"), name="train").digest
    assert len(set(digests)) == len(datasets)
    assert repeated == digests[0]


def test_columns_may_be_nested_or_contain_dots(jsonl: MakeTable, tmp_path: Path) -> None:
    table = jsonl('{"q": "one", "r": {"x": {"truth": 7}}, "r.plain": "p"}', answer="r.x.truth")
    assert read_rows(table, name="train")[0].answer == "7"
    row = {"r": {"x": {"truth": 7}}, "r.plain": "p"}
    assert lookup(row, "r.plain") == "p"
    assert columns_of(row) == ["r.x.truth", "r.plain"]
    with pytest.raises(KeyError):
        lookup(row, "r.x.truth.deeper")


def test_further_columns_are_kept_if_the_table_names_them(jsonl: MakeTable, tmp_path: Path) -> None:
    line = '{"q": "one", "a": "1", "level": 3, "tags": ["x", null], "x": {"y": 0.5}, "unread": "u"}'
    (row,) = read_rows(jsonl(line, fields=("level", "tags", "x.y")), name="train")
    assert row.fields == {"level": 3, "tags": ["x", None], "x.y": 0.5}
    digests = {read_set(jsonl(line, fields=fields), name="train").digest for fields in ((), ("level",))}
    assert len(digests) == 2
    with pytest.raises(DataError, match=r"rows.jsonl` line 1 has no column `y`"):
        read_rows(jsonl(line, fields=("y",)), name="train")


def test_rows_may_lack_a_ground_truth(jsonl: MakeTable, tmp_path: Path) -> None:
    (row,) = read_rows(jsonl('{"q": "one"}', answer=None), name="train")
    assert row.answer is None


def test_chat_is_kept_as_its_messages(jsonl: MakeTable, tmp_path: Path) -> None:
    table = jsonl('{"q": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "a": "1"}')
    (row,) = read_rows(table, name="train")
    assert row.question == (Message("system", "s"), Message("user", "u"))


def test_max_rows_limits_reading_to_the_first_rows(jsonl: MakeTable, tmp_path: Path) -> None:
    table = jsonl('{"q": "one", "a": "1"}', '{"q": "two", "a": "2"}', "not read", max_rows=2)
    assert [row.question for row in read_rows(table, name="train")] == ["one", "two"]


def test_parquet_rows_are_read_like_jsonl_rows(tmp_path: Path) -> None:
    lines = [{"q": "one", "r": {"truth": "1"}}, {"q": "two", "r": {"truth": "2"}}]
    table = parquet_table(tmp_path, *lines, answer="r.truth")
    rows = read_rows(table, name="train")
    assert [(row.question, row.answer) for row in rows] == [("one", "1"), ("two", "2")]
    assert rows[1].place == f"`{tmp_path}/x.parquet` row 2"


def test_datasets_of_a_recipe_are_named_by_key(jsonl: MakeTable, tmp_path: Path) -> None:
    data = DataTable(
        train=jsonl('{"q": "one", "a": "1"}'), eval={"small": jsonl('{"q": "two", "a": "2"}', name="e.jsonl")}
    )
    rows = {name: read_rows(table, name=name) for name, table in tables_of(data).items()}
    assert {name: [row.question for row in dataset] for name, dataset in rows.items()} == {
        "train": ["one"],
        "eval.small": ["two"],
    }


def test_missing_data_file_is_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    with pytest.raises(MissingAssetError) as caught:
        read_rows(Gsm8kRows(format="gsm8k", path=str(file)), name="train")
    assert caught.value.message == f"`data.train.path` is `{file}`: no such file"
    assert caught.value.hint is not None
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


def test_url_as_a_path_is_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        read_rows(Gsm8kRows(format="gsm8k", path="s3://bucket/x.jsonl"), name="train")
    assert caught.value.message.startswith("`data.train.path` is `s3://bucket/x.jsonl`, a URL;")
    assert caught.value.hint == "fetch it first, then --set data.train.path=./x.jsonl"


def test_folder_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no rows")
    with pytest.raises(RecipeError) as caught:
        read_rows(Gsm8kRows(format="gsm8k", path=str(tmp_path)), name="train")
    assert caught.value.message == (f"`data.train.path` is `{tmp_path}`: a folder without `.jsonl` or `.parquet`")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"q": "x", "a"', "{file} line 2 is not JSON: Expecting ':' delimiter (column 15)"),
        ('["q", "a"]', "{file} line 2 is JSON, but not an object with columns"),
        ('{"q": "x", "b": {"c": 1}}', "{file} line 2 has no column `a`; its columns are `q`, `b.c`"),
        ("{}", "{file} line 2 has no column `q`; its columns are none"),
        ('{"q": "x", "a": null}', "{file} line 2: `a` is null, {answer}"),
        ('{"q": "x", "a": 0.5}', "{file} line 2: `a` is `0.5` (a float), {answer}"),
        ('{"q": "x", "a": true}', "{file} line 2: `a` is `True` (a bool), {answer}"),
        ('{"q": "x", "a": " "}', "{file} line 2: `a` is empty"),
        ('{"q": "", "a": "1"}', "{file} line 2: `q` is empty"),
        (
            '{"q": 7, "a": "1"}',
            "{file} line 2: `q` is `7` (a int), but a prompt must be text or a list of chat messages",
        ),
        (
            '{"q": [], "a": "1"}',
            "{file} line 2: `q` is `[]` (a list), but a prompt must be text or a list of chat messages",
        ),
        ('{"q": ["x"], "a": "1"}', "{file} line 2: message 1 in `q` must have a `role` and a `content`, both text"),
        (
            '{"q": [{"role": "user", "content": {"text": "x"}}], "a": "1"}',
            "{file} line 2: message 1 in `q` must have a `role` and a `content`, both text",
        ),
        (
            '{"q": [{"role": "assistant", "content": "x"}], "a": "1"}',
            "{file} line 2: the last message in `q` is from the assistant, so there is nothing to answer",
        ),
        ('{"q": "x\\ud800", "a": "1"}', "{file} line 2: `q` contains half a character at 1 (a lone surrogate)"),
    ],
)
def test_bad_row_is_one_clear_error_with_its_line(jsonl: MakeTable, tmp_path: Path, line: str, message: str) -> None:
    table = jsonl('{"q": "one", "a": "1"}', line)
    with pytest.raises(DataError) as caught:
        read_rows(table, name="train")
    assert caught.value.message == message.format(
        file=f"`{tmp_path}/rows.jsonl`",
        answer="but an answer must be text or a whole number",
        prompt="but a prompt must be text or a list of chat messages",
    )
    assert caught.value.hint is not None


def test_unmapped_columns_error_shows_the_mapping_to_add(gsm8k: MakeTable, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_rows(gsm8k('{"problem": "x", "answer": "1"}'), name="train")
    assert "has no column `question`; its columns are `problem`, `answer`" in caught.value.message
    assert caught.value.hint == (
        'map them in [data.train]: `format = "columns"`, `prompt = "COLUMN"`, `answer = "COLUMN"`'
    )


def test_verls_columns_in_another_format_are_recognized(gsm8k: MakeTable) -> None:
    with pytest.raises(DataError, match="has no column `question`") as caught:
        read_rows(gsm8k('{"prompt": [], "reward_model": {"ground_truth": "1"}}'), name="train")
    assert str(caught.value.hint).startswith('these are verl\'s columns: write `format = "verl"` in [data.train]')


def test_gsm8k_answer_without_its_marker_is_an_error(gsm8k: MakeTable, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: `answer` does not end in `#### N`"):
        read_rows(gsm8k('{"question": "x", "answer": "1"}'), name="train")


def test_invalid_utf8_is_an_error(jsonl: MakeTable, tmp_path: Path) -> None:
    table = jsonl()
    (tmp_path / "rows.jsonl").write_bytes(b'{"q": "\xff", "a": "1"}\n')
    with pytest.raises(DataError, match=r"line 1 is not UTF-8: invalid start byte \(byte 8\)"):
        read_rows(table, name="train")


def test_empty_dataset_is_an_error(jsonl: MakeTable, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl` is empty"):
        read_rows(jsonl("", " "), name="train")
    with pytest.raises(DataError, match=r"x.parquet` is empty"):
        read_rows(parquet_table(tmp_path, {"q": "one", "a": "1"}, keep=0), name="train")


def test_invalid_parquet_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    table = ColumnRows(format="columns", path=str(tmp_path / "x.parquet"), prompt="q", answer="a")
    with pytest.raises(DataError, match=r"x.parquet` cannot be read as parquet"):
        read_rows(table, name="train")


def test_bad_parquet_row_is_named_by_its_number(tmp_path: Path) -> None:
    table = parquet_table(tmp_path, {"q": "one", "a": "1"}, {"q": "two", "a": None})
    with pytest.raises(DataError, match=r"x.parquet` row 2: `a` is null"):
        read_rows(table, name="train")


@pytest.mark.parametrize(
    ("column", "what"),
    [
        ('"x": {"y": ["z\\ud800"]}', "`x.y`"),
        ('"x": {"y\\ud800": 1}', "a key of `x`"),
        ('"x": {"y": NaN, "z": "z\\ud800"}', "`x.z`"),
        ('"x\\ud800": 1', "the name of a column"),
    ],
)
def test_reward_field_with_half_a_character_is_an_error(jsonl: MakeTable, column: str, what: str) -> None:
    says = f"line 1: {what} contains half a character at 1 (a lone surrogate)"
    with pytest.raises(DataError, match=re.escape(says)):
        read_rows(jsonl(f'{{"q": "one", "a": "1", {column}}}', fields="all"), name="train")


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN"])
def test_reward_field_must_be_a_finite_number(jsonl: MakeTable, number: str) -> None:
    with pytest.raises(DataError, match=r"line 1: `x` is .*\(a float\), but fields for the reward must be JSON"):
        read_rows(jsonl(f'{{"q": "one", "a": "1", "x": {number}}}', fields=("x",)), name="train")


def test_reward_field_must_be_json(tmp_path: Path) -> None:
    table = parquet_table(tmp_path, {"q": "one", "a": "1", "image": b"png"}, fields=("image",))
    with pytest.raises(DataError, match=r"row 1: `image` is `b'png'` \(a bytes\), but fields for the reward must be"):
        read_rows(table, name="train")


@pytest.mark.parametrize(
    ("table", "name", "message"),
    [
        (Gsm8kRows, "x.parquet", "must end in `.jsonl`"),
        (partial(ColumnRows, prompt="q", answer="a"), "x.csv", "must end in `.jsonl`, `.jsonl.gz` or `.parquet`"),
    ],
)
def test_unsupported_file_type_is_an_error(tmp_path: Path, table: MakeTable, name: str, message: str) -> None:
    file = tmp_path / name
    file.touch()
    with pytest.raises(RecipeError) as caught:
        read_rows(table(format="columns" if name == "x.csv" else "gsm8k", path=str(file)), name="train")
    assert caught.value.message == f"`data.train.path` is `{file}`: {message}"


def test_fewer_rows_than_prompts_per_step_is_an_error(jsonl: MakeTable, tmp_path: Path) -> None:
    rows = read_rows(jsonl('{"q": "one", "a": "1"}', '{"q": "two", "a": "2"}'), name="train")
    require_enough(len(rows), 2)
    with pytest.raises(DataError) as caught:
        require_enough(len(rows), 3)
    assert caught.value.message == "`data.train` has 2 rows, but a step takes 3 (`rollout.prompts_per_step`)"
    assert str(caught.value.hint).startswith("--set rollout.prompts_per_step=2")


def test_rows_import_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'pyarrow'} & sys.modules.keys()"
    code = f"import sys; from ppoctl.data import rows; print({heavy} or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == "\n"


@pytest.mark.parametrize(
    ("table", "num_rows", "last_answer"),
    [
        (Gsm8kRows(format="gsm8k", path="$PPOCTL_DATA/gsm8k/train.jsonl"), 7473, "#### 50"),
        (Gsm8kRows(format="gsm8k", path="$PPOCTL_DATA/gsm8k/test.jsonl"), 1319, "#### 14"),
        (
            ColumnRows(
                format="columns",
                path="$PPOCTL_DATA/verl-parquet/gsm8k/test.parquet",
                prompt="prompt",
                answer="reward_model.ground_truth",
            ),
            1319,
            "14",
        ),
        (
            ColumnRows(format="columns", path="$PPOCTL_DATA/aime24/test.jsonl", prompt="problem", answer="answer"),
            30,
            "",
        ),
    ],
)
@pytest.mark.usefixtures("ppoctl_data")
def test_real_datasets_are_read_completely(table: Gsm8kRows | ColumnRows, num_rows: int, last_answer: str) -> None:
    resolved = table.model_copy(update={"path": os.path.expandvars(table.path)})
    rows = read_rows(resolved, name="train")
    assert len({row.id for row in rows}) == num_rows
    assert rows[-1].answer.endswith(last_answer)


def parquet_table(folder: Path, *rows: dict[str, Any], keep: int | None = None, **keys: Any) -> ColumnRows:
    """Write rows, or the first `keep` of them, to a file; return the table that reads them, with columns `q` and
    `a`."""
    import pyarrow
    import pyarrow.parquet

    file = folder / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows))[:keep], file)
    return ColumnRows(**{"format": "columns", "path": str(file), "prompt": "q", "answer": "a", **keys})
