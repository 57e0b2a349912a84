"""The device of each process of each role, computed before Ray is started.

A *bundle* is one device (a GPU, or a slot on a CPU) with the processes that share it.

    colocated:  bundle i contains process i of every role     as many bundles as the largest role has processes
    apart:      every process has a separate bundle           the roles one after the other
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DevicePlacement:
    """Placement of all roles on devices."""

    sizes: Mapping[str, int]
    """Number of processes of each role, in the order in which devices are assigned."""
    colocated: bool

    @property
    def processes(self) -> int:
        return sum(self.sizes.values())

    @property
    def devices(self) -> int:
        return max(self.sizes.values()) if self.colocated else self.processes

    def bundle_of(self, role: str, rank: int) -> tuple[int, float]:
        """Return the bundle of this process, and the fraction of its device that the process may use."""
        if self.colocated:
            return rank, 1 / self._occupants(rank)
        before = 0
        for name, size in self.sizes.items():
            if name == role:
                return before + rank, 1.0
            before += size
        raise KeyError(role)

    def neighbours(self, role: str, rank: int, nodes: Sequence[str]) -> int:
        """Return the number of processes of the role on this process's node, including itself. `nodes` are the nodes
        of the bundles."""
        nodes_of_role = [nodes[self.bundle_of(role, other)[0]] for other in range(self.sizes[role])]
        return nodes_of_role.count(nodes_of_role[rank])

    def bundles(self, *, has_gpus: bool) -> list[dict[str, float]]:
        """Return the resources that Ray reserves, one table per bundle."""
        occupants = [self._occupants(bundle) if self.colocated else 1 for bundle in range(self.devices)]
        return [{"CPU": float(count), **({"GPU": 1.0} if has_gpus else {})} for count in occupants]

    def nodes_of_bundles(self, gpus: Sequence[int]) -> list[int]:
        """Return the index of the node of each bundle. `gpus` has the number of GPUs of each node. Nodes are filled
        one after the other. Without GPUs, all nodes get an equal number of bundles."""
        capacity = gpus if any(gpus) else [-(-self.devices // len(gpus))] * len(gpus)
        return [node for node, count in enumerate(capacity) for _ in range(count)][: self.devices]

    def describe(self) -> str:
        """Return the placement as text: `actor 4, critic 2, generator 2, colocated`."""
        sizes = ", ".join(f"{role} {size}" for role, size in self.sizes.items())
        return f"{sizes}, {'colocated' if self.colocated else 'apart'}"

    def _occupants(self, bundle: int) -> int:
        return sum(size > bundle for size in self.sizes.values())
