"""The device of each process of each role, computed before Ray is started.

A *bundle* is one device (a GPU, or a slot on a CPU) with the processes that share it.

    colocated:  bundle i contains process i of every role     as many bundles as the largest role has processes
    apart:      every process has a separate bundle           the roles one after the other

Several processes of a role can share a bundle in both cases (`together`): engines of one GPU.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile


@dataclass(frozen=True)
class DevicePlacement:
    """Placement of all roles on devices."""

    sizes: Mapping[str, int]
    """Number of processes of each role, in the order in which devices are assigned."""
    colocated: bool
    together: Mapping[str, int] = field(default_factory=dict)
    """Role -> number of its processes that share a device. A role that is not listed has one process per device."""

    @property
    def processes(self) -> int:
        return sum(self.sizes.values())

    @property
    def devices(self) -> int:
        sizes = [self._devices_of(role) for role in self.sizes]
        return max(sizes) if self.colocated else sum(sizes)

    def bundle_of(self, role: str, rank: int) -> tuple[int, float]:
        """Return the bundle of this process, and the fraction of its device that the process may use. Raises
        KeyError."""
        if role not in self.sizes:
            raise KeyError(role)
        bundle = self._bundle(role, rank)
        return bundle, 1 / self._occupants[bundle]

    def neighbours(self, role: str, rank: int, nodes: Sequence[str]) -> int:
        """Return the number of processes of the role on this process's node, including itself. `nodes` are the nodes
        of the bundles."""
        nodes_of_role = [nodes[self.bundle_of(role, other)[0]] for other in range(self.sizes[role])]
        return nodes_of_role.count(nodes_of_role[rank])

    def bundles(self, *, has_gpus: bool) -> list[dict[str, float]]:
        """Return the resources that Ray reserves, one table per bundle."""
        counts = [self._occupants[bundle] for bundle in range(self.devices)]
        return [{"CPU": float(count), **({"GPU": 1.0} if has_gpus else {})} for count in counts]

    def nodes_of_bundles(self, gpus: Sequence[int]) -> list[int]:
        """Return the index of the node of each bundle. `gpus` has the number of GPUs of each node. Nodes are filled
        one after the other. Without GPUs, all nodes get an equal number of bundles."""
        capacity = gpus if any(gpus) else [-(-self.devices // len(gpus))] * len(gpus)
        return [node for node, count in enumerate(capacity) for _ in range(count)][: self.devices]

    def describe(self) -> str:
        """Return the placement as text: `actor 4, critic 2, generator 2, colocated`."""
        sizes = ", ".join(f"{role} {size}" for role, size in self.sizes.items())
        return f"{sizes}, {'colocated' if self.colocated else 'apart'}"

    @cached_property
    def _occupants(self) -> Counter[int]:
        """Number of processes of each bundle."""
        return Counter(self._bundle(role, rank) for role, size in self.sizes.items() for rank in range(size))

    def _bundle(self, role: str, rank: int) -> int:
        device = rank // self.together.get(role, 1)
        if self.colocated:
            return device
        return device + sum(self._devices_of(name) for name in takewhile(lambda name: name != role, self.sizes))

    def _devices_of(self, role: str) -> int:
        return self.sizes[role] // self.together.get(role, 1)
