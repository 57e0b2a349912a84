"""The resources that a recipe requests from a cluster, checked before submission.

Slurm accepts a request for more nodes than a partition has, and the job then waits forever.

    request_of       nodes, GPUs and time, from the recipe alone
    require_request  the same, or one error with every value that this cluster cannot meet, each with its
                     origin and the nearest possible value

If `slurm.nodes` does not fit the layout, the cluster is checked with the corrected number.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from ppoctl.errors import RecipeError, quoted
from ppoctl.finding import problem
from ppoctl.loading.load import Loaded
from ppoctl.recipe.parallel import devices, processes
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.slurm import limit_s, memory_mib
from ppoctl.slurm.client import Slurm
from ppoctl.slurm.partitions import NodeKind, Partition

Nearest = dict[str, str | int]
"""Values to set instead, by their key in `[slurm]`."""


@dataclass(frozen=True)
class Request:
    """Nodes that a recipe requests from a cluster, the time limit, and the resources of each node."""

    nodes: int
    gpus_per_node: int | None
    """GPUs of each node; None: no GPUs, all processes run on CPUs."""
    gpu_type: str | None
    """Type of the GPUs; None: any type."""
    cpus_per_node: int
    """CPUs of each node; 0: the cluster's default."""
    memory_mib: float
    """Host memory of each node; 0: the cluster's default, or all memory of the node."""
    partitions: tuple[str, ...]
    """Names of the possible partitions; empty: the cluster chooses."""
    constraint: str | None
    time_s: float | None
    """Time limit in seconds; None: the partition's default."""


@dataclass(frozen=True)
class _RequestFault:
    """A value that the cluster cannot meet."""

    key: str
    """Key in `[slurm]` to change; the line of the error begins with the origin of this key."""
    message: str
    nearest: Nearest


def request_of(recipe: Recipe) -> Request:
    """Return the recipe's request. Without `slurm.nodes`, the layout sets the number of nodes; without GPUs, 1."""
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
    """Return the recipe's request if the cluster can meet it.

    Raises RecipeError with a line for each value that the cluster cannot meet; SlurmError if there is no Slurm, or if
    Slurm does not answer.
    """
    request = request_of(loaded.recipe)
    faults = list(_of_layout(loaded.recipe))
    nodes = next((int(fault.nearest["nodes"]) for fault in faults), request.nodes)
    partitions, settings = slurm.partitions(), slurm.configuration()
    faults += _of_cluster(loaded.recipe, replace(request, nodes=nodes), partitions, is_routed=_is_routed(settings))
    if "associations" in settings.get("AccountingStorageEnforce", ""):
        faults += _of_account(loaded.recipe, slurm)
    if faults:
        raise _as_error(faults, loaded)
    return request


def _as_error(faults: Sequence[_RequestFault], loaded: Loaded) -> RecipeError:
    """Return all faults as one error, one line each; the hint has the nearest values of all faults."""
    lines: list[str] = []
    sets: Nearest = {}
    for fault in faults:
        words = _sets(fault.nearest)
        text = f"{fault.message}; nearest: `{words}`" if words else fault.message
        lines.append(str(problem(text, loaded.origins[f"slurm.{fault.key}"])))
        sets |= fault.nearest
    return RecipeError("\n".join(lines), hint=f"change the recipe, or add `{_sets(sets)}`" if sets else "sinfo")


def _sets(nearest: Nearest) -> str:
    return " ".join(f"--set slurm.{key}={quoted(str(value))}" for key, value in nearest.items())


def _nodes_for(count: int, gpus_per_node: int | None) -> int:
    """Return the number of nodes for `count` devices; 1 without GPUs, since CPU processes share a node."""
    return math.ceil(count / gpus_per_node) if gpus_per_node else 1


def _of_layout(recipe: Recipe) -> Iterator[_RequestFault]:
    """Yield a fault if there are too few GPUs for the layout, or nodes that the layout does not use."""
    table, count = recipe.slurm, devices(recipe)
    if table.nodes is None:
        return
    gpus, sizes = table.gpus_per_node, processes(recipe)
    layout = f"{', '.join(f'{role} {size}' for role, size in sizes.items())}, {recipe.cluster.placement}"
    least = _nodes_for(count, gpus)
    if gpus and table.nodes < least:
        text = f"`slurm.nodes` `{table.nodes}` x `slurm.gpus_per_node` `{gpus}` are {table.nodes * gpus} GPUs"
        yield _RequestFault("nodes", f"{text}, but the layout requires {count} ({layout})", {"nodes": least})
    most = least if gpus else count
    if table.nodes > most:
        text = (
            f"the layout ({layout}) uses only {most} of the `{table.nodes}` nodes in `slurm.nodes`; "
            "the others would be idle"
        )
        yield _RequestFault("nodes", text, {"nodes": most})


def _is_routed(settings: dict[str, str]) -> bool:
    """Return whether plugins of the cluster may choose the partition of a job that sets none."""
    return any(settings.get(name) != "(null)" for name in ("JobSubmitPlugins", "CliFilterPlugins"))


def _of_cluster(
    recipe: Recipe, request: Request, partitions: Sequence[Partition], *, is_routed: bool
) -> Iterator[_RequestFault]:
    """Yield the faults of the request on the partitions that the request names.

    If it names none, these are all partitions if a plugin chooses (`is_routed`), otherwise the default partition. If
    one of several partitions can meet the request, there is no fault.
    """
    if recipe.slurm.qos is not None:  # the limits of a QOS may replace those of the partition
        partitions = [replace(entry, limit="infinite", usual_limit="n/a", most_nodes=None) for entry in partitions]
    known = {partition.name: partition for partition in partitions}
    usable = [partition for partition in partitions if partition.is_up and partition.is_shown]
    meant: dict[str, Partition] = {}
    for name in request.partitions:
        if name in known:
            meant[name] = known[name]
            continue
        others = [partition.name for partition in usable] or list(known)
        nearest = _nearest_partition(name, recipe, request, usable)
        text = f"the cluster has no partition `{name}`; it has {_listed(others)}"
        yield _RequestFault("partition", text, nearest)
        meant |= {other: known[other] for other in map(str, nearest.values())}
    if not request.partitions:
        meant = {entry.name: entry for entry in partitions if entry.is_default or (is_routed and entry.is_up)}
    if not request.partitions and not meant:
        nearest = _nearest_partition("", recipe, request, usable)
        text = f"the cluster has no default partition, and `slurm.partition` names none of {_listed(known)}"
        yield _RequestFault("partition", text, nearest)
        meant = {other: known[other] for other in map(str, nearest.values())}
    by_partition = [list(_of_partition(recipe, request, partition, usable)) for partition in meant.values()]
    if by_partition and all(by_partition):
        yield from min(by_partition, key=lambda faults: sum(not fault.nearest for fault in faults))


def _nearest_partition(name: str, recipe: Recipe, request: Request, usable: Sequence[Partition]) -> Nearest:
    """Return the partition with the nearest name among those that can meet the request, or else of all `usable`."""
    able = _able(recipe, request, usable) or list(usable)
    names = [partition.name for partition in able]
    usual = [partition.name for partition in able if partition.is_default] or names
    near = get_close_matches(name, names, n=1) or usual
    return {"partition": near[0]} if near else {}


def _able(recipe: Recipe, request: Request, partitions: Sequence[Partition]) -> list[Partition]:
    """Return the partitions that can meet the request; last, those that may meet it but show no nodes."""
    able = [partition for partition in partitions if not list(_of_partition(recipe, request, partition, ()))]
    return sorted(able, key=lambda partition: not partition.kinds)


def _of_partition(
    recipe: Recipe, request: Request, partition: Partition, others: Sequence[Partition]
) -> Iterator[_RequestFault]:
    """Yield the faults of the request on one partition; `others` are partitions that may meet it instead."""
    if not partition.is_up:
        text = f"partition `{partition.name}` accepts no jobs: it is `{partition.state}`"
        yield _RequestFault("partition", text, _nearest_partition(partition.name, recipe, request, others))
    yield from _of_time(recipe, request, partition)
    if not partition.kinds:
        return
    kinds, faults = _of_constraint(request, partition)
    yield from faults
    if faults:
        return
    short = list(_of_one_node(recipe, request, partition, kinds, others))
    yield from short
    able = [kind for kind in kinds if _is_enough(kind, request)]
    if short:
        return
    if not able:
        yield _no_single_node(request, partition, kinds)
        return
    count = min(sum(kind.count for kind in able), partition.most_nodes or request.nodes)
    if request.nodes > count:
        yield _too_few_nodes(recipe, request, partition, able, count, others)


