"""Every column type that pandas, polars and pyarrow write to parquet: read with its value, or refused by its name.

polars writes large strings, string views, categories (dictionary of uint32 to large strings) and large lists.
"""

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from ppoctl.core.errors import DataError
from ppoctl.data.index import scan_set
from ppoctl.data.row_tables import ColumnRows, VerlRows
from ppoctl.data.rows import read_rows

DAY, HOUR = dt.date(2025, 1, 2), dt.time(3, 4)
MOMENT = dt.datetime(2025, 1, 2, 3, 4, tzinfo=dt.UTC)
CATEGORY = pyarrow.dictionary(pyarrow.uint32(), pyarrow.large_string())
MESSAGE = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])


def number(type: pyarrow.DataType) -> tuple[pyarrow.Array, Any, Any]:
    return pyarrow.array([6], type), "6", 6


def of(type: pyarrow.DataType, value: Any, field: Any, answer: Any = None) -> tuple[pyarrow.Array, Any, Any]:
    return pyarrow.array([value], type), answer, field


MISSING = object()
"""The value is not JSON: the fields lack it, and a note says so."""
TYPES: dict[str, tuple[pyarrow.Array, str | None, Any]] = {
    **{
        str(type): of(type, "6", "6", "6")
        for type in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())
    },
    "category of pandas": (pyarrow.array(pandas.Series(["6"], dtype="category")), "6", "6"),
    "category of polars": (pyarrow.array(["6"]).dictionary_encode().cast(CATEGORY), "6", "6"),
    "string of pandas": (pyarrow.array(pandas.Series(["6"], dtype="string")), "6", "6"),
    **{
        f"{sign}int{bits}": number(getattr(pyarrow, f"{sign}int{bits}")())
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    "uint64 above int64": of(pyarrow.uint64(), 2**64 - 1, 2**64 - 1, str(2**64 - 1)),
    "float": of(pyarrow.float32(), 6.0, 6.0),
    "double": of(pyarrow.float64(), 6.0, 6.0),
    "NaN": of(pyarrow.float64(), float("nan"), MISSING),
    "bool": of(pyarrow.bool_(), True, True),
    "decimal128": of(pyarrow.decimal128(9, 2), Decimal("6.50"), "6.50"),
    "decimal128 of a whole number": of(pyarrow.decimal128(10, 0), Decimal(42), "42", "42"),
    "decimal256": of(pyarrow.decimal256(40, 1), Decimal("6.5"), "6.5"),
    "date32": of(pyarrow.date32(), DAY, "2025-01-02"),
    "date64": of(pyarrow.date64(), DAY, "2025-01-02"),
    **{
        f"timestamp {unit}": of(pyarrow.timestamp(unit), MOMENT.replace(tzinfo=None), "2025-01-02T03:04:00")
        for unit in ("s", "ms", "us", "ns")
    },
    "timestamp with a zone": of(pyarrow.timestamp("us", "UTC"), MOMENT, "2025-01-02T03:04:00+00:00"),
    "timestamp of pandas": of(pyarrow.timestamp("ns", "Asia/Tokyo"), MOMENT, "2025-01-02T12:04:00+09:00"),
    "time32": of(pyarrow.time32("ms"), HOUR, "03:04:00"),
    "time64": of(pyarrow.time64("ns"), HOUR, "03:04:00"),
    "duration": of(pyarrow.duration("us"), dt.timedelta(1), MISSING),
    **{
        str(type): of(type, b"6", MISSING)
        for type in (pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view(), pyarrow.binary(1))
    },
    **{
        str(type(pyarrow.int64())): of(type(pyarrow.int64()), [1, 2], [1, 2])
        for type in (pyarrow.list_, pyarrow.large_list, pyarrow.list_view, pyarrow.large_list_view)
    },
    "fixed_size_list": of(pyarrow.list_(pyarrow.int64(), 2), [1, 2], [1, 2]),
    "list of categories": of(pyarrow.list_(pyarrow.dictionary(pyarrow.int32(), pyarrow.string())), ["a"], ["a"]),
    "list of views": of(pyarrow.large_list(pyarrow.string_view()), ["a"], ["a"]),
    "struct": of(pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.binary())]), {"a": 1, "b": b"x"}, {"a": 1}),
    "map": of(pyarrow.map_(pyarrow.string(), pyarrow.int64()), [("a", 1)], [["a", 1]]),
    "null": (pyarrow.nulls(1), None, None),
    "uuid": of(pyarrow.uuid(), b"\0" * 16, "00000000-0000-0000-0000-000000000000"),
    "json": (pyarrow.array(["[1]"], pyarrow.json_()), "[1]", "[1]"),
    "messages": of(
        pyarrow.large_list(MESSAGE), [{"role": "user", "content": "x"}], [{"role": "user", "content": "x"}]
    ),
}


def parquet(folder: Path, column: pyarrow.Array, prompt: str = "one") -> str:
    file = folder / "x.parquet"
    names = {"prompt": pyarrow.array([prompt] * len(column)), "a": pyarrow.array(["1"] * len(column)), "x": column}
    pyarrow.parquet.write_table(pyarrow.table(names), file)
    return str(file)


