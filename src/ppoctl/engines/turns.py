"""Roles that share devices take turns in their memory: before one works, the others move out to the host.

rollout: generator (and the actor while weights are sent) -> values: critic -> logprobs: actor -> ...
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """Who is in the memory of the devices. One for all roles that share them."""

    def __init__(self) -> None:
        self._here: dict[str, Callable[[], None]] = {}
        self._is_shared = False

    def take(self, role: str, leave: Callable[[], None]) -> None:
        """`role` is about to work; `leave` will move it out when another one is. It comes back by itself when it is
        used."""
        if not self._is_shared:
            self.clear_for(role)
        self._here[role] = leave

    def clear_for(self, role: str) -> None:
        """All others leave, also where the devices are shared: what comes next takes all the memory it is to have."""
        for other in [name for name in self._here if name != role]:
            self._here.pop(other)()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Within, whoever comes is beside those that are here: weights go from one to the other."""
        before, self._is_shared = self._is_shared, True
        try:
            yield
        finally:
            self._is_shared = before


class NoTurns(Turns):
    """Everyone stays: each has a device of its own, or all fit together."""

    def take(self, role: str, leave: Callable[[], None]) -> None:
        """Nobody leaves."""