def _of_time(recipe: Recipe, request: Request, partition: Partition) -> Iterator[_RequestFault]:
    warn_s, longest = recipe.slurm.warn_s, _limit_of(partition.limit)
    if request.time_s is not None and request.time_s > longest:
        text = (
            f"a time limit of `{recipe.slurm.time}` is longer than that of partition `{partition.name}`, "
            f"`{partition.limit}`"
        )
        nearest: Nearest = {"time": partition.limit}
        yield _RequestFault("time", text, nearest if warn_s < longest else nearest | {"warn_s": int(longest) // 2})
    usual = min(longest, _limit_of(partition.usual_limit))
    if request.time_s is None and warn_s >= usual:
        text = (
            f"the job would be signalled {warn_s} s before its end, but the default time limit of partition "
            f"`{partition.name}` is {usual:g} s and `slurm.time` is not set"
        )
        longer: Nearest = (
            {"time": math.ceil(2 * warn_s / 60)} if 2 * warn_s <= longest else {"warn_s": int(usual) // 2}
        )
        yield _RequestFault("warn_s", text, longer)


def _of_constraint(request: Request, partition: Partition) -> tuple[list[NodeKind], list[_RequestFault]]:
    """Return the nodes with the requested features, or a fault if no node has them.

    If the expression has other operators than `&` and `|`, the only faults are features that no node has; Slurm
    checks the rest.
    """
    if request.constraint is None:
        return list(partition.kinds), []
    features = sorted({feature for kind in partition.kinds for feature in kind.features})
    words = re.findall(r"[^&|,*()\[\]!\s]+", re.sub(r"\*\d+", "", request.constraint))
    missing = [word for word in words if word not in features]
    if re.search(r"[*()\[\]!,]", request.constraint):
        kinds = list(partition.kinds)
        if not missing:
            return kinds, []
    else:
        options = [set(re.split(r"\s*&\s*", part.strip())) for part in request.constraint.split("|")]
        kinds = [kind for kind in partition.kinds if any(option <= kind.features for option in options)]
        if kinds:
            return kinds, []
    lacking = _listed(missing) if missing else f"`{request.constraint}`"
    has = f"its nodes have {_listed(features)}" if features else "its nodes have no features: leave the key out"
    near = get_close_matches(missing[0], features, n=1, cutoff=0.4) if missing and len(words) == 1 else []
    text = f"no node of partition `{partition.name}` has {lacking}; {has}"
    return kinds, [_RequestFault("constraint", text, {"constraint": near[0]} if near else {})]


def _of_one_node(
    recipe: Recipe, request: Request, partition: Partition, kinds: Sequence[NodeKind], others: Sequence[Partition]
) -> Iterator[_RequestFault]:
    """Yield the faults of resources that a single node must have."""
    gpus = [kind.gpus_of(request.gpu_type) for kind in kinds]
    if request.gpu_type is not None and not any(gpus) and any(kind.gpus for kind in kinds):
        yield _no_such_type(recipe, request, partition, kinds, others)
    elif request.gpus_per_node is not None and request.gpus_per_node > max(gpus, default=0):
        fullest = [kind for kind, count in zip(kinds, gpus, strict=True) if count == max(gpus)]
        yield _too_many_gpus(recipe, request, partition, fullest, others)
    most_cpus = max((kind.cpus for kind in kinds), default=0)
    if request.cpus_per_node > most_cpus:
        text = f"no node of partition `{partition.name}` has `{request.cpus_per_node}` CPUs; the most is {most_cpus}"
        yield _RequestFault("cpus_per_node", text, {"cpus_per_node": most_cpus})
    most_mib = max((kind.memory_mib for kind in kinds), default=0)
    if request.memory_mib > most_mib:
        text = (
            f"no node of partition `{partition.name}` has `{recipe.slurm.memory}` of memory; the most is {most_mib}M"
        )
        yield _RequestFault("memory", text, {"memory": f"{most_mib}M"})


def _no_such_type(
    recipe: Recipe, request: Request, partition: Partition, kinds: Sequence[NodeKind], others: Sequence[Partition]
) -> _RequestFault:
    """Return the fault of a GPU type that no node has; nearest: a partition with it, or else a sufficient type."""
    types = sorted({type for kind in kinds for type in kind.gpus if type})
    has = f"its nodes have {_listed(types)}" if types else "its GPUs have no types: leave the key out"
    text = f"no node of partition `{partition.name}` has GPUs of type `{request.gpu_type}`; {has}"
    if elsewhere := [other for other in _able(recipe, request, others) if other.kinds]:
        return _RequestFault("gpu_type", text, _nearest_partition(partition.name, recipe, request, elsewhere))
    enough = [type for type in types if any(kind.gpus_of(type) >= (request.gpus_per_node or 0) for kind in kinds)]
    near = get_close_matches(request.gpu_type or "", enough, n=1) or enough
    return _RequestFault("gpu_type", text, {"gpu_type": near[0]} if near else {})


def _too_many_gpus(
    recipe: Recipe, request: Request, partition: Partition, fullest: Sequence[NodeKind], others: Sequence[Partition]
) -> _RequestFault:
    """Return the fault of more GPUs per node than a node has; `fullest` are the nodes with the most GPUs.

    Nearest: more nodes with fewer GPUs each, if there are enough; else another partition; else a smaller layout.
    """
    most = max((kind.gpus_of(request.gpu_type) for kind in fullest), default=0)
    of_type = "" if request.gpu_type is None else f" of type `{request.gpu_type}`"
    text = f"no node of partition `{partition.name}` has `{request.gpus_per_node}` GPUs{of_type}; the most is {most}"
    count = sum(kind.count for kind in fullest)
    count = min(count, partition.most_nodes or count)
    if most and _nodes_for(devices(recipe), most) <= count:
        nearest: Nearest = {"gpus_per_node": most}
        if recipe.slurm.nodes is not None:
            nearest["nodes"] = _nodes_for(devices(recipe), most)
        return _RequestFault("gpus_per_node", text, nearest)
    elsewhere = _able(recipe, request, others)
    if not elsewhere and most:
        text += f", and a layout of at most {count * most} GPUs would fit on {count} of them"
    return _RequestFault("gpus_per_node", text, _nearest_partition(partition.name, recipe, request, elsewhere))


def _is_enough(kind: NodeKind, request: Request) -> bool:
    wanted = (request.gpus_per_node or 0, request.cpus_per_node, request.memory_mib)
    available = (kind.gpus_of(request.gpu_type), kind.cpus, kind.memory_mib)
    return all(has >= want for has, want in zip(available, wanted, strict=True))


def _no_single_node(request: Request, partition: Partition, kinds: Sequence[NodeKind]) -> _RequestFault:
    """Return the fault of a request whose resources exist only on different nodes."""
    with_gpus = [kind for kind in kinds if kind.gpus_of(request.gpu_type) >= (request.gpus_per_node or 0)]
    best = max(with_gpus, key=lambda kind: (kind.count, min(kind.cpus, request.cpus_per_node)))
    nearest: Nearest = {}
    if best.cpus < request.cpus_per_node:
        nearest["cpus_per_node"] = best.cpus
    if best.memory_mib < request.memory_mib:
        nearest["memory"] = f"{best.memory_mib}M"
    parts = (
        f"{request.gpus_per_node or 0} GPUs",
        f"{request.cpus_per_node} CPUs",
        f"{request.memory_mib:g} MiB of memory",
    )
    text = f"no single node of partition `{partition.name}` has {', '.join(parts)}"
    return _RequestFault("cpus_per_node" if "cpus_per_node" in nearest else "memory", text, nearest)


def _too_few_nodes(
    recipe: Recipe,
    request: Request,
    partition: Partition,
    able: Sequence[NodeKind],
    count: int,
    others: Sequence[Partition],
) -> _RequestFault:
    """Return the fault of more nodes than a partition has, or than it gives to one job.

    Nearest: more GPUs per node, if that is enough; else another partition; else fewer nodes for a smaller layout.
    """
    gives = f"gives {count} to one job" if count == partition.most_nodes else f"has {count} such"
    key, taken = "nodes" if recipe.slurm.nodes is not None else "gpus_per_node", devices(recipe)
    wants = f"`slurm.nodes` is `{request.nodes}`"
    if request.gpus_per_node:
        wants = f"the layout's {taken} GPUs require {request.nodes} nodes of `{request.gpus_per_node}`"
    text = f"{wants}, but partition `{partition.name}` {gives}"
    gpus = [kind.gpus_of(request.gpu_type) for kind in able]
    fuller = max(gpus)
    fullest = sum(kind.count for kind, has in zip(able, gpus, strict=True) if has == fuller)
    fitting = min(fullest, partition.most_nodes or request.nodes)
    if request.gpus_per_node and _nodes_for(taken, fuller) <= fitting:
        more: Nearest = {"gpus_per_node": fuller}
        return _RequestFault(key, text, more if key != "nodes" else more | {"nodes": _nodes_for(taken, fuller)})
    elsewhere = _able(recipe, request, others)
    if elsewhere:
        return _RequestFault(key, text, _nearest_partition(partition.name, recipe, request, elsewhere))
    if request.gpus_per_node:
        return _RequestFault(key, f"{text}: a layout of at most {count * request.gpus_per_node} GPUs would fit", {})
    return _RequestFault(key, text, {"nodes": count})


def _of_account(recipe: Recipe, slurm: Slurm) -> Iterator[_RequestFault]:
    """Yield a fault if the user has accounts but not this account; without accounting, Slurm checks the account."""
    account = recipe.slurm.account
    if account is not None and (mine := slurm.accounts()) and account.lower() not in mine:
        near = get_close_matches(account, mine, n=1) or mine[:1]
        text = f"you have no account `{account}`; yours are {_listed(mine)}"
        yield _RequestFault("account", text, {"account": near[0]})


def _limit_of(text: str) -> float:
    """Return the seconds of a partition's time limit; infinity if sinfo prints no limit."""
    try:
        return limit_s(text)
    except ValueError:
        return math.inf


def _listed(names: Sequence[str] | dict[str, Partition]) -> str:
    few = [f"`{name}`" for name in list(names)[:8]]
    return ", ".join(few) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
