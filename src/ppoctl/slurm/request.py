"""What a recipe asks of a cluster, checked before it waits in a queue: Slurm takes a request for more nodes than a
partition has, and the job waits for ever.

    request_of       nodes, GPUs and time, from the recipe alone
    require_request  the same, or one error with every value that this cluster cannot meet, where it was set, and the
                     nearest that it can

A layout that is wrong is told first, and the cluster is asked for what would be right.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from ppoctl.errors import RecipeError, quoted
from ppoctl.loading.load import Loaded
from ppoctl.loading.problems import Problem
from ppoctl.recipe.parallel import devices, processes
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.slurm import limit_s, memory_mib
from ppoctl.slurm.client import Slurm
from ppoctl.slurm.partitions import NodeKind, Partition

Nearest = dict[str, str | int]
"""Values to set instead, by the name of their key in `[slurm]`."""


@dataclass(frozen=True)
class Request:
    """Nodes that a recipe asks a cluster for, for how long, and what each must have."""

    nodes: int
    gpus_per_node: int | None
    """None: none are asked for, and everything computes on CPUs."""
    gpu_type: str | None
    """None: any."""
    cpus_per_node: int
    """0: as many as the cluster gives."""
    memory_mib: float
    """Host memory of each node; 0: as much as the cluster gives, or all of it."""
    partitions: tuple[str, ...]
    """Names of the partitions that will do; empty: the cluster's own choice."""
    constraint: str | None
    time_s: float | None
    """Time limit in seconds; None: the partition's own."""


@dataclass(frozen=True)
class _RequestFault:
    """One thing that cannot be met."""

    key: str
    """The key in `[slurm]` to change; its origin begins the line."""
    message: str
    nearest: Nearest


def request_of(recipe: Recipe) -> Request:
    """What the recipe asks for. Nodes that it does not name are as many as its layout takes at `gpus_per_node`, and
    one where it asks for no GPUs."""
    table = recipe.slurm
    return Request(
        nodes=table.nodes or _nodes_for(devices(recipe), table.gpus_per_node),
        gpus_per_node=table.gpus_per_node,
        gpu_type=table.gpu_type,
        cpus_per_node=table.cpus_per_node or 0,
        memory_mib=0 if table.memory is None else memory_mib(table.memory),
        partitions=() if table.partition is None else tuple(table.partition.split(",")),
        constraint=table.constraint,
        time_s=None if table.time is None else limit_s(table.time),
    )


def require_request(loaded: Loaded, slurm: Slurm) -> Request:
    """What the recipe asks for, if the cluster can ever give it.

    Raises RecipeError with a line for each value that it cannot, SlurmError where there is no cluster to ask,
    SlurmAwayError where it does not answer.
    """
    asked = request_of(loaded.recipe)
    faults = list(_of_layout(loaded.recipe))
    nodes = next((int(fault.nearest["nodes"]) for fault in faults), asked.nodes)
    partitions, settings = slurm.partitions(), slurm.configuration()
    faults += _of_cluster(loaded.recipe, replace(asked, nodes=nodes), partitions, is_routed=_is_routed(settings))
    if "associations" in settings.get("AccountingStorageEnforce", ""):
        faults += _of_account(loaded.recipe, slurm)
    if faults:
        raise _as_error(faults, loaded)
    return asked


def _as_error(faults: Sequence[_RequestFault], loaded: Loaded) -> RecipeError:
    """All faults as one error, a line each; the hint has the nearest values of all of them."""
    lines: list[str] = []
    sets: Nearest = {}
    for fault in faults:
        words = _sets(fault.nearest)
        says = f"{fault.message}; nearest: `{words}`" if words else fault.message
        lines.append(str(Problem(loaded.origins[f"slurm.{fault.key}"], says)))
        sets |= fault.nearest
    return RecipeError("\n".join(lines), hint=f"change the recipe, or add `{_sets(sets)}`" if sets else "sinfo")


def _sets(nearest: Nearest) -> str:
    return " ".join(f"--set slurm.{key}={quoted(str(value))}" for key, value in nearest.items())


def _nodes_for(count: int, gpus_per_node: int | None) -> int:
    """Nodes that so many devices take; devices on CPUs need no node of their own."""
    return math.ceil(count / gpus_per_node) if gpus_per_node else 1


def _of_layout(recipe: Recipe) -> Iterator[_RequestFault]:
    """The fault of too few GPUs for the layout, or of nodes that nothing would compute on."""
    table, count = recipe.slurm, devices(recipe)
    if table.nodes is None:
        return
    gpus, sizes = table.gpus_per_node, processes(recipe)
    what = f"{', '.join(f'{role} {size}' for role, size in sizes.items())}, {recipe.cluster.placement}"
    least = _nodes_for(count, gpus)
    if gpus and table.nodes < least:
        says = f"`slurm.nodes` `{table.nodes}` x `slurm.gpus_per_node` `{gpus}` are {table.nodes * gpus} GPUs"
        yield _RequestFault("nodes", f"{says}, and the layout takes {count} ({what})", {"nodes": least})
    most = least if gpus else count
    if table.nodes > most:
        says = f"of `slurm.nodes` `{table.nodes}` the layout ({what}) uses {most}, and the others would do nothing"
        yield _RequestFault("nodes", says, {"nodes": most})


