"""Memory that another process reads: filled alternately, copied by its reader, released with its owner."""

import builtins
import errno
import multiprocessing
import os
import signal
import socket
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from ppoctl.core.errors import EnvironmentProblemError, ProcessLostError, SenderLostError
from ppoctl.engines.weights.sharing import OpenFile, RetainedBuffers, Shared, SharedBuffers

CPU = torch.device("cpu")


def named(value: float, *, rows: int = 3) -> list[tuple[str, Tensor]]:
    return [
        ("a", torch.full((rows, 4), value)),
        ("b", torch.tensor([value], dtype=torch.bfloat16)),
        ("c", torch.full((4, rows), value).t()),  # not contiguous
        ("empty", torch.empty(0, 4)),
    ]


def assert_holds(shared: Shared, tensors: list[tuple[str, Tensor]]) -> None:
    found = shared.tensors()
    assert [name for name, _ in found] == [name for name, _ in tensors]
    for (_, one), (_, other) in zip(found, tensors, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_shared_buffers_stay_readable_until_two_more_puts() -> None:
    staging = SharedBuffers(CPU)
    first, second = staging.put(named(1.0)), staging.put(named(2.0))
    assert_holds(first, named(1.0))
    assert_holds(second, named(2.0))
    third = staging.put(named(3.0))
    assert_holds(second, named(2.0))
    assert_holds(third, named(3.0))
    assert third.handle == first.handle  # the same memory


def test_shared_memory_is_near_only_on_its_machine() -> None:
    owner, pipe = _start(_own)
    shared: Shared = pipe.recv()
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    assert shared.is_near()
    assert not replace(shared, machine="another").is_near()


def test_reader_of_shared_memory_gets_copies() -> None:
    staging = SharedBuffers(CPU)
    [(_, kept), *_] = staging.put(named(1.0)).tensors()
    staging.put(named(2.0)), staging.put(named(3.0))
    assert kept.eq(1).all()


def test_shared_buffers_grow_with_content() -> None:
    staging = SharedBuffers(CPU)
    for value, rows in ((1.0, 3), (2.0, 3), (3.0, 5000), (4.0, 2), (5.0, 7)):
        assert_holds(staging.put(named(value, rows=rows)), named(value, rows=rows))


def test_retained_buffers_are_reused_by_next_transfer() -> None:
    kept = RetainedBuffers()
    values = [(1.0, 3), (2.0, 5000), (3.0, 2)]
    first = [kept.put(named(value, rows=rows)) for value, rows in values]
    assert all(shared.lasts for shared in first)
    for shared, (value, rows) in zip(first, values, strict=True):
        assert_holds(shared, named(value, rows=rows))
    kept.begin()
    second = [kept.put(named(value + 3, rows=rows)) for value, rows in values]
    assert second == first  # in place, so the handle now refers to the present content
    for shared, (value, rows) in zip(first, values, strict=True):
        assert_holds(shared, named(value + 3, rows=rows))


def test_retained_buffers_grow_with_content() -> None:
    """Buckets of any size are placed without overlap, also in memory of the previous transfer with other sizes."""
    kept = RetainedBuffers(mapped_bytes=2**16)
    for rows in ([3, 5000, 2], [5000, 2, 4000, 4000, 7], [1], [3, 3, 9000]):
        kept.begin()
        put = [kept.put(named(float(number), rows=count)) for number, count in enumerate(rows)]
        for number, (shared, count) in enumerate(zip(put, rows, strict=True)):
            assert_holds(shared, named(float(number), rows=count))


def test_reader_in_other_process_gets_error_after_owner_dies() -> None:
    owner, pipe = _start(_own)
    try:
        shared: Shared = pipe.recv()
        assert_holds(shared, named(7.0))
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.join()
    with pytest.raises(
        ProcessLostError, match=f"weights were lost because process {owner.pid}, which sent them, has ended"
    ):
        shared.tensors()


def test_reused_file_descriptor_raises_sender_lost() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(SenderLostError):
        OpenFile(os.getpid(), ours.fileno()).copied(1)


def test_too_many_open_files_is_not_sender_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(EnvironmentProblemError, match="too many open files") as raised:
        OpenFile(1, 0).copied(8)
    assert not isinstance(raised.value, SenderLostError)


def test_released_shared_memory_is_lost_and_closes_files() -> None:
    before = _open_files()
    staging = SharedBuffers(CPU)
    shared = staging.put(named(1.0))
    del staging
    assert _open_files() == before
    with pytest.raises(ProcessLostError):
        shared.tensors()


def test_unreadable_process_memory_raises_explained_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, in a container that isolates its processes."""

    def refuse(*arguments: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(
        EnvironmentProblemError, match="cannot read memory of process 1, which holds the new weights: not yours"
    ):
        OpenFile(1, 0).copied(8)


def _open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names


def _own(pipe: Connection) -> None:
    staging = SharedBuffers(CPU)
    pipe.send(staging.put(named(7.0)))
    signal.pause()


def _start(target: Any) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours
