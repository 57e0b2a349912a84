"""Sharing of device memory between colocated roles: before one role computes, the other offloadable roles are
offloaded.

rollout: generator (and the actor while weights are sent) -> values: critic -> logprobs: actor -> ...
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from ppoctl.core.measured import MEASUREMENTS


class DeviceSharing:
    """Record of the offloadable roles that are in device memory. All roles that share devices use one instance."""

    def __init__(self, leaving: Collection[str] = ()) -> None:
        """`leaving`: roles that are offloaded while another role computes. All other roles always stay on the
        device."""
        self._leaving = frozenset(leaving)
        self._loaded: dict[str, Callable[[], None]] = {}
        self._is_shared = False

    def leaves(self, role: str) -> bool:
        """Whether the role is offloaded while other roles compute."""
        return role in self._leaving

    def acquire(self, role: str, leave: Callable[[], None]) -> None:
        """Offload the other roles, because `role` is about to compute. If `role` is offloadable, `leave` is called
        when another role computes, and must offload `role`. The role reloads itself when it is next used."""
        if not self._is_shared:
            self.offload_others(role)
        if role in self._leaving:
            self._loaded[role] = leave

    def offload_others(self, role: str) -> None:
        """Offload all other offloadable roles, even inside `keep_all`. Required before an operation that reserves all
        its memory at once: otherwise the operation would fail."""
        with MEASUREMENTS.moving():
            for other in [name for name in self._loaded if name != role]:
                self._loaded.pop(other)()

    @contextmanager
    def keep_all(self) -> Iterator[None]:
        """Context in which roles stay on the device together, because weights are sent from one role to another."""
        before, self._is_shared = self._is_shared, True
        try:
            yield
        finally:
            self._is_shared = before
