"""Roles that share devices take turns in their memory: before one works, those of the others leave that are to.

rollout: generator (and the actor while weights are sent) -> values: critic -> logprobs: actor -> ...
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


class DeviceSharing:
    """Who is in the memory of the devices, of the roles that leave it. One for all roles that share them."""

    def __init__(self, leaving: Collection[str] = ()) -> None:
        """`leaving`: roles that leave while another one works; the others always stay."""
        self._leaving = frozenset(leaving)
        self._here: dict[str, Callable[[], None]] = {}
        self._is_shared = False

    def leaves(self, role: str) -> bool:
        """Whether the role is one of those that leave."""
        return role in self._leaving

    def acquire(self, role: str, leave: Callable[[], None]) -> None:
        """`role` is about to work; `leave` will move it out when another one is, if it is to leave. It comes back by
        itself when it is used."""
        if not self._is_shared:
            self.offload_others(role)
        if role in self._leaving:
            self._here[role] = leave

    def offload_others(self, role: str) -> None:
        """All others that are to leave do so, also where the devices are shared: what comes next takes all the memory
        it is to have."""
        for other in [name for name in self._here if name != role]:
            self._here.pop(other)()

    @contextmanager
    def keep_all(self) -> Iterator[None]:
        """Within, whoever comes is beside those that are here: weights go from one to the other."""
        before, self._is_shared = self._is_shared, True
        try:
            yield
        finally:
            self._is_shared = before
