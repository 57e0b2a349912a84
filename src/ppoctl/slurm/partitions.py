"""The partitions of a cluster as `sinfo` tells of them."""

import re
from collections.abc import Collection
from dataclasses import dataclass

SINFO = ("sinfo", "--noheader", "--all", "--exact", "--format", "%P|%a|%l|%L|%s|%D|%T|%c|%m|%G|%f")
"""Command that prints a line for each kind of node of each partition. Every Slurm has these fields."""

SHOWN = ("sinfo", "--noheader", "--format", "%R")
"""Command that prints the names of the partitions that the user may use and that are not hidden."""

_GPUS = re.compile(r"\bgpu((?::[^:,()\s]+)+)")


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    count: int
    state: str
    """Slurm's word, such as `idle`, `mixed`, `down*`."""
    cpus: int
    memory_mib: int
    gpus: dict[str, int]
    """GPUs of one node by type; the type of those that the cluster gives none is empty."""
    features: frozenset[str]

    def gpus_of(self, type: str | None) -> int:
        """GPUs of one node that a job gets which asks for this type; None: for any."""
        return sum(self.gpus.values()) if type is None else self.gpus.get(type, 0)


@dataclass(frozen=True)
class Partition:
    """A partition, with its nodes."""

    name: str
    is_default: bool
    is_shown: bool
    """Whether the user is shown it unasked: it is not hidden, and not closed to the user's group."""
    state: str
    """`up`, or what it is instead: `down`, `drain`, `inact`."""
    limit: str
    """Longest time limit, as Slurm writes it; `infinite`: there is none."""
    usual_limit: str
    """Time limit of a job that asks for none, as Slurm writes it; `n/a`: the longest."""
    most_nodes: int | None
    """Most nodes of one job; None: as many as there are."""
    kinds: tuple[NodeKind, ...]
    """Its nodes; empty: it has none, or nobody is shown them (private ones, those that a cloud has yet to make)."""

    @property
    def is_up(self) -> bool:
        return self.state == "up"

    @property
    def nodes(self) -> int:
        """Nodes of the partition, those that are down included: they come back."""
        return sum(kind.count for kind in self.kinds)


def partitions_in(text: str, shown: Collection[str]) -> list[Partition]:
    """The partitions in what `SINFO` printed, in its order; `shown`: the names that `SHOWN` printed."""
    found: dict[str, Partition] = {}
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
        kinds = (*found[plain].kinds, kind) if plain in found else (kind,)
        most = sizes.rpartition("-")[2]
        found[plain] = Partition(
            name=plain,
            is_default=name.endswith("*"),
            is_shown=plain in shown,
            state=state,
            limit=limit,
            usual_limit=usual,
            most_nodes=int(most) if most.isdigit() else None,
            kinds=tuple(each for each in kinds if each.count),
        )
    return list(found.values())


def _gpus(gres: str) -> dict[str, int]:
    """GPUs by type in a list such as `gpu:a100:4(S:0-1),gres:lscratch:1T`."""
    found: dict[str, int] = {}
    for words in _GPUS.findall(gres):
        type, _, count = words[1:].rpartition(":")
        found[type] = found.get(type, 0) + _number(count)
    return found


def _number(text: str) -> int:
    """A number of sinfo, which may have a `+` where nodes differ; 0 where it is none (`N/A`)."""
    digits = re.match(r"\d+", text.strip())
    return int(digits[0]) if digits else 0
