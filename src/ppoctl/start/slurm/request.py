"""Whether a cluster can give a recipe what it requests, checked before submission.

`sbatch --test-only` judges the request. ppoctl explains a refusal with the nodes of the partition, sets the nearest
possible value, and calls `sbatch` again until Slurm accepts the job. The values in the hint are therefore accepted by
Slurm. Its answer alone is not sufficient in these cases:

    Slurm accepts   GPUs that do not fit the layout; a job that is signalled at its start; a partition that is down;
                    if the site does not enforce limits, a time limit above the partition's. Such a job waits forever
    Slurm refuses   nodes that are down, drained or reserved, which may return
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from ppoctl.core.errors import RecipeError, SlurmError, quoted
from ppoctl.core.finding import Finding, problem
from ppoctl.recipe.loading.load import Loaded
from ppoctl.recipe.parallel import devices, nodes_for, nodes_of, processes
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.slurm_table import limit_s, memory_mib
from ppoctl.start.slurm.partitions import Partition
from ppoctl.start.slurm.slurm_client import Slurm, SlurmAwayError

Nearest = Mapping[str, str | int]
"""Values to set instead, by their key in `[slurm]`."""
Fault = tuple[str, str, Nearest]
"""A value that the cluster cannot meet: its key in `[slurm]`, what is wrong, and the nearest possible values. The key
is empty if Slurm refuses the job for a reason that is not one of the keys."""

_KEYS = {
    "policy": "", "configuration": "", "account": "account", "qos": "qos", "feature": "constraint",
    "time limit": "time", "partition": "partition", "group": "partition", "permission": "partition",
}  # fmt: skip
"""Words of Slurm's messages, and the key that such a message is about. The first word that occurs decides."""
_ACCOUNTS = "sacctmgr show associations user=$USER format=account,qos"
_COMMANDS = {"account": _ACCOUNTS, "qos": _ACCOUNTS}
_NODES = "sinfo --format='%P %a %l %D %T %c %m %G %f'"
_ROUNDS = 10
"""Most times that a request is corrected: once for each key."""


def request_findings(loaded: Loaded, slurm: Slurm, script_of: Callable[[Recipe], str]) -> list[Finding]:
    """Return a finding for each value that this cluster cannot meet, with its origin and the nearest possible value.

    `script_of` returns the batch script of a recipe. Raises SlurmError if there is no Slurm or it does not answer.
    """
    partitions, recipe = slurm.partitions(), loaded.recipe
    if recipe.slurm.qos is not None:  # the limits of a QOS may replace those of the partition
        partitions = [replace(entry, limit="infinite", usual_limit="n/a", most_nodes=None) for entry in partitions]
    faults: list[Fault] = []
    sets: dict[str, str | int] = {}
    hint = _NODES
    for _ in range(_ROUNDS):
        fault = _of_layout(recipe) or _of_cluster(recipe, slurm, partitions, script_of(recipe))
        if fault is None:
            hint = f"change the recipe, or add `{_sets(sets)}`"
            break
        faults.append(fault)
        key, _, nearest = fault
        if not nearest:
            hint = _COMMANDS.get(key, _NODES)
            break
        sets |= nearest
        recipe = _with(recipe, nearest)
    return [_finding(fault, loaded, hint) for fault in faults]


def _finding(fault: Fault, loaded: Loaded, hint: str) -> Finding:
    key, what, nearest = fault
    text = f"{what}; nearest: `{_sets(nearest)}`" if nearest else what
    where, error = (loaded.origins[f"slurm.{key}"], RecipeError) if key else ("", SlurmError)
    return problem(text, where, hint, kind="slurm", error=error)


def _sets(nearest: Nearest) -> str:
    return " ".join(f"--set slurm.{key}={quoted(str(value))}" for key, value in nearest.items())


def _with(recipe: Recipe, nearest: Nearest) -> Recipe:
    return recipe.model_copy(update={"slurm": recipe.slurm.model_copy(update=dict(nearest))})


def _of_layout(recipe: Recipe) -> Fault | None:
    """Return a fault if there are too few GPUs for the layout, or nodes that the layout does not use."""
    table, count = recipe.slurm, devices(recipe)
    gpus, sizes, least = table.gpus_per_node, processes(recipe), nodes_for(count, table.gpus_per_node)
    layout = f"{', '.join(f'{role} {size}' for role, size in sizes.items())}, {recipe.cluster.placement}"
    most = least if gpus else count
    if gpus and table.nodes is not None and table.nodes < least:
        text = f"`slurm.nodes` `{table.nodes}` x `slurm.gpus_per_node` `{gpus}` are {table.nodes * gpus} GPUs"
        return "nodes", f"{text}, but the layout requires {count} ({layout})", {"nodes": least}
    if table.nodes is not None and table.nodes > most:
        text = f"the layout ({layout}) uses only {most} of the `{table.nodes}` nodes in `slurm.nodes`"
        return "nodes", f"{text}; the others would be idle", {"nodes": most}
    return None


