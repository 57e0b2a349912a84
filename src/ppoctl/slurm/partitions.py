"""The partitions of a cluster as `sinfo` tells of them, and who may use what as `sacctmgr` does."""

import re
from dataclasses import dataclass

SINFO = ("sinfo", "--noheader", "--all", "--exact", "--format", "%P|%a|%l|%L|%s|%D|%T|%c|%m|%G|%f")
"""Command that prints a line for each kind of node of each partition. Every Slurm has these fields."""

_GPUS = re.compile(r"\bgpu((?::[^:,()\s]+)+)")


@dataclass(frozen=True)
class NodeKind:
    """Nodes of a partition that are alike."""

    count: int
    state: str
    """Slurm's word, such as `idle`, `mixed`, `down*`."""
    cpus: int
    memory_mib: int
    gpus: int
    features: frozenset[str]


@dataclass(frozen=True)
class Partition:
    """A partition, with its nodes."""

    name: str
    is_default: bool
    state: str
    """`up`, or what it is instead: `down`, `drain`, `inact`."""
    limit: str
    """Longest time limit, as Slurm writes it; `infinite`: there is none."""
    usual_limit: str
    """Time limit of a job that asks for none, as Slurm writes it; `n/a`: the longest."""
    most_nodes: int | None
    """Most nodes of one job; None: as many as there are."""
    kinds: tuple[NodeKind, ...]

    @property
    def is_up(self) -> bool:
        return self.state == "up"

    @property
    def nodes(self) -> int:
        """Nodes of the partition, those that are down included: they come back."""
        return sum(kind.count for kind in self.kinds)


@dataclass(frozen=True)
class Association:
    """An account that a user may charge, with the partition and the qualities of service that go with it."""

    account: str
    partition: str
    """Empty: any."""
    qos: tuple[str, ...]


def partitions_in(text: str) -> list[Partition]:
    """The partitions in what `SINFO` printed, in its order."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        name, state, limit, usual, sizes, count, node_state, cpus, memory, gres, features = line.split("|", 10)
        kind = NodeKind(
            count=_number(count),
            state=node_state,
            cpus=_number(cpus),
            memory_mib=_number(memory),
            gpus=sum(_number(words.rpartition(":")[2]) for words in _GPUS.findall(gres)),
            features=frozenset(re.findall(r"[^,\s]+", features.replace("(null)", ""))),
        )
        plain = name.removesuffix("*")
        kinds = (*found[plain].kinds, kind) if plain in found else (kind,)
        most = sizes.rpartition("-")[2]
        found[plain] = Partition(
            name=plain,
            is_default=name.endswith("*"),
            state=state,
            limit=limit,
            usual_limit=usual,
            most_nodes=int(most) if most.isdigit() else None,
            kinds=tuple(each for each in kinds if each.count),
        )
    return list(found.values())


def associations_in(text: str) -> list[Association]:
    """What `sacctmgr --noheader --parsable2 show assoc format=account,partition,qos` printed."""
    rows = (line.split("|") for line in text.splitlines() if line.count("|") == 2)
    return [Association(row[0], row[1], tuple(filter(None, row[2].split(",")))) for row in rows]


def _number(text: str) -> int:
    """A number of sinfo, which may have a `+` where nodes differ; 0 where it is none (`N/A`)."""
    digits = re.match(r"\d+", text.strip())
    return int(digits[0]) if digits else 0
