"""The driver's side of the process groups of broadcasts: where members meet, and how long a group is reused."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ppoctl.engines.weights.broadcast import BroadcastGroup, meeting
from ppoctl.engines.weights.engine_calls import EngineHandle, call_engines
from ppoctl.engines.weights.sending import PipelineRankSender


@dataclass(frozen=True)
class BroadcastWay:
    """Settings with which processes of the trainer and of the engines form process groups."""

    host: Callable[[], str]
    """Returns the address of the driver, at which processes of both sides meet."""
    timeout_s: float
    """Seconds that a member waits for the other members, and for each broadcast."""
    engine_ranks: int
    """Number of processes of each engine."""


@dataclass(frozen=True)
class _Link:
    group: BroadcastGroup
    open: ExitStack
    """The store in which the members met. The store must remain open, because NCCL continues to query it."""


class Links:
    """One process group per sender, reused from transfer to transfer."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}

    def group(self, sender: PipelineRankSender, engines: Sequence[EngineHandle], way: BroadcastWay) -> BroadcastGroup:
        """Return the group of this sender and these engines: the current group if all of them are still members,
        otherwise a new group for them to join. Raises EngineLostError or ProcessLostError."""
        size = 1 + way.engine_ranks * len(engines)
        link = self._links.get(sender.ranks[0])
        if link is not None and link.group.size == size and self._is_whole(link.group, sender, engines):
            return link.group
        self.end(sender)
        with ExitStack() as made:
            address = made.enter_context(meeting(way.host(), way.timeout_s))
            group = BroadcastGroup(sender.ranks[0], address, size, way.timeout_s)
            self._links[sender.ranks[0]] = _Link(group, made.pop_all())
        return group

    def _is_whole(self, group: BroadcastGroup, sender: PipelineRankSender, engines: Sequence[EngineHandle]) -> bool:
        return sender.is_linked(group) and all(call_engines(engines, "is_linked", group))

    def end(self, sender: PipelineRankSender) -> None:
        """Close the group of this sender, so that members that wait for other members get an error. The next call of
        `group` returns a new group."""
        link = self._links.pop(sender.ranks[0], None)
        if link is not None:
            link.open.close()

    def close(self) -> None:
        """Close all groups."""
        while self._links:
            self._links.popitem()[1].open.close()
