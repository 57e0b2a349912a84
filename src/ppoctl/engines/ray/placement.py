"""The device of each process of each role: plain arithmetic, before any Ray is started.

A *bundle* is one device (a GPU, or a place on a CPU) with the processes that share it.

    colocated:  bundle i holds process i of every role        as many bundles as the largest role has processes
    apart:      every process has a bundle of its own         the roles one after the other
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DevicePlacement:
    """Devices of all roles together."""

    sizes: Mapping[str, int]
    """Processes of each role, in the order in which devices are given."""
    colocated: bool

    @property
    def processes(self) -> int:
        return sum(self.sizes.values())

    @property
    def devices(self) -> int:
        return max(self.sizes.values()) if self.colocated else self.processes

    def bundle_of(self, role: str, rank: int) -> tuple[int, float]:
        """The bundle of this process, and the share of its device that the process may count on."""
        if self.colocated:
            return rank, 1 / self._tenants(rank)
        before = 0
        for name, size in self.sizes.items():
            if name == role:
                return before + rank, 1.0
            before += size
        raise KeyError(role)

    def neighbours(self, role: str, rank: int, nodes: Sequence[str]) -> int:
        """How many processes of the role are on this one's node, itself included; given are the bundles' nodes."""
        found = [nodes[self.bundle_of(role, other)[0]] for other in range(self.sizes[role])]
        return found.count(found[rank])

    def bundles(self, *, has_gpus: bool) -> list[dict[str, float]]:
        """Resources that Ray is asked to set aside, one table for each bundle."""
        tenants = [self._tenants(bundle) if self.colocated else 1 for bundle in range(self.devices)]
        return [{"CPU": float(count), **({"GPU": 1.0} if has_gpus else {})} for count in tenants]

    def nodes_of_bundles(self, gpus: Sequence[int]) -> list[int]:
        """Index of the node that each bundle is on, given the GPUs of each node: one node after the other is filled.
        Where there are no GPUs, nodes get an equal number of bundles."""
        room = gpus if any(gpus) else [-(-self.devices // len(gpus))] * len(gpus)
        return [node for node, count in enumerate(room) for _ in range(count)][: self.devices]

    def describe(self) -> str:
        """The placement in words: `actor 4, critic 2, generator 2, colocated`."""
        sizes = ", ".join(f"{role} {size}" for role, size in self.sizes.items())
        return f"{sizes}, {'colocated' if self.colocated else 'apart'}"

    def _tenants(self, bundle: int) -> int:
        return sum(size > bundle for size in self.sizes.values())
