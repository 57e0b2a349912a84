"""A run on fakes computes the recorded results; see `golden` for how to judge a difference."""

import json
from numbers import Real
from typing import Any

import pytest
import torch

from tolerance import GOLDEN
from wiring import golden


def test_golden_run_equals_its_recorded_file() -> None:
    found = dict(golden.entries(golden.golden_run()))
    recorded = dict(golden.entries(json.loads(golden.FILE.read_text(encoding="ascii"))))
    different = [name for name in recorded if name not in found or not same(found[name], recorded[name])]
    different += [name for name in found if name not in recorded]
    shown = "\n".join(
        f"{name}: {found.get(name, '-')}, written down as {recorded.get(name, '-')}" for name in different[:9]
    )
    assert not different, (
        f"{len(different)} of {len(recorded)} entries differ, first:\n{shown}\n"
        "tests/wiring/golden.py says how to judge it, and writes the file anew"
    )


def same(found: Any, recorded: Any) -> bool:
    if is_number(found) and is_number(recorded):
        found, recorded = [found], [recorded]
    if not isinstance(recorded, list) or not isinstance(found, list) or len(found) != len(recorded):
        return bool(found == recorded)
    if not any(isinstance(number, float) for number in [*found, *recorded]):
        return bool(found == recorded)  # tokens, seeds, counts, masks
    try:
        GOLDEN.check(torch.tensor(found, dtype=torch.float64), torch.tensor(recorded, dtype=torch.float64))
    except AssertionError:
        return False
    return True


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@pytest.mark.parametrize("value", [1.0001, 0, "b", [0.5], [0.5, 0.2501], {"a": 1}, [2**61 + 1]])
def test_golden_comparison_detects_other_values(value: Any) -> None:
    assert not any(same(value, recorded) for recorded in (1.0, "a", [0.5, 0.25], [2**61]))
    assert same([0.5, 0.25000001], [0.5, 0.25])


def test_golden_file_has_the_format_of_its_command() -> None:
    text = golden.FILE.read_text(encoding="ascii")
    assert golden.written(json.loads(text)) + "\n" == text
