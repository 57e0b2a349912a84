"""The partitions of a cluster, parsed from the output of `sinfo`."""

import re
from collections.abc import Collection
from dataclasses import dataclass

SINFO = ("sinfo", "--noheader", "--all", "--exact", "--format", "%P|%a|%l|%L|%s|%D|%T|%c|%m|%G|%f")
"""Command that prints a line for each kind of node of each partition. Every version of Slurm has these fields."""

SHOWN = ("sinfo", "--noheader", "--format", "%R")
"""Command that prints the names of the partitions that the user may use and that are not hidden."""

_GPUS = re.compile(r"\bgpu((?::[^:,()\s]+)+)")


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition with equal properties."""

    count: int
    state: str
    """Slurm's state, such as `idle`, `mixed`, `down*`."""
    cpus: int
    memory_mib: int
    gpus: dict[str, int]
    """GPUs of one node by type. The type is empty if the cluster defines no type."""
    features: frozenset[str]

    @property
    def is_available(self) -> bool:
        """Whether jobs can start on these nodes now or after the jobs that use them. Slurm prints a letter behind the
        state of a node that does not answer (`*`) or is reserved (`$`)."""
        return bool(re.fullmatch(r"(idle|mixed|allocated|completing|planned)[^*$]?", self.state))

    def gpus_of(self, type: str | None) -> int:
        """Return how many GPUs of this type a job can get on one node; None: GPUs of any type."""
        return sum(self.gpus.values()) if type is None else self.gpus.get(type, 0)


@dataclass(frozen=True)
class Partition:
    """A partition, with its nodes."""

    name: str
    is_default: bool
    is_shown: bool
    """Whether `sinfo` lists it by default: it is not hidden, and not closed to the user's group."""
    state: str
    """`up`, `down`, `drain` or `inact`."""
    limit: str
    """Longest time limit, as Slurm prints it; `infinite`: there is no limit."""
    usual_limit: str
    """Default time limit of a job, as Slurm prints it; `n/a`: the longest time limit."""
    most_nodes: int | None
    """Largest number of nodes of one job; None: all nodes."""
    kinds: tuple[NodeKind, ...]
    """Kinds of its nodes; empty: no nodes, or Slurm does not show them (private, or cloud nodes not yet created)."""


def partitions_in(text: str, shown: Collection[str]) -> list[Partition]:
    """Parse the output of `SINFO`, and return the partitions in its order. `shown` has the names from `SHOWN`."""
    by_name: dict[str, Partition] = {}
    for line in text.splitlines():
        name, state, limit, usual, sizes, count, node_state, cpus, memory, gres, features = line.split("|", 10)
        kind = NodeKind(
            count=_number(count),
            state=node_state,
            cpus=_number(cpus),
            memory_mib=_number(memory),
            gpus=_gpus(gres),
            features=frozenset(re.findall(r"[^,\s]+", features.replace("(null)", ""))),
        )
        plain = name.removesuffix("*")
        kinds = (*by_name[plain].kinds, kind) if plain in by_name else (kind,)
        most = sizes.rpartition("-")[2]
        by_name[plain] = Partition(
            name=plain,
            is_default=name.endswith("*"),
            is_shown=plain in shown,
            state=state,
            limit=limit,
            usual_limit=usual,
            most_nodes=int(most) if most.isdigit() else None,
            kinds=tuple(kind for kind in kinds if kind.count),
        )
    return list(by_name.values())


def _gpus(gres: str) -> dict[str, int]:
    """Return the GPUs by type in a list such as `gpu:a100:4(S:0-1),gres:lscratch:1T`."""
    by_type: dict[str, int] = {}
    for words in _GPUS.findall(gres):
        type, _, count = words[1:].rpartition(":")
        by_type[type] = by_type.get(type, 0) + _number(count)
    return by_type


def _number(text: str) -> int:
    """Return a number that sinfo prints, which may end in `+` if nodes differ; 0 if it is not a number (`N/A`)."""
    digits = re.match(r"\d+", text.strip())
    return int(digits[0]) if digits else 0