def _is_routed(settings: dict[str, str]) -> bool:
    """Whether plugins of the cluster may choose the partition of a job that names none."""
    return any(settings.get(name) != "(null)" for name in ("JobSubmitPlugins", "CliFilterPlugins"))


def _of_cluster(
    recipe: Recipe, asked: Request, partitions: Sequence[Partition], *, is_routed: bool
) -> Iterator[_RequestFault]:
    """Faults of the request on the partitions it names, or on all where it names none and a plugin chooses; where one
    of several can meet it there is none."""
    if recipe.slurm.qos is not None:  # its limits may stand in place of the partition's
        partitions = [replace(each, limit="infinite", usual_limit="n/a", most_nodes=None) for each in partitions]
    known = {partition.name: partition for partition in partitions}
    usable = [partition for partition in partitions if partition.is_up and partition.is_shown]
    meant: dict[str, Partition] = {}
    for name in asked.partitions:
        if name in known:
            meant[name] = known[name]
            continue
        others = [each.name for each in usable] or list(known)
        nearest = _nearest_partition(name, recipe, asked, usable)
        says = f"the cluster has no partition `{name}`; it has {_listed(others)}"
        yield _RequestFault("partition", says, nearest)
        meant |= {each: known[each] for each in map(str, nearest.values())}
    if not asked.partitions:
        meant = {each.name: each for each in partitions if each.is_default or (is_routed and each.is_up)}
    if not asked.partitions and not meant:
        nearest = _nearest_partition("", recipe, asked, usable)
        says = f"the cluster chooses no partition by itself, and `slurm.partition` names none of {_listed(known)}"
        yield _RequestFault("partition", says, nearest)
        meant = {each: known[each] for each in map(str, nearest.values())}
    faults = [list(_of_partition(recipe, asked, partition, usable)) for partition in meant.values()]
    if faults and all(faults):
        yield from min(faults, key=lambda found: sum(not fault.nearest for fault in found))


def _nearest_partition(name: str, recipe: Recipe, asked: Request, usable: Sequence[Partition]) -> Nearest:
    """The partition with the nearest name among those that can meet the request; else one that is up."""
    able = _able(recipe, asked, usable) or list(usable)
    names = [each.name for each in able]
    usual = [each.name for each in able if each.is_default] or names
    near = get_close_matches(name, names, n=1) or usual
    return {"partition": near[0]} if near else {}


def _able(recipe: Recipe, asked: Request, partitions: Sequence[Partition]) -> list[Partition]:
    """The partitions that can meet the request; last those that show no nodes, of which nobody knows."""
    able = [each for each in partitions if not list(_of_partition(recipe, asked, each, ()))]
    return sorted(able, key=lambda each: not each.kinds)


def _of_partition(
    recipe: Recipe, asked: Request, here: Partition, others: Sequence[Partition]
) -> Iterator[_RequestFault]:
    """Faults of the request on one partition; `others`: where it might be met instead."""
    if not here.is_up:
        says = f"partition `{here.name}` takes no jobs: it is `{here.state}`"
        yield _RequestFault("partition", says, _nearest_partition(here.name, recipe, asked, others))
    yield from _of_time(recipe, asked, here)
    if not here.kinds:
        return
    kinds, faults = _of_constraint(asked, here)
    yield from faults
    if faults:
        return
    short = list(_of_one_node(recipe, asked, here, kinds, others))
    yield from short
    able = [kind for kind in kinds if _is_enough(kind, asked)]
    if short:
        return
    if not able:
        yield _no_single_node(asked, here, kinds)
        return
    count = min(sum(kind.count for kind in able), here.most_nodes or asked.nodes)
    if asked.nodes > count:
        yield _too_few_nodes(recipe, asked, here, able, count, others)


