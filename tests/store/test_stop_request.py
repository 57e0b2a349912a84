"""A request to stop reaches the attempt that it is for, and no other."""

from typing import get_args

import pytest

from ppoctl.core.errors import StorageError
from ppoctl.store.attempt import claim
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stop_request import After, request_stop, stop_requested


def test_no_request_is_pending_by_default(paths: RunPaths) -> None:
    assert stop_requested(paths, 1) is None


@pytest.mark.parametrize("after", get_args(After))
def test_stop_request_is_read_back(paths: RunPaths, after: After) -> None:
    request_stop(paths, after)
    assert stop_requested(paths, 1) == after


def test_later_stop_request_replaces_an_earlier_one(paths: RunPaths) -> None:
    request_stop(paths, "step")
    request_stop(paths, "now")
    assert stop_requested(paths, 1) == "now"


def test_stop_request_does_not_apply_to_the_next_attempt(paths: RunPaths) -> None:
    request_stop(paths, "now")
    claim(paths)
    assert stop_requested(paths, 2) is None
    request_stop(paths, "stage")
    assert stop_requested(paths, 2) == "stage"
    assert stop_requested(paths, 1) is None


def test_damaged_stop_request_is_ignored(paths: RunPaths) -> None:
    request_stop(paths, "now")
    whole = paths.stop_request.read_bytes()
    for damaged in (whole.replace(b"now", b"step"), whole[:-3], b"\xff", b""):
        paths.stop_request.write_bytes(damaged)
        assert stop_requested(paths, 1) is None


def test_unwritable_stop_request_is_named(paths: RunPaths) -> None:
    paths.stop_request.mkdir()
    with pytest.raises(StorageError, match=r"stop\.json"):
        request_stop(paths, "now")