def _of_cluster(recipe: Recipe, slurm: Slurm, partitions: Sequence[Partition], script: str) -> Fault | None:
    """Return the fault of a request; None if one of its partitions can meet it."""
    names, refusal = (recipe.slurm.partition or "").split(","), ""
    try:
        answer = slurm.would_accept(script, folder=Path.cwd())
        if recipe.slurm.partition is None:  # plugins of a site may choose another partition than the default
            names = re.findall(r" in partition (\S+)", answer)
    except SlurmAwayError:
        raise
    except SlurmError as error:
        refusal = error.message
        if recipe.slurm.partition is None:
            names = [entry.name for entry in partitions if entry.is_default]
    meant = [entry for entry in partitions if entry.name in names]
    usable = [entry for entry in partitions if entry.state == "up" and entry.is_shown and entry not in meant]
    # Partitions that show no nodes may not meet the request.
    others = sorted(usable, key=lambda entry: (not entry.kinds, not entry.is_default))
    faults = [_of_partition(recipe, partition, others) for partition in meant]
    if faults and all(faults):
        return faults[0]
    return _of_refusal(recipe, refusal, meant, others) if refusal else None


def _of_partition(recipe: Recipe, partition: Partition, others: Sequence[Partition]) -> Fault | None:
    """Return a fault if the job would never start in a partition, or would be signalled at its start."""
    warn_s, longest = recipe.slurm.warn_s, _limit_of(partition.limit)
    time_s = _limit_of(recipe.slurm.time) if recipe.slurm.time else min(longest, _limit_of(partition.usual_limit))
    if partition.state != "up":
        text = f"partition `{partition.name}` accepts no jobs: it is `{partition.state}`"
        return "partition", text, _usable(recipe, partition.name, others)
    if time_s > longest:
        text = f"a time limit of `{recipe.slurm.time}` is longer than that of partition `{partition.name}`"
        return "time", f"{text}, `{partition.limit}`", {"time": partition.limit}
    if warn_s >= time_s:
        text = f"the job would be signalled {warn_s} s before its end, but `slurm.time` is not set, and the default"
        longer: Nearest = {"time": str(math.ceil(2 * warn_s / 60))}
        nearest = longer if 2 * warn_s <= longest else {"warn_s": int(time_s) // 2}
        return "warn_s", f"{text} of partition `{partition.name}` is {time_s:g} s", nearest
    return None


def _of_refusal(
    recipe: Recipe, refusal: str, meant: Sequence[Partition], others: Sequence[Partition]
) -> Fault | None:
    """Return the fault that Slurm's message is about; None if only nodes are lacking that may return."""
    key = next((key for word, key in _KEYS.items() if word in refusal.lower()), "")
    kinds = [kind for partition in meant for kind in partition.kinds]
    if key in ("", "constraint") and kinds:
        faults = [_of_nodes(recipe, partition, others) for partition in meant]
        if all(faults):
            return faults[0]
        if "configuration" in refusal and _features(recipe) is None:
            key = "constraint"
        elif "configuration" in refusal and not all(kind.is_available for kind in kinds):
            return None
    text = f"`slurm.{key}` is `{getattr(recipe.slurm, key)}`: {refusal}" if key else refusal
    if key == "partition":
        names = [partition.name for partition in (*meant, *others)]
        nearest = _usable(recipe, recipe.slurm.partition or "", others)
        return key, f"{text}; partitions: {_listed(names)}", nearest
    return key, text, {}


def _of_nodes(recipe: Recipe, partition: Partition, others: Sequence[Partition]) -> Fault | None:
    """Return the fault of the first resource that no node of a partition has, or that too few nodes have."""
    table, found = recipe.slurm, _shortage(recipe, partition)
    if found is None:
        return None
    key, most = found
    nearest = _nearest(recipe, partition, others, *found)
    of_type = "" if table.gpu_type is None else f" of type `{table.gpu_type}`"
    if key == "constraint":
        features = _listed(_features_of(partition))
        return (
            key,
            f"no node of partition `{partition.name}` has `{table.constraint}`; its nodes have {features}",
            nearest,
        )
    if key == "nodes" and not most:
        key = "cpus_per_node" if table.memory is None else "memory"
        text = f"no single node of partition `{partition.name}` has as many GPUs{of_type} and CPUs and as much memory"
        return key, f"{text} as requested; `slurm.{key}` is `{getattr(table, key)}`", nearest
    if key == "nodes":
        wants, smaller = f"`slurm.nodes` is `{table.nodes}`", ""
        if gpus := table.gpus_per_node:
            wants = f"the layout's {devices(recipe)} GPUs require {nodes_of(recipe)} nodes of `{gpus}`{of_type}"
            smaller = "" if nearest else f": a layout of at most {most * gpus} GPUs would fit"
        text = f"{wants}, but partition `{partition.name}` has {most} such for a job{smaller}"
        return "nodes" if table.nodes else "gpus_per_node", text, nearest
    noun = {"gpus_per_node": f"GPUs{of_type}", "cpus_per_node": "CPUs", "memory": "of memory"}[key]
    text = f"no node of partition `{partition.name}` has `{getattr(table, key)}` {noun}"
    if key == "gpus_per_node" and table.gpu_type is not None and not most:
        types = _types(partition)
        has = f"its nodes have {_listed(types)}" if types else "its GPUs have no types: leave the key out"
        return "gpu_type", f"{text}; {has}", nearest
    return key, f"{text}; the most is {most}{'M' if key == 'memory' else ''}", nearest


def _shortage(recipe: Recipe, partition: Partition) -> tuple[str, int] | None:
    """Return the key of the first resource of which no node has enough, and the most that a node has; or `nodes` and
    the number of nodes that have enough of all, if there are too few. None: the partition is sufficient, or shows no
    nodes."""
    table = recipe.slurm
    kinds = [kind for kind in partition.kinds if (_features(recipe) or frozenset()) <= kind.features]
    if partition.kinds and not kinds:
        return "constraint", 0
    resources = {
        "gpus_per_node": (table.gpus_per_node or 0, [kind.gpus_of(table.gpu_type) for kind in kinds]),
        "cpus_per_node": (table.cpus_per_node or 0, [kind.cpus for kind in kinds]),
        "memory": (memory_mib(table.memory or "0"), [kind.memory_mib for kind in kinds]),
    }
    for key, (wanted, has) in resources.items():
        if kinds and wanted > max(has):
            return key, max(has)
    able = [all(has[index] >= wanted for wanted, has in resources.values()) for index in range(len(kinds))]
    count = sum(kind.count for kind, is_able in zip(kinds, able, strict=True) if is_able)
    count = min(count, partition.most_nodes or count)
    return ("nodes", count) if kinds and nodes_of(recipe) > count else None


def _nearest(recipe: Recipe, partition: Partition, others: Sequence[Partition], key: str, most: int) -> Nearest:
    """Return values with which the partition has enough of a resource, or else another partition that has.

    GPUs are regrouped first: the same number on nodes with the most GPUs. Empty: only a smaller layout would fit.
    """
    table = recipe.slurm
    elsewhere = _nearest_partition(
        partition.name, [other for other in others if other.kinds and _shortage(recipe, other) is None]
    )
    if key == "constraint":
        near = get_close_matches(table.constraint or "", _features_of(partition), n=1, cutoff=0.4)
        return elsewhere or ({"constraint": near[0]} if near else {})
    if not table.gpus_per_node or key not in ("gpus_per_node", "nodes"):
        return {key: f"{most}M" if key == "memory" else most} if most else elsewhere
    fullest = max(kind.gpus_of(table.gpu_type) for kind in partition.kinds)
    if not fullest:
        near = get_close_matches(table.gpu_type or "", _types(partition), n=1, cutoff=0)
        return elsewhere or ({"gpu_type": near[0]} if near else {})
    regrouped: dict[str, str | int] = {"gpus_per_node": fullest}
    if table.nodes is not None:
        regrouped["nodes"] = nodes_for(devices(recipe), fullest)
    if _shortage(_with(recipe, regrouped), partition) is None:
        return regrouped
    return elsewhere or (regrouped if key != "nodes" else {})


def _usable(recipe: Recipe, name: str, others: Sequence[Partition]) -> Nearest:
    """Return the partition with the nearest name among those that can meet the request, or else of all `others`."""
    return _nearest_partition(name, [other for other in others if _shortage(recipe, other) is None] or others)


def _nearest_partition(name: str, partitions: Sequence[Partition]) -> Nearest:
    names = [partition.name for partition in partitions]
    near = [*get_close_matches(name, names, n=1), *names]
    return {"partition": near[0]} if near else {}


def _features(recipe: Recipe) -> frozenset[str] | None:
    """Return the features that each node must have; None: the expression has other operators than `&`."""
    text = recipe.slurm.constraint or ""
    return None if re.search(r"[|,*()\[\]!]", text) else frozenset(re.findall(r"[^&\s]+", text))


def _features_of(partition: Partition) -> list[str]:
    return sorted({feature for kind in partition.kinds for feature in kind.features})


def _types(partition: Partition) -> list[str]:
    return sorted({type for kind in partition.kinds for type in kind.gpus if type})


def _limit_of(text: str) -> float:
    """Return the seconds of a partition's time limit; infinity if sinfo prints no limit."""
    try:
        return limit_s(text)
    except ValueError:
        return math.inf


def _listed(names: Sequence[str]) -> str:
    few = [f"`{name}`" for name in names[:8]]
    return (", ".join(few) or "none") + (f" and {len(names) - 8} more" if len(names) > 8 else "")
