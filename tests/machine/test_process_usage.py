"""Memory peaks of a process between two readings."""

from pathlib import Path

import pytest
import torch

from ppoctl.core.machine.device import this_device
from ppoctl.core.machine.process_usage import MeasuredProcess

BIG, SMALL = 300 * 2**20, 100 * 2**20


def peak_bytes(allocate: int = 0) -> int:
    """Return the peak since the last reading, and allocate before it, for a moment."""
    if allocate:
        torch.ones(allocate, dtype=torch.uint8, device=this_device())
    return MeasuredProcess().take_usage().peak_bytes


def test_peak_is_in_the_reading_after_it_and_not_in_the_next() -> None:
    peak_bytes()
    before = peak_bytes()
    peak = peak_bytes(BIG)
    assert BIG - SMALL < peak - before < BIG + SMALL
    assert peak_bytes() < peak - BIG + SMALL


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch resets the peak of a GPU")
def test_peak_without_the_right_to_reset_it_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError

    peak_bytes()
    monkeypatch.setattr(Path, "write_text", denied)
    peak = peak_bytes(BIG)
    assert peak_bytes() >= peak > BIG
    monkeypatch.undo()
    peak_bytes()
    assert peak_bytes() < peak - BIG + SMALL
