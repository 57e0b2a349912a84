"""Weights straight from a trainer's rank to all engines: one process group, for one transfer.

    driver: meeting  <-- a rank of the trainer (0)  -- broadcast -->  processes of engines (1, 2, ...)

The ends belong to other worlds already (Megatron's, vLLM's), so the group is made over a store of its own, and not by
torch's global functions. It is made for each transfer and left afterwards: an engine that was started again needs no
care, and NCCL's buffers take no memory while engines draw. gloo on a CPU, NCCL on a GPU.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported

from ppoctl.batch.bucket import TensorSpec, packed, packed_bytes, views
from ppoctl.engines.loopback import environment, gloo_on_loopback, is_loopback, open_store
from ppoctl.errors import ProcessLostError
from ppoctl.ports import Link

Made = TypeVar("Made")

SENDER = 0
"""Its rank."""
CONNECT_DEADLINE_S = 20.0
"""To connect to a meeting, which is open before anyone is asked to come; and to each other, once all have come."""


@contextmanager
def meeting(host: str, timeout_s: float) -> Iterator[str]:
    """`host:port` where the ends of a link find each other. Those that still wait there when it closes get an
    error at once."""
    store = open_store(host, 0, timedelta(seconds=timeout_s))
    try:
        yield f"{host}:{store.port}"
    finally:
        del store  # which ends it, also while an error is on its way


class Sending:
    """The sender's end. Where the link breaks, nothing is sent any more, and that is all: ranks that only take part
    in gathering must not be left alone. The engines say what went wrong."""

    def __init__(self, link: Link, device: torch.device) -> None:
        self._device = device
        self._end: _End | None = None
        with suppress(ProcessLostError):
            self._end = _End(link, SENDER, device)

    def send(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Begin to send a copy of these; the ones before have arrived when this returns."""
        if self._end is None:
            return
        _, memory = packed(tensors, self._device)
        try:
            self._end.arrive()
            self._end.begin(memory)
        except ProcessLostError:
            self._end = None

    def finish(self) -> bool:
        """Wait until everything has arrived everywhere, and leave; whether it has."""
        end, self._end = self._end, None
        try:
            if end is not None:
                end.leave()
        except ProcessLostError:
            return False
        return end is not None


def received(
    link: Link, rank: int, plan: Iterable[Sequence[TensorSpec]], device: torch.device
) -> Iterator[list[tuple[str, Tensor]]]:
    """Bucket by bucket what is sent, as planned; the next one is on its way while one is read. Raises
    ProcessLostError where the link breaks."""
    end = _End(link, rank, device)
    ahead: list[tuple[str, Tensor]] | None = None
    for specs in plan:
        memory = torch.empty(packed_bytes(specs), dtype=torch.uint8, device=device)
        end.arrive()
        end.begin(memory)
        if ahead is not None:
            yield ahead
        ahead = views(memory, specs)
    end.leave()
    if ahead is not None:
        yield ahead


class _End:
    """One process's place in the group; one piece of memory at a time is on its way."""

    def __init__(self, link: Link, rank: int, device: torch.device) -> None:
        """Returns when all are there. Raises ProcessLostError."""
        self._link = link
        self._work: Any = None
        try:
            self._store = _soon(lambda: _store(link))
            self._wait_for_all("came")
            self._group = _soon(lambda: _group(link, self._store, rank, device))
        except RuntimeError as error:
            raise _broken(error) from error

    def begin(self, memory: Tensor) -> None:
        try:
            self._memory = memory
            self._work = self._group.broadcast(memory, SENDER, timedelta(seconds=self._link.timeout_s))
        except RuntimeError as error:
            raise _broken(error) from error

    def arrive(self) -> None:
        """Wait for what is on its way."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _broken(error) from error
        self._work = None

    def leave(self) -> None:
        """Once everything has arrived, everywhere: who left before would cut off those it has yet to send to."""
        self.arrive()
        try:
            self._wait_for_all("have it all")
        except RuntimeError as error:
            raise _broken(error) from error

    def _wait_for_all(self, what: str) -> None:
        """Say it, and wait until all do."""
        if self._store.add(what, 1) == self._link.size:
            self._store.set(f"all {what}", "")
        self._store.wait([f"all {what}"])


def _soon(make: Callable[[], Made]) -> Made:
    """What it makes. gloo waits for ever for a process that dies while they connect: that thread is left behind."""
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except RuntimeError as error:
            made.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return made.result(CONNECT_DEADLINE_S)
    except TimeoutError as error:
        raise RuntimeError(f"could not connect within {CONNECT_DEADLINE_S:g} s") from error


def _store(link: Link) -> TCPStore:
    host, port = link.address.rsplit(":", 1)
    soon = timedelta(seconds=CONNECT_DEADLINE_S)
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=soon)
    store.set_timeout(timedelta(seconds=link.timeout_s))
    return store


def _group(link: Link, store: TCPStore, rank: int, device: torch.device) -> Any:
    timeout = timedelta(seconds=link.timeout_s)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # not in torch for CPUs

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        # A link that breaks is an error of whoever waits; otherwise NCCL's watchdog ends the whole process.
        with environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            return ProcessGroupNCCL(store, rank, link.size, options)
    from torch.distributed import ProcessGroupGloo

    with gloo_on_loopback() if is_loopback(link.address) else nullcontext():
        return ProcessGroupGloo(store, rank, link.size, timeout)


def _broken(error: Exception) -> ProcessLostError:
    return ProcessLostError(f"the link over which weights are sent broke: {str(error).splitlines()[0]}")
