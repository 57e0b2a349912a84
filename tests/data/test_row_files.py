"""Rows of several files, of unchanged verl files, and of large files with repeated rows."""

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import parquet

from ppoctl.core.errors import DataError, MissingAssetError
from ppoctl.data.index import read_set
from ppoctl.data.row_blocks import blocks_of
from ppoctl.data.row_files import rows_of
from ppoctl.data.row_tables import ColumnRows, Gsm8kRows, VerlRows
from ppoctl.data.rows import DatasetRow, read_rows
from ppoctl.data.template import PromptTemplate

MakeTable = Callable[..., Any]
CHAT = [{"role": "user", "content": "one"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with three files of two rows each, and one file of another type."""
    inside = tmp_path / "rows"
    inside.mkdir()
    lines = {name: "".join(f'{{"q": "{name} {n}", "a": "{n}"}}\n' for n in range(2)) for name in "abc"}
    (inside / "b.jsonl").write_text(lines["b"])
    (inside / "a.jsonl.gz").write_bytes(gzip.compress(lines["a"].encode()))
    parquet.write_table(
        pyarrow.Table.from_pylist([json.loads(line) for line in lines["c"].splitlines()]), inside / "c.parquet"
    )
    (inside / "README.md").write_text("no rows")
    return inside


def columns(path: str | tuple[str, ...], **keys: Any) -> ColumnRows:
    return ColumnRows(**{"format": "columns", "path": path, "prompt": "q", "answer": "a", **keys})


def questions(rows: list[DatasetRow]) -> list[object]:
    return [row.question for row in rows]


ALL = [f"{name} {n}" for name in "abc" for n in range(2)]


def test_folder_glob_and_array_of_files_are_read_in_order(folder: Path) -> None:
    rows = read_rows(columns(str(folder)), name="train")
    assert questions(rows) == ALL
    assert [row.id[:12] for row in rows] == [f"train/{n:06d}" for n in range(6)]
    assert rows[1].place == f"`{folder}/a.jsonl.gz` line 2"
    assert questions(read_rows(columns(f"{folder}/*.parquet"), name="train")) == ALL[4:]
    named = (f"{folder}/c.parquet", f"{folder}/[ab].*")
    assert questions(read_rows(columns(named), name="train")) == [*ALL[4:], *ALL[:4]]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 9])
def test_max_rows_counts_over_all_files(folder: Path, most: int) -> None:
    table = columns(str(folder), max_rows=most)
    assert questions(read_rows(table, name="train")) == ALL[:most]
    assert rows_of(table) == min(most, 6)


def test_paths_without_readable_files_are_reported(folder: Path) -> None:
    with pytest.raises(MissingAssetError, match=r"`data.train.path` is `.*/rows/\*.txt`: no file matches"):
        read_rows(columns(f"{folder}/*.txt"), name="train")
    assert rows_of(columns(f"{folder}/*.txt")) is None
    (folder / "d.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"d.jsonl.gz` cannot be read: Not a gzipped file"):
        read_rows(columns(str(folder)), name="train")


def test_all_other_columns_are_kept_with_fields_all(jsonl: MakeTable) -> None:
    line = '{"q": "one", "r": {"a": "1", "style": "rule"}, "x": [1], "y": null}'
    (row,) = read_rows(jsonl(line, answer="r.a", fields=None), name="train")
    assert row.fields == {"r": {"style": "rule"}, "x": [1], "y": None}
    (row,) = read_rows(jsonl('{"q": "one", "r": {"a": "1"}}', answer="r.a", fields=None), name="train")
    assert row.fields == {}


def test_verl_rows_are_read_unchanged(tmp_path: Path) -> None:
    rows = [
        {
            "data_source": "x",
            "prompt": CHAT,
            "reward_model": {"ground_truth": "7", "style": "rule"},
            "extra_info": {"i": 0},
        },
        {"data_source": "y", "prompt": CHAT, "reward_model": {"style": "model"}},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = VerlRows(format="verl", path=str(tmp_path / "x.jsonl"))
    first, second = read_rows(table, name="train")
    assert (first.answer, second.answer) == ("7", None)
    assert first.fields == {"data_source": "x", "reward_model": {"style": "rule"}, "extra_info": {"i": 0}}


@pytest.mark.usefixtures("ppoctl_data")
@pytest.mark.parametrize(
    ("split", "count"), [pytest.param("train", 7473, marks=pytest.mark.ci("test-1319")), ("test", 1319)]
)
def test_verl_gsm8k_equals_the_original_rows_and_verl_rendering(
    make_tokenizer: Callable[..., Any], split: str, count: int
) -> None:
    folder = Path(os.environ["PPOCTL_DATA"])
    theirs = VerlRows(format="verl", path=str(folder / f"verl-parquet/gsm8k/{split}.parquet"))
    ours = read_rows(Gsm8kRows(format="gsm8k", path=str(folder / f"gsm8k/{split}.jsonl")), name="train")
    rows = read_rows(theirs, name="train")
    assert len(rows) == len(ours) == count
    asks = ' Let\'s think step by step and output the final answer after "####".'
    for row, own in zip(rows, ours, strict=True):
        assert not isinstance(row.question, str)
        assert [(m.role, m.content) for m in row.question] == [("user", f"{own.question}{asks}")]
        assert own.answer is not None
        assert row.answer == re.sub(",", "", own.answer.rpartition("#### ")[2])
        assert row.fields["extra_info"]["answer"] == own.answer  # type: ignore[call-overload, index]
        assert row.fields["data_source"] == "openai/gsm8k"
    tokenizer = make_tokenizer()
    rendered = PromptTemplate(tokenizer).render(rows, theirs, name="train")
    for batch in parquet.ParquetFile(str(theirs.path)).iter_batches(columns=["prompt"]):
        for chat in batch.column("prompt").to_pylist():  # the same as in verl's RLHFDataset
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            prompt = rendered.pop(0)
            assert (prompt.text, list(prompt.token_ids)) == (text, ids)
    assert not rendered


KINDS = {
    "text": st.one_of(st.none(), st.sampled_from(["", "x", "y"])),
    "number": st.one_of(st.none(), st.integers(0, 2)),
    "list": st.one_of(st.none(), st.lists(st.one_of(st.none(), st.integers(0, 1)), max_size=3)),
    "table": st.one_of(st.none(), st.fixed_dictionaries({"a": st.one_of(st.none(), st.sampled_from("xy"))})),
    "chat": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from("us"), "content": st.sampled_from("xy")}), max_size=2
    ),
}
SCHEMA = pyarrow.schema(
    {
        "text": pyarrow.string(),
        "number": pyarrow.int64(),
        "list": pyarrow.list_(pyarrow.int64()),
        "table": pyarrow.struct({"a": pyarrow.string()}),
        "chat": pyarrow.list_(pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})),
    }.items()
)


ALIKE = {"text": "x", "number": 1, "table": None, "chat": []}


@example(rows=[{**ALIKE, "list": None}, {**ALIKE, "list": []}, {**ALIKE, "list": [None]}], most=None)
@given(rows=st.lists(st.fixed_dictionaries(KINDS), max_size=12), most=st.one_of(st.none(), st.integers(1, 12)))
def test_row_blocks_keep_all_rows_and_store_duplicates_once(rows: list[dict[str, Any]], most: int | None) -> None:
    table = pyarrow.Table.from_pylist(rows, schema=SCHEMA)
    blocks = list(blocks_of(iter(table.to_batches(max_chunksize=5)), str, most))
    assert [block.rows[code][1] for block in blocks for code in block.order] == rows[:most]
    for block in blocks:
        texts = [json.dumps(raw) for _, raw in block.rows]
        assert len(set(texts)) == len(texts)
    starts = [sum(len(block.order) for block in blocks[:number]) for number in range(len(blocks))]
    for start, block in zip(starts, blocks, strict=True):
        for number, (place, _) in enumerate(block.rows):
            assert int(place) == start + block.order.index(number) + 1


def test_repeated_rows_are_read_like_distinct_rows(tmp_path: Path) -> None:
    lines = [{"q": f"number {n % 7}", "a": str(n % 5), "f": n % 3} for n in range(200)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "x.parquet")
    jsonl, other = (columns(str(tmp_path / f"x.{kind}"), fields=("f",)) for kind in ("jsonl", "parquet"))
    sets = [read_set(table, name="train") for table in (jsonl, other)]
    assert sets[0].digest == sets[1].digest
    plain = read_rows(jsonl, name="train")
    for dataset in sets:
        got = [dataset.row(position) for position in range(len(dataset))]
        assert [(r.id, r.question, r.answer, r.fields) for r in got] == [
            (r.id, r.question, r.answer, r.fields) for r in plain
        ]
        seen: set[tuple[object, str | None]] = set()
        for row, repeated in zip(plain, dataset.repeats, strict=True):
            assert bool(repeated) == ((row.question, row.answer) in seen)
            seen.add((row.question, row.answer))
        assert [row.question for row in dataset.first_rows()] == [f"number {n}" for n in range(7)]
        different = list(dataset.different_rows())
        assert len(different) == 7 * 5 * 3
        assert sum(times for _, times in different) == 200
        assert different[0] == (dataset.row(0), 2)