@pytest.mark.parametrize("name", TYPES)
def test_column_of_every_type_is_read_or_refused_by_its_name(tmp_path: Path, name: str) -> None:
    column, answer, field = TYPES[name]
    path = parquet(tmp_path, column)
    rows = scan_set(VerlRows(format="verl", path=path), name="train")  # all columns
    fields = rows.row(0).fields
    assert fields.get("x", MISSING) == field
    assert dict(rows.left_out).keys() == ({"x"} if field is MISSING else {"x.b"} if name == "struct" else set())
    named = ColumnRows(format="columns", path=path, prompt="prompt", answer="a", fields=("x",))
    if rows.left_out:
        with pytest.raises(
            DataError, match=r"row 1: `x(\.b)?` is .*, but fields for the reward must be JSON"
        ) as caught:
            read_rows(named, name="train")
        assert caught.value.hint == "remove `x` from `data.train.fields`, or store it as text"
    else:
        assert json.loads(json.dumps(read_rows(named, name="train")[0].fields)) == {"x": field}
    truth = ColumnRows(format="columns", path=path, prompt="prompt", answer="x")
    if answer is not None:
        assert read_rows(truth, name="train")[0].answer == answer
        return
    with pytest.raises(DataError, match=r"row 1: `x` is .*, but an answer must be text or a whole number") as caught:
        read_rows(truth, name="train")
    says = (
        "`.astype(int)`"
        if name in ("float", "double")
        else "remove the row"
        if name == "null"
        else "store it as text"
    )
    assert says in str(caught.value.hint)


LOST: dict[str, tuple[pyarrow.Table, str]] = {
    "two columns of one name": (
        pyarrow.table([["one"], ["1"], ["9"]], names=["prompt", "a", "a"]),
        "has two columns with the name `a`",
    ),
    "two nested columns of one name": (
        pyarrow.table(
            {
                "prompt": ["one"],
                "x": pyarrow.array([[{}]], pyarrow.list_(pyarrow.struct([("a", pyarrow.int64())] * 2))),
            }
        ),
        "has two columns with the name `x.a`",
    ),
    "period of pandas": (
        pyarrow.table({"prompt": ["one"], "x": pandas.Series(pandas.period_range("2025-01", periods=1, freq="M"))}),
        r"column `x` has the type `.*`: a period of pandas is stored as a number",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_column_whose_values_would_be_lost_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    table, says = LOST[name]
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError, match=says):
        scan_set(VerlRows(format="verl", path=str(tmp_path / "x.parquet")), name="train")


@pytest.mark.parametrize(
    "type", [pyarrow.string_view(), CATEGORY, pyarrow.dictionary(pyarrow.int8(), pyarrow.string())]
)
def test_equal_texts_of_any_type_are_one_row_and_null_is_none(tmp_path: Path, type: pyarrow.DataType) -> None:
    texts = ["a", None, "b", "a", None]
    column = pyarrow.array(texts)
    column = column.dictionary_encode().cast(type) if pyarrow.types.is_dictionary(type) else column.cast(type)
    rows = scan_set(VerlRows(format="verl", path=parquet(tmp_path, column)), name="train")
    assert [rows.row(position).fields["x"] for position in range(5)] == texts
    assert len(set(rows.contents)) == 3


def test_hint_about_truth_names_no_key_that_the_format_refuses(tmp_path: Path) -> None:
    hints = []
    for truth in ([1], {"target": [1]}, 6.0, 6.5, True):
        frame = pandas.DataFrame({"prompt": ["one"], "reward_model": [{"ground_truth": truth}]})
        frame.to_parquet(tmp_path / "x.parquet")
        with pytest.raises(DataError, match=r"row 1: `reward_model.ground_truth` is ") as caught:
            read_rows(VerlRows(format="verl", path=str(tmp_path / "x.parquet")), name="train")
        hints.append(str(caught.value.hint))
    assert not any("data.train" in hint or "`answer`" in hint for hint in hints)
    assert "`.astype(int)`" in hints[2]


def test_type_that_pyarrow_cannot_read_names_its_column(tmp_path: Path) -> None:
    column = pyarrow.array([[1, 2], None], pyarrow.list_(pyarrow.int64(), 2))
    with pytest.raises(DataError, match=r"column `x` has the type `fixed_size_list<element: int64>\[2\]`: Expected"):
        read_rows(VerlRows(format="verl", path=parquet(tmp_path, column)), name="train")


JSONL: dict[str, tuple[bytes, Any]] = {
    "order mark": (b'\xef\xbb\xbf{"q": "one", "a": 1}\n', "1"),
    "CRLF and blank lines": (b'\r\n{"q": "one", "a": "1"}\r\n \r\n', "1"),
    "big integer": (b'{"q": "one", "a": 123456789012345678901234567890}', "123456789012345678901234567890"),
    "no end of line": (b'{"q": "one", "a": "1"}', "1"),
    "NaN": (b'{"q": "one", "a": NaN}', "line 1: `a` is `nan` (a float), but an answer must be text or a whole"),
    "two keys": (b'{"q": "one", "a": "1", "a": "2"}', "line 1 is not JSON: the key `a` occurs twice in one object"),
    "thousands of digits": (b'{"q": "one", "a": ' + b"1" * 5000 + b"}", "line 1 is not JSON: Exceeds the limit"),
    "UTF-16": ('{"q": "one", "a": "1"}\n'.encode("utf-16"), "line 1 is not UTF-8: the file is UTF-16"),
}


@pytest.mark.parametrize("name", JSONL)
def test_line_of_jsonl_is_read_or_refused_by_its_number(tmp_path: Path, name: str) -> None:
    (file := tmp_path / "x.jsonl").write_bytes(JSONL[name][0])
    table = ColumnRows(format="columns", path=str(file), prompt="q", answer="a")
    if not (expected := JSONL[name][1]).startswith("line"):
        assert [row.answer for row in read_rows(table, name="train")] == [expected]
        return
    with pytest.raises(DataError) as caught:
        read_rows(table, name="train")
    assert expected in caught.value.message
