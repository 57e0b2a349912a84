"""A request to stop reaches the attempt it is for, and no other."""

from typing import get_args

import pytest

from ppoctl.errors import StorageError
from ppoctl.store.attempt import claim
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stop_request import After, request_stop, stop_requested


def test_no_request_is_pending_by_default(layout: RunPaths) -> None:
    assert stop_requested(layout, 1) is None


@pytest.mark.parametrize("after", get_args(After))
def test_stop_request_is_read_back(layout: RunPaths, after: After) -> None:
    request_stop(layout, after)
    assert stop_requested(layout, 1) == after


def test_later_stop_request_replaces_an_earlier_one(layout: RunPaths) -> None:
    request_stop(layout, "step")
    request_stop(layout, "now")
    assert stop_requested(layout, 1) == "now"


def test_stop_request_does_not_apply_to_the_next_attempt(layout: RunPaths) -> None:
    request_stop(layout, "now")
    claim(layout)
    assert stop_requested(layout, 2) is None
    request_stop(layout, "stage")
    assert stop_requested(layout, 2) == "stage"
    assert stop_requested(layout, 1) is None


def test_damaged_stop_request_is_ignored(layout: RunPaths) -> None:
    request_stop(layout, "now")
    whole = layout.stop_request.read_bytes()
    for damaged in (whole.replace(b"now", b"step"), whole[:-3], b"\xff", b""):
        layout.stop_request.write_bytes(damaged)
        assert stop_requested(layout, 1) is None


def test_unwritable_stop_request_is_named(layout: RunPaths) -> None:
    layout.stop_request.mkdir()
    with pytest.raises(StorageError, match=r"stop\.json"):
        request_stop(layout, "now")
