"""The part of `make test` with the engines collects few folders, so tests that start engines must be in one of them.
All tests check tensor shapes."""

from pathlib import Path

import jaxtyping
import pytest
import torch

from conventions.conftest import ROOT
from ppoctl.algorithms.formulas.masking import masked_sum

MARK = ".".join(["mark", "engines"])  # split, so that this file does not match itself


def test_engine_tests_are_in_folders_that_make_collects() -> None:
    files = [file.relative_to(ROOT / "tests") for file in (ROOT / "tests").rglob("*.py") if marks_engines(file)]
    # Those of `slurm` are all slow.
    assert {file.parts[0] for file in files} == {"engines", "slurm", "end_to_end"}
    commands = (ROOT / "Makefile").read_text("utf-8")
    assert '-m "engines and not ($(LONG))" tests/engines tests/end_to_end $(ARGS)' in commands


def marks_engines(file: Path) -> bool:
    return MARK in file.read_text("utf-8")


def test_shape_annotations_are_checked_during_tests() -> None:
    # The mask's shape differs from the values' shape; torch would broadcast it.
    with pytest.raises(jaxtyping.TypeCheckError):
        masked_sum(torch.ones(2, 3), torch.ones(3, dtype=torch.bool))