def _of_time(recipe: Recipe, asked: Request, here: Partition) -> Iterator[_RequestFault]:
    warn_s, longest = recipe.slurm.warn_s, _limit_of(here.limit)
    if asked.time_s is not None and asked.time_s > longest:
        says = f"a time limit of `{recipe.slurm.time}` is longer than that of partition `{here.name}`, `{here.limit}`"
        nearest: Nearest = {"time": here.limit}
        yield _RequestFault("time", says, nearest if warn_s < longest else nearest | {"warn_s": int(longest) // 2})
    usual = min(longest, _limit_of(here.usual_limit))
    if asked.time_s is None and warn_s >= usual:
        says = (
            f"the job would be told {warn_s} s before its end, and the time limit of partition `{here.name}` is "
            f"{usual:g} s where `slurm.time` is not set"
        )
        longer: Nearest = (
            {"time": math.ceil(2 * warn_s / 60)} if 2 * warn_s <= longest else {"warn_s": int(usual) // 2}
        )
        yield _RequestFault("warn_s", says, longer)


def _of_constraint(asked: Request, here: Partition) -> tuple[list[NodeKind], list[_RequestFault]]:
    """Nodes with the features that are asked for; where none has them, the fault. More than `&` and `|` is Slurm's to
    judge, but for features that no node has."""
    if asked.constraint is None:
        return list(here.kinds), []
    features = sorted({feature for kind in here.kinds for feature in kind.features})
    words = re.findall(r"[^&|,*()\[\]!\s]+", re.sub(r"\*\d+", "", asked.constraint))
    missing = [word for word in words if word not in features]
    if re.search(r"[*()\[\]!,]", asked.constraint):
        kinds = list(here.kinds)
        if not missing:
            return kinds, []
    else:
        wanted = [set(re.split(r"\s*&\s*", part.strip())) for part in asked.constraint.split("|")]
        kinds = [kind for kind in here.kinds if any(each <= kind.features for each in wanted)]
        if kinds:
            return kinds, []
    what = _listed(missing) if missing else f"`{asked.constraint}`"
    has = f"its nodes have {_listed(features)}" if features else "its nodes have no features: leave the key out"
    near = get_close_matches(missing[0], features, n=1, cutoff=0.4) if missing and len(words) == 1 else []
    says = f"no node of partition `{here.name}` has {what}; {has}"
    return kinds, [_RequestFault("constraint", says, {"constraint": near[0]} if near else {})]


def _of_one_node(
    recipe: Recipe, asked: Request, here: Partition, kinds: Sequence[NodeKind], others: Sequence[Partition]
) -> Iterator[_RequestFault]:
    """Faults of what every single node must have."""
    gpus = [kind.gpus_of(asked.gpu_type) for kind in kinds]
    if asked.gpu_type is not None and not any(gpus) and any(kind.gpus for kind in kinds):
        yield _no_such_type(recipe, asked, here, kinds, others)
    elif asked.gpus_per_node is not None and asked.gpus_per_node > max(gpus, default=0):
        fullest = [kind for kind, count in zip(kinds, gpus, strict=True) if count == max(gpus)]
        yield _too_many_gpus(recipe, asked, here, fullest, others)
    most_cpus = max((kind.cpus for kind in kinds), default=0)
    if asked.cpus_per_node > most_cpus:
        says = f"no node of partition `{here.name}` has `{asked.cpus_per_node}` CPUs; the most is {most_cpus}"
        yield _RequestFault("cpus_per_node", says, {"cpus_per_node": most_cpus})
    most_mib = max((kind.memory_mib for kind in kinds), default=0)
    if asked.memory_mib > most_mib:
        says = f"no node of partition `{here.name}` has `{recipe.slurm.memory}` of memory; the most is {most_mib}M"
        yield _RequestFault("memory", says, {"memory": f"{most_mib}M"})


def _no_such_type(
    recipe: Recipe, asked: Request, here: Partition, kinds: Sequence[NodeKind], others: Sequence[Partition]
) -> _RequestFault:
    """The fault of a type of GPUs that no node has. Nearest is a partition that has it; else a type that is there, as
    many on a node."""
    types = sorted({type for kind in kinds for type in kind.gpus if type})
    has = f"its nodes have {_listed(types)}" if types else "its GPUs have no types: leave the key out"
    says = f"no node of partition `{here.name}` has GPUs of type `{asked.gpu_type}`; {has}"
    if elsewhere := [each for each in _able(recipe, asked, others) if each.kinds]:
        return _RequestFault("gpu_type", says, _nearest_partition(here.name, recipe, asked, elsewhere))
    enough = [type for type in types if any(kind.gpus_of(type) >= (asked.gpus_per_node or 0) for kind in kinds)]
    near = get_close_matches(asked.gpu_type or "", enough, n=1) or enough
    return _RequestFault("gpu_type", says, {"gpu_type": near[0]} if near else {})


def _too_many_gpus(
    recipe: Recipe, asked: Request, here: Partition, fullest: Sequence[NodeKind], others: Sequence[Partition]
) -> _RequestFault:
    """The fault of more GPUs than a node has; `fullest`: the nodes with the most. Nearest are more nodes with fewer,
    where there are so many; else another partition; else a smaller layout."""
    most = max((kind.gpus_of(asked.gpu_type) for kind in fullest), default=0)
    of_type = "" if asked.gpu_type is None else f" of type `{asked.gpu_type}`"
    says = f"no node of partition `{here.name}` has `{asked.gpus_per_node}` GPUs{of_type}; the most is {most}"
    count = sum(kind.count for kind in fullest)
    count = min(count, here.most_nodes or count)
    if most and _nodes_for(devices(recipe), most) <= count:
        nearest: Nearest = {"gpus_per_node": most}
        if recipe.slurm.nodes is not None:
            nearest["nodes"] = _nodes_for(devices(recipe), most)
        return _RequestFault("gpus_per_node", says, nearest)
    elsewhere = _able(recipe, asked, others)
    if not elsewhere and most:
        says += f", and a layout of at most {count * most} GPUs would fit on {count} of them"
    return _RequestFault("gpus_per_node", says, _nearest_partition(here.name, recipe, asked, elsewhere))


def _is_enough(kind: NodeKind, asked: Request) -> bool:
    wanted = (asked.gpus_per_node or 0, asked.cpus_per_node, asked.memory_mib)
    has = (kind.gpus_of(asked.gpu_type), kind.cpus, kind.memory_mib)
    return all(here >= want for here, want in zip(has, wanted, strict=True))


def _no_single_node(asked: Request, here: Partition, kinds: Sequence[NodeKind]) -> _RequestFault:
    """The fault of a request whose parts only different nodes have."""
    with_gpus = [kind for kind in kinds if kind.gpus_of(asked.gpu_type) >= (asked.gpus_per_node or 0)]
    best = max(with_gpus, key=lambda kind: (kind.count, min(kind.cpus, asked.cpus_per_node)))
    nearest: Nearest = {}
    if best.cpus < asked.cpus_per_node:
        nearest["cpus_per_node"] = best.cpus
    if best.memory_mib < asked.memory_mib:
        nearest["memory"] = f"{best.memory_mib}M"
    parts = (f"{asked.gpus_per_node or 0} GPUs", f"{asked.cpus_per_node} CPUs", f"{asked.memory_mib:g} MiB of memory")
    says = f"no single node of partition `{here.name}` has {', '.join(parts)}"
    return _RequestFault("cpus_per_node" if "cpus_per_node" in nearest else "memory", says, nearest)


def _too_few_nodes(
    recipe: Recipe, asked: Request, here: Partition, able: Sequence[NodeKind], count: int, others: Sequence[Partition]
) -> _RequestFault:
    """The fault of more nodes than a partition has, or gives to one job. Where more GPUs of each would do, those are
    nearest; else another partition; else fewer nodes, for which the layout has to be smaller."""
    gives = f"gives {count} to one job" if count == here.most_nodes else f"has {count} such"
    key, taken = "nodes" if recipe.slurm.nodes is not None else "gpus_per_node", devices(recipe)
    wants = f"`slurm.nodes` is `{asked.nodes}`"
    if asked.gpus_per_node:
        wants = f"the layout's {taken} GPUs take {asked.nodes} nodes of `{asked.gpus_per_node}`"
    says = f"{wants}, and partition `{here.name}` {gives}"
    gpus = [kind.gpus_of(asked.gpu_type) for kind in able]
    fuller = max(gpus)
    fullest = sum(kind.count for kind, has in zip(able, gpus, strict=True) if has == fuller)
    fitting = min(fullest, here.most_nodes or asked.nodes)
    if asked.gpus_per_node and _nodes_for(taken, fuller) <= fitting:
        more: Nearest = {"gpus_per_node": fuller}
        return _RequestFault(key, says, more if key != "nodes" else more | {"nodes": _nodes_for(taken, fuller)})
    elsewhere = _able(recipe, asked, others)
    if elsewhere:
        return _RequestFault(key, says, _nearest_partition(here.name, recipe, asked, elsewhere))
    if asked.gpus_per_node:
        return _RequestFault(key, f"{says}: a layout of at most {count * asked.gpus_per_node} GPUs would fit", {})
    return _RequestFault(key, says, {"nodes": count})


def _of_account(recipe: Recipe, slurm: Slurm) -> Iterator[_RequestFault]:
    """The fault of an account that is not the user's, where accounting knows the user; else Slurm judges."""
    account = recipe.slurm.account
    if account is not None and (mine := slurm.accounts()) and account.lower() not in mine:
        near = get_close_matches(account, mine, n=1) or mine[:1]
        says = f"you have no account `{account}`; yours are {_listed(mine)}"
        yield _RequestFault("account", says, {"account": near[0]})


def _limit_of(text: str) -> float:
    """Seconds of a partition's limit; infinity where sinfo names none."""
    try:
        return limit_s(text)
    except ValueError:
        return math.inf


def _listed(names: Sequence[str] | dict[str, Partition]) -> str:
    few = [f"`{name}`" for name in list(names)[:8]]
    return ", ".join(few) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
