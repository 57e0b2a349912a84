"""Broadcast of weights from a trainer's rank to all engines, over one process group that is reused between transfers.

    driver: Links              where the members meet, and whether they are still connected
    rank of the trainer (0)    BroadcastSource.send(tensors)  --gloo or NCCL-->  received(...)   engines (1, 2, ...)

The members already belong to other default groups (Megatron's, vLLM's), so the group of a broadcast has a separate
store and does not use torch's global functions. Creating the group takes seconds among hundreds of GPUs, so the group
is kept between transfers. If the group breaks, or if a member was restarted, all members join a new group. The group
uses gloo on a CPU and NCCL on a GPU.
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

from ppoctl.core.errors import ProcessLostError
from ppoctl.engines.weights.bucket import NamedTensors, TensorSpec, packed, packed_bytes, views
from ppoctl.engines.weights.loopback import environment, gloo_on_loopback, is_loopback, open_store

Made = TypeVar("Made")

SENDER = 0
"""Rank of the sender in the group."""
CONNECT_DEADLINE_S = 20.0
NCCL_DEADLINE_S = 60.0
"""Seconds in which GPUs, possibly hundreds, must connect to each other."""


@dataclass(frozen=True)
class BroadcastGroup:
    """Address, size and timeout of a process group that a member joins."""

    sender: int
    """Rank of the sender among the trainer's ranks. A process joins one group per sender."""
    address: str
    """`host:port` of the meeting point."""
    size: int
    """Number of members, including the sender."""
    timeout_s: float
    """Seconds that a member waits for the other members, and for each broadcast."""
    connect_s: float = CONNECT_DEADLINE_S
    """Seconds in which a member must connect to the meeting point and then, once all members have arrived, to the
    other members. The meeting point is open before any member is called."""


@contextmanager
def meeting(host: str, timeout_s: float) -> Iterator[str]:
    """Context that yields the `host:port` where the members of a group meet. A member that still waits at this
    address when the context ends gets an error immediately."""
    store = open_store(host, 0, timedelta(seconds=timeout_s))
    try:
        yield f"{host}:{store.port}"
    finally:
        del store  # closes the store, also while an exception propagates


class BroadcastSource:
    """The sender's membership in the group. After the group breaks, calls send nothing and raise no error. The
    engines report the failure. If the sender raised an error, the ranks that only gather would wait for it
    forever."""

    def __init__(self, group: BroadcastGroup, device: torch.device) -> None:
        self._device = device
        self._member: _Member | None = None
        with suppress(ProcessLostError):
            self._member = _member(group, SENDER, device)

    def send(self, tensors: NamedTensors) -> None:
        """Begin to send a copy of these tensors. Returns after the previous tensors have arrived."""
        if self._member is None:
            return
        _, memory = packed(tensors, self._device)
        try:
            self._member.arrive()
            self._member.begin(memory)
        except ProcessLostError:
            self._member = None

    def finish(self) -> bool:
        """Wait until everything is sent. Returns False if the group broke."""
        member, self._member = self._member, None
        try:
            if member is not None:
                member.arrive()
        except ProcessLostError:
            return False
        return member is not None


def received(
    group: BroadcastGroup, rank: int, plan: Iterable[Sequence[TensorSpec]], device: torch.device
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the planned buckets as member `rank` receives them. While the caller reads a bucket, the next bucket is
    in transit. Raises ProcessLostError if the group breaks."""
    member = _member(group, rank, device)
    received_bucket: list[tuple[str, Tensor]] | None = None
    for specs in plan:
        memory = torch.empty(packed_bytes(specs), dtype=torch.uint8, device=device)
        member.arrive()
        member.begin(memory)
        if received_bucket is not None:
            yield received_bucket
        received_bucket = views(memory, specs)
    member.arrive()
    if received_bucket is not None:
        yield received_bucket


_members: "dict[int, _Member]" = {}
"""Memberships of this process in groups, by sender."""


def is_linked(group: BroadcastGroup) -> bool:
    """Whether this process is a member of the group and has received no error from the group."""
    member = _members.get(group.sender)
    return member is not None and member.group == group and not member.is_broken


def _member(group: BroadcastGroup, rank: int, device: torch.device) -> "_Member":
    """Return this process's membership in the group, and join the group first if necessary. Raises
    ProcessLostError."""
    if not is_linked(group):
        _members.pop(group.sender, None)
        _members[group.sender] = _Member(group, rank, device)
    return _members[group.sender]


class _Member:
    """Membership of one process in the group. One buffer at a time is in transit. Methods raise ProcessLostError if
    the group breaks."""

    def __init__(self, group: BroadcastGroup, rank: int, device: torch.device) -> None:
        """Join the group, and return when all members have arrived and are connected."""
        self.group = group
        self.is_broken = False
        self._timeout = timedelta(seconds=group.timeout_s)
        self._work: Any = None
        self._memory: Tensor | None = None
        with self._breaking():
            self._store = _within(lambda: _store(group), group.connect_s)
            self._wait_for_all()
            deadline_s = NCCL_DEADLINE_S if device.type == "cuda" else group.connect_s
            self._processes = _within(lambda: _process_group(group, self._store, rank, device), deadline_s)

    def begin(self, memory: Tensor) -> None:
        with self._breaking():
            # Keeps the buffer alive until it has arrived.
            self._memory = memory
            self._work = self._processes.broadcast(memory, SENDER, self._timeout)

    def arrive(self) -> None:
        """Wait until the buffer in transit has arrived."""
        if self._work is not None:
            with self._breaking():
                self._work.wait()
            self._work = self._memory = None

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.is_broken = True
            why = str(error).splitlines()[0]
            raise ProcessLostError(f"the process group that broadcasts weights broke: {why}") from error

    def _wait_for_all(self) -> None:
        if self._store.add("came", 1) == self.group.size:
            self._store.set("all came", "")
        self._store.wait(["all came"])


def _within(make: Callable[[], Made], deadline_s: float) -> Made:
    """Return the result of `make`. Raises RuntimeError after the deadline. gloo waits forever for a process that dies
    while the members connect. After the deadline, the thread that waits is abandoned."""
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except RuntimeError as error:
            made.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return made.result(deadline_s)
    except TimeoutError as error:
        raise RuntimeError(f"could not connect within {deadline_s:g} s") from error


def _store(group: BroadcastGroup) -> TCPStore:
    host, port = group.address.rsplit(":", 1)
    deadline = timedelta(seconds=group.connect_s)
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=deadline)
    store.set_timeout(timedelta(seconds=group.timeout_s))
    return store


def _process_group(group: BroadcastGroup, store: TCPStore, rank: int, device: torch.device) -> Any:
    processes = _new_process_group(group, store, rank, device)
    # NCCL connects on the first message: send a message now, within the deadline for connecting.
    processes.broadcast(torch.zeros(1, device=device), SENDER, timedelta(seconds=group.timeout_s)).wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return processes


def _new_process_group(group: BroadcastGroup, store: TCPStore, rank: int, device: torch.device) -> Any:
    timeout = timedelta(seconds=group.timeout_s)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL  # missing in builds of torch for CPUs

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        # A broken group must raise an error in the waiting call. By default, NCCL's watchdog ends the whole process.
        with environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            return ProcessGroupNCCL(store, rank, group.size, options)
    from torch.distributed import ProcessGroupGloo

    with gloo_on_loopback() if is_loopback(group.address) else nullcontext():
        return ProcessGroupGloo(store, rank, group.size, timeout)
