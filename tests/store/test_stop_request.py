"""A request to stop reaches the attempt it is for, and no other."""

from typing import get_args

import pytest

from ppoctl.errors import StorageError
from ppoctl.store.attempt import claim
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stop_request import After, request_stop, stop_requested


def test_nothing_is_asked_of_a_run_that_nobody_stops(layout: RunPaths) -> None:
    assert stop_requested(layout, 1) is None


@pytest.mark.parametrize("after", get_args(After))
def test_a_request_is_what_was_asked(layout: RunPaths, after: After) -> None:
    request_stop(layout, after)
    assert stop_requested(layout, 1) == after


def test_a_later_request_replaces_an_earlier_one(layout: RunPaths) -> None:
    request_stop(layout, "step")
    request_stop(layout, "now")
    assert stop_requested(layout, 1) == "now"


def test_the_attempt_that_comes_next_is_not_asked(layout: RunPaths) -> None:
    request_stop(layout, "now")
    claim(layout)
    assert stop_requested(layout, 2) is None
    request_stop(layout, "stage")
    assert stop_requested(layout, 2) == "stage"
    assert stop_requested(layout, 1) is None


def test_a_request_that_is_not_as_it_was_written_asks_nothing(layout: RunPaths) -> None:
    request_stop(layout, "now")
    whole = layout.stop_request.read_bytes()
    for damaged in (whole.replace(b"now", b"step"), whole[:-3], b"\xff", b""):
        layout.stop_request.write_bytes(damaged)
        assert stop_requested(layout, 1) is None


def test_a_run_directory_that_cannot_be_written_is_named(layout: RunPaths) -> None:
    layout.stop_request.mkdir()
    with pytest.raises(StorageError, match=r"stop\.json"):
        request_stop(layout, "now")
