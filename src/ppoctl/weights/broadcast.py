"""Weights straight from a trainer's rank to all engines: one process group, for one transfer.

    driver: meeting()          where the members find each other
    rank of the trainer (0)    BroadcastSource.send(tensors)  --gloo or NCCL-->  received(...)   engines (1, 2, ...)

The members belong to other worlds already (Megatron's, vLLM's), so the group is made over a store of its own, and not
by torch's global functions. It is made for each transfer and left afterwards: an engine that was started again needs
no care, and NCCL's buffers take no memory while engines draw. gloo on a CPU, NCCL on a GPU.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported

from ppoctl.engines.loopback import environment, gloo_on_loopback, is_loopback, open_store
from ppoctl.errors import ProcessLostError
from ppoctl.weights.bucket import NamedTensors, TensorSpec, packed, packed_bytes, views

Made = TypeVar("Made")

SENDER = 0
"""Rank of the sender in the group."""
CONNECT_DEADLINE_S = 20.0
"""Seconds in which a member must have connected to the meeting, which is open before anyone is asked to come, and
then to the others, once all have come."""


@dataclass(frozen=True)
class BroadcastGroup:
    """How a member joins the process group of one transfer."""

    address: str
    """`host:port` of the meeting."""
    size: int
    """Number of members, the sender included."""
    timeout_s: float
    """Seconds that a member waits for all others to come, and for each broadcast."""


@contextmanager
def meeting(host: str, timeout_s: float) -> Iterator[str]:
    """`host:port` where the members of a group find each other. Those that still wait there when it closes get an
    error at once."""
    store = open_store(host, 0, timedelta(seconds=timeout_s))
    try:
        yield f"{host}:{store.port}"
    finally:
        del store  # which ends it, also while an error is on its way


class BroadcastSource:
    """The sender's place in the group. When the group breaks nothing more is sent, and no error is raised: the
    engines say what went wrong, and the ranks that only take part in gathering must not be left alone meanwhile."""

    def __init__(self, group: BroadcastGroup, device: torch.device) -> None:
        self._device = device
        self._member: _Member | None = None
        with suppress(ProcessLostError):
            self._member = _Member(group, SENDER, device)

    def send(self, tensors: NamedTensors) -> None:
        """Begin to send a copy of these tensors; the ones before have arrived when this returns."""
        if self._member is None:
            return
        _, memory = packed(tensors, self._device)
        try:
            self._member.arrive()
            self._member.begin(memory)
        except ProcessLostError:
            self._member = None

    def finish(self) -> bool:
        """Wait until everything has arrived at all members, and leave. False: the group broke."""
        member, self._member = self._member, None
        try:
            if member is not None:
                member.leave()
        except ProcessLostError:
            return False
        return member is not None


def received(
    group: BroadcastGroup, rank: int, plan: Iterable[Sequence[TensorSpec]], device: torch.device
) -> Iterator[list[tuple[str, Tensor]]]:
    """The planned buckets, as they arrive at the member `rank`; the next one is on its way while one is read. Raises
    ProcessLostError when the group breaks."""
    member = _Member(group, rank, device)
    ahead: list[tuple[str, Tensor]] | None = None
    for specs in plan:
        memory = torch.empty(packed_bytes(specs), dtype=torch.uint8, device=device)
        member.arrive()
        member.begin(memory)
        if ahead is not None:
            yield ahead
        ahead = views(memory, specs)
    member.leave()
    if ahead is not None:
        yield ahead


class _Member:
    """One process in the group; one piece of memory at a time is on its way. Methods raise ProcessLostError when the
    group breaks."""

    def __init__(self, group: BroadcastGroup, rank: int, device: torch.device) -> None:
        """Returns when all members are there."""
        self._timeout = timedelta(seconds=group.timeout_s)
        self._size = group.size
        self._work: Any = None
        with _named_if_it_breaks():
            self._store = _soon(lambda: _store(group))
            self._wait_for_all("came")
            self._group = _soon(lambda: _process_group(group, self._store, rank, device))

    def begin(self, memory: Tensor) -> None:
        with _named_if_it_breaks():
            self._memory = memory
            self._work = self._group.broadcast(memory, SENDER, self._timeout)

    def arrive(self) -> None:
        """Wait until the memory that is on its way has arrived here."""
        if self._work is not None:
            with _named_if_it_breaks():
                self._work.wait()
            self._work = None

    def leave(self) -> None:
        """Wait until everything has arrived at all members: one that left before would cut off those that it has yet
        to send to."""
        self.arrive()
        with _named_if_it_breaks():
            self._wait_for_all("have it all")

    def _wait_for_all(self, what: str) -> None:
        """Say `what`, and wait until all members have said it."""
        if self._store.add(what, 1) == self._size:
            self._store.set(f"all {what}", "")
        self._store.wait([f"all {what}"])


def _soon(make: Callable[[], Made]) -> Made:
    """Result of `make`, or RuntimeError after `CONNECT_DEADLINE_S`. gloo waits for ever for a process that dies while
    they connect: that thread is left behind."""
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


def _store(group: BroadcastGroup) -> TCPStore:
    host, port = group.address.rsplit(":", 1)
    soon = timedelta(seconds=CONNECT_DEADLINE_S)
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=soon)
    store.set_timeout(timedelta(seconds=group.timeout_s))
    return store


def _process_group(group: BroadcastGroup, store: TCPStore, rank: int, device: torch.device) -> Any:
    timeout = timedelta(seconds=group.timeout_s)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # not in torch for CPUs

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        # A group that breaks is an error of whoever waits; otherwise NCCL's watchdog ends the whole process.
        with environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            return ProcessGroupNCCL(store, rank, group.size, options)
    from torch.distributed import ProcessGroupGloo

    with gloo_on_loopback() if is_loopback(group.address) else nullcontext():
        return ProcessGroupGloo(store, rank, group.size, timeout)


@contextmanager
def _named_if_it_breaks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise ProcessLostError(f"the process group over which weights are sent broke: {why}") from error
