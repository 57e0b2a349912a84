"""A run on fakes computes what it computed when somebody last looked: see `golden` for how to judge a difference."""

import json
from numbers import Real
from typing import Any

import pytest
import torch

from tolerance import GOLDEN
from wiring import golden


def test_golden_run_equals_its_recorded_file() -> None:
    found = dict(golden.entries(golden.golden_run()))
    told = dict(golden.entries(json.loads(golden.FILE.read_text(encoding="ascii"))))
    different = [name for name in told if name not in found or not same(found[name], told[name])]
    different += [name for name in found if name not in told]
    shown = "\n".join(
        f"{name}: {found.get(name, '-')}, written down as {told.get(name, '-')}" for name in different[:9]
    )
    assert not different, (
        f"{len(different)} of {len(told)} entries differ, first:\n{shown}\n"
        "tests/wiring/golden.py says how to judge it, and writes the file anew"
    )


def same(found: Any, told: Any) -> bool:
    if is_number(found) and is_number(told):
        found, told = [found], [told]
    if not isinstance(told, list) or not isinstance(found, list) or len(found) != len(told):
        return bool(found == told)
    if not any(isinstance(number, float) for number in [*found, *told]):
        return bool(found == told)  # tokens, seeds, counts, masks
    try:
        GOLDEN.check(torch.tensor(found, dtype=torch.float64), torch.tensor(told, dtype=torch.float64))
    except AssertionError:
        return False
    return True


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@pytest.mark.parametrize("value", [1.0001, 0, "b", [0.5], [0.5, 0.2501], {"a": 1}, [2**61 + 1]])
def test_golden_comparison_detects_other_values(value: Any) -> None:
    assert not any(same(value, told) for told in (1.0, "a", [0.5, 0.25], [2**61]))
    assert same([0.5, 0.25000001], [0.5, 0.25])


def test_golden_file_has_the_format_of_its_command() -> None:
    text = golden.FILE.read_text(encoding="ascii")
    assert golden.written(json.loads(text)) + "\n" == text
