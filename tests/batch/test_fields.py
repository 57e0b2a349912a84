"""The table of record fields, against the record classes and against records that earlier versions wrote."""

from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_args

import pytest

from for_each import for_each
from ppoctl.core.batch.fields import FIELDS, RecordField
from ppoctl.core.batch.records import RECORDS
from ppoctl.store import record_file
from ppoctl.store.run_paths import RunPaths
from store.fixture_runs import bring

FAMILY = {"bool": "Bool", "uint8": "UInt8", "int32": "Int", "int64": "Int", "float32": "Float"}
MERGED = {("advantages", "returns")}
"""Fields that the table may call optional although their class still requires them."""


def saved(kind: str) -> dict[str, "Field[Any]"]:
    """Return the fields of a record class that are written."""
    cls = RECORDS[kind]
    return {field.name: field for field in fields(cls) if field.name not in cls.unsaved}


def annotation(field: "Field[Any]") -> Any:
    """Return the jaxtyping annotation of a tensor field; None for other fields."""
    options = get_args(field.type) or (field.type,)
    return next((option for option in options if hasattr(option, "dim_str")), None)


def test_table_has_every_kind_of_record() -> None:
    assert FIELDS.keys() == RECORDS.keys()


@pytest.mark.parametrize("kind", RECORDS)
def test_table_has_the_fields_of_the_class(kind: str) -> None:
    assert {field.name for field in FIELDS[kind]} == saved(kind).keys()


@for_each((f"{kind}.{field.name}", kind, field) for kind in FIELDS for field in FIELDS[kind])
def test_table_agrees_with_the_class(name: str, kind: str, field: RecordField) -> None:
    assert name.startswith(kind)
    declared = saved(kind)[field.name]
    if (kind, field.name) not in MERGED:
        assert field.is_optional == (declared.default is not MISSING)
    tensor = annotation(declared)
    assert (tensor is None) == (field.dtype in ("text", "json"))
    if tensor is not None:
        assert tensor.dim_str.split() == field.axes.split()
        assert tensor.__name__.startswith(FAMILY[field.dtype])


def test_records_of_a_fixture_run_have_the_types_of_the_table(tmp_path: Path) -> None:
    paths = RunPaths(bring("finished", tmp_path))
    kinds = set()
    for folder in paths.step(3).iterdir():
        record = record_file.read(paths, 3, folder.name.partition("-")[2])
        assert record is not None
        kinds.add(record.kind)
        types = {field.name: field.dtype for field in FIELDS[record.kind]}
        values = {name: value for name, value in record.fields.items() if name not in RECORDS[record.kind].dropped}
        for name, value in values.items():
            assert types[name] == (str(value.dtype) if hasattr(value, "dtype") else types[name]), name
            assert hasattr(value, "dtype") == (types[name] not in ("text", "json")), name
    assert kinds >= {"rollouts", "rewards", "values", "logprobs", "advantages", "update"}
