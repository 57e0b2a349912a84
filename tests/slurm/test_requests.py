"""Requests that a cluster cannot meet are refused before the queue, with the closest request that it can meet.

The outputs of `sinfo` are recorded: from a real Slurm 22.05 (`LAB`; `TYPED`: nodes with GPUs of two types, a cloud
partition whose nodes are powered down, a hidden partition, and a partition of a group without the user), and in the
form of larger and newer clusters (`SITE`: types of GPUs with their sockets, limits, features, nodes that differ;
written by hand).
"""

import os
import pwd
import shlex
from pathlib import Path

import pytest

from ppoctl.errors import RecipeError, SlurmError
from ppoctl.loading.load import Loaded, load
from ppoctl.slurm.client import Slurm
from ppoctl.slurm.partitions import partitions_in
from ppoctl.slurm.request import request_of, require_request

ROOT = Path(__file__).resolve().parents[2]
LAB = """\
main*|up|infinite|10:00|1-infinite|2|idle|2|4000|gpu:2|(null)
graced|up|infinite|10:00|1-infinite|2|idle|2|4000|gpu:2|(null)
urgent|up|infinite|10:00|1-infinite|2|idle|2|4000|gpu:2|(null)
"""
TYPED = """\
main*|up|infinite|10:00|1-infinite|1|idle|4|4000|gpu:a100:2|(null)
main*|up|infinite|10:00|1-infinite|1|idle|4|4000|gpu:a100:1,gpu:h100:1|(null)
cloud|up|infinite|n/a|1-infinite|0|n/a|0|0|(null)|(null)
hid|up|infinite|n/a|1-infinite|1|idle|4|4000|gpu:a100:2|(null)
closed2|up|infinite|n/a|1-infinite|1|idle|4|4000|gpu:a100:2|(null)
"""
TYPED_SHOWN = "main cloud"
SITE = """\
cpu*|up|2-00:00:00|1:00:00|1-infinite|100|allocated|64|256000|(null)|icelake,ib
gpu|up|1-00:00:00|n/a|1-8|12|mixed|128|1031000|gpu:a100:4(S:0-1),gres:lscratch:1T|a100,ib
gpu|up|1-00:00:00|n/a|1-8|4|down*|192|2063000|gpu:h100:8(S:0,3)|h100,ib
gpu|up|1-00:00:00|n/a|1-8|2|drained|32|128000|gpu:a100:2(S:0-1)|a100
debug|up|30:00|n/a|1-2|2|idle~|128|1031000|gpu:a100:4|a100,ib
retired|inact|infinite|n/a|1-infinite|8|down|32|64000|gpu:v100:4|v100
"""
SHOWN = "cpu gpu debug retired main graced urgent"
ACCOUNTS = "physics\nphysics_long\nphysics\n"
SETTINGS = """\
Configuration data as of 2026-11-23T04:19:44
AccountingStorageEnforce = associations,limits,qos,safe
CliFilterPlugins        = (null)
EnforcePartLimits       = NO
JobSubmitPlugins        = (null)

Slurmctld(primary) at site is UP
"""
ROUTED = SETTINGS.replace("JobSubmitPlugins        = (null)", "JobSubmitPlugins        = lua")


def programs(
    folder: Path,
    sinfo: str = SITE,
    accounts: str | None = ACCOUNTS,
    *,
    settings: str = SETTINGS,
    shown: str = SHOWN,
) -> Slurm:
    """Return a cluster whose programs print the recorded output."""
    folder.mkdir(exist_ok=True)
    recorded = {"sinfo": sinfo, "shown": shown, "sacctmgr": accounts, "scontrol": settings}
    for name, text in recorded.items():
        (folder / f"{name}.txt").write_text(text or "")
    user = f"user={pwd.getpwuid(os.geteuid()).pw_name}"
    answers = {
        "sinfo": f"case $* in *--all*) cat {folder}/sinfo.txt;; *) cat {folder}/shown.txt;; esac",
        "sacctmgr": f"case $* in *' {user} '*) cat {folder}/sacctmgr.txt;; esac",
        "scontrol": f"cat {folder}/scontrol.txt",
    }
    if accounts is None:
        answers["sacctmgr"] = "echo You are not running a supported accounting_storage plugin; exit 1"
    for name, says in answers.items():
        (folder / name).write_text(f"#!/bin/sh\n{says}\n")
        (folder / name).chmod(0o755)
    return Slurm({"PATH": f"{folder}:/usr/bin:/bin", "USER": "of-the-shell-before-su"})


def recipe(*sets: str, data: int = 1) -> Loaded:
    """Return the quickstart in a layout of this many devices."""
    layout = [f"actor.parallel={{data={data}}}"] if data > 1 else []
    return load([ROOT / "recipes" / "quickstart.toml"], [*layout, *sets], {})


GPUS = ("slurm.partition=gpu", "slurm.gpus_per_node=4")
CASES: list[tuple[str, int, tuple[str, ...], str, str]] = [
    (
        "too few nodes for the layout",
        16,
        (*GPUS, "slurm.nodes=2"),
        "--set: `slurm.nodes` `2` x `slurm.gpus_per_node` `4` are 8 GPUs, but the layout requires 16 (actor 16, "
        "critic 16, generator 1, colocated); nearest: `--set slurm.nodes=4`",
        "--set slurm.nodes=4",
    ),
    (
        "nodes without work",
        8,
        (*GPUS, "slurm.nodes=5"),
        "--set: the layout (actor 8, critic 8, generator 1, colocated) uses only 2 of the `5` nodes in "
        "`slurm.nodes`; the others would be idle; nearest: `--set slurm.nodes=2`",
        "--set slurm.nodes=2",
    ),
    (
        "a partition that is not there",
        4,
        ("slurm.partition=gpus", "slurm.gpus_per_node=4"),
        "--set: the cluster has no partition `gpus`; it has `cpu`, `gpu`, `debug`; nearest: `--set "
        "slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    (
        "a partition that is closed",
        4,
        ("slurm.partition=retired", "slurm.gpus_per_node=4"),
        "--set: partition `retired` accepts no jobs: it is `inact`; nearest: `--set slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    (
        "a time limit beyond the partition's",
        4,
        (*GPUS, "slurm.time=3-00:00:00"),
        "--set: a time limit of `3-00:00:00` is longer than that of partition `gpu`, `1-00:00:00`; nearest: `--set "
        "slurm.time=1-00:00:00`",
        "--set slurm.time=1-00:00:00",
    ),
    (
        "a warning before the job begins",
        1,
        ("slurm.warn_s=4000",),
        "--set: the job would be signalled 4000 s before its end, but the default time limit of partition `cpu` is "
        "3600 s and `slurm.time` is not set; nearest: `--set slurm.time=134`",
        "--set slurm.time=134",
    ),
    (
        "more GPUs than any node has",
        16,
        ("slurm.partition=gpu", "slurm.gpus_per_node=16", "slurm.nodes=1"),
        "--set: no node of partition `gpu` has `16` GPUs; the most is 8; nearest: `--set slurm.gpus_per_node=8 --set "
        "slurm.nodes=2`",
        "--set slurm.gpus_per_node=8 --set slurm.nodes=2",
    ),
    (
        "GPUs where there are none",
        1,
        ("slurm.gpus_per_node=1",),
        "--set: no node of partition `cpu` has `1` GPUs; the most is 0; nearest: `--set slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    (
        "more CPUs than any node has",
        1,
        ("slurm.cpus_per_node=65",),
        "--set: no node of partition `cpu` has `65` CPUs; the most is 64; nearest: `--set slurm.cpus_per_node=64`",
        "--set slurm.cpus_per_node=64",
    ),
    (
        "more memory than any node has",
        1,
        ("slurm.memory=1T",),
        "--set: no node of partition `cpu` has `1T` of memory; the most is 256000M; nearest: `--set "
        "slurm.memory=256000M`",
        "--set slurm.memory=256000M",
    ),
    (
        "more nodes than the partition gives to one job",
        40,
        GPUS,
        "--set: the layout's 40 GPUs require 10 nodes of `4`, but partition `gpu` gives 8 to one job: a layout of at "
        "most 32 GPUs would fit",
        "",
    ),
    (
        "a feature that no node has",
        4,
        (*GPUS, "slurm.constraint=a1000"),
        "--set: no node of partition `gpu` has `a1000`; its nodes have `a100`, `h100`, `ib`; nearest: `--set "
        "slurm.constraint=a100`",
        "--set slurm.constraint=a100",
    ),
    (
        "features that no node has together",
        4,
        (*GPUS, "slurm.constraint=a100&h100"),
        "--set: no node of partition `gpu` has `a100&h100`; its nodes have `a100`, `h100`, `ib`",
        "",
    ),
    (
        "an account of somebody else",
        1,
        ("slurm.account=phisics",),
        "--set: you have no account `phisics`; yours are `physics`, `physics_long`; nearest: `--set "
        "slurm.account=physics`",
        "--set slurm.account=physics",
    ),
    (
        "a type of GPUs that no node has",
        4,
        (*GPUS, "slurm.gpu_type=h1000"),
        "--set: no node of partition `gpu` has GPUs of type `h1000`; its nodes have `a100`, `h100`; nearest: `--set "
        "slurm.gpu_type=h100`",
        "--set slurm.gpu_type=h100",
    ),
    (
        "a type of GPUs that another partition has",
        4,
        ("slurm.partition=debug", "slurm.gpus_per_node=4", "slurm.gpu_type=h100"),
        "--set: no node of partition `debug` has GPUs of type `h100`; its nodes have `a100`; nearest: `--set "
        "slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    (
        "more GPUs of a type than any node has",
        8,
        ("slurm.partition=gpu", "slurm.gpus_per_node=8", "slurm.gpu_type=a100"),
        "--set: no node of partition `gpu` has `8` GPUs of type `a100`; the most is 4; nearest: `--set "
        "slurm.gpus_per_node=4`",
        "--set slurm.gpus_per_node=4",
    ),
    (
        "more nodes with a type of GPUs than there are",
        40,
        ("slurm.partition=gpu", "slurm.gpus_per_node=8", "slurm.gpu_type=h100"),
        "--set: the layout's 40 GPUs require 5 nodes of `8`, but partition `gpu` has 4 such: a layout of at most 32 "
        "GPUs would fit",
        "",
    ),
    (
        "more nodes than need be, of which there are too few",
        24,
        ("slurm.partition=gpu", "slurm.gpus_per_node=2", "slurm.nodes=12"),
        "--set: the layout's 24 GPUs require 12 nodes of `2`, but partition `gpu` gives 8 to one job; nearest: "
        "`--set slurm.gpus_per_node=8 --set slurm.nodes=3`",
        "--set slurm.gpus_per_node=8 --set slurm.nodes=3",
    ),
    (
        "too few nodes in this partition and enough in another",
        12,
        ("slurm.partition=debug", "slurm.gpus_per_node=4"),
        "--set: the layout's 12 GPUs require 3 nodes of `4`, but partition `debug` gives 2 to one job; nearest: "
        "`--set slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    (
        "what only different nodes have",
        4,
        (*GPUS, "slurm.cpus_per_node=150", "slurm.memory=1T", "slurm.constraint=a100"),
        "--set: no node of partition `gpu` has `150` CPUs; the most is 128; nearest: `--set "
        "slurm.cpus_per_node=128`\n"
        "--set: no node of partition `gpu` has `1T` of memory; the most is 1031000M; nearest: `--set "
        "slurm.memory=1031000M`",
        "--set slurm.cpus_per_node=128 --set slurm.memory=1031000M",
    ),
    (
        "everything at once",
        16,
        (*GPUS, "slurm.nodes=3", "slurm.time=2-00", "slurm.account=chemistry", "slurm.constraint=v100"),
        "--set: `slurm.nodes` `3` x `slurm.gpus_per_node` `4` are 12 GPUs, but the layout requires 16 (actor 16, "
        "critic 16, generator 1, colocated); nearest: `--set slurm.nodes=4`\n"
        "--set: a time limit of `2-00` is longer than that of partition `gpu`, `1-00:00:00`; nearest: `--set "
        "slurm.time=1-00:00:00`\n"
        "--set: no node of partition `gpu` has `v100`; its nodes have `a100`, `h100`, `ib`; nearest: `--set "
        "slurm.constraint=h100`\n"
        "--set: you have no account `chemistry`; yours are `physics`, `physics_long`; nearest: `--set "
        "slurm.account=physics`",
        "--set slurm.nodes=4 --set slurm.time=1-00:00:00 --set slurm.constraint=h100 --set slurm.account=physics",
    ),
]


@pytest.mark.parametrize(("data", "sets", "line", "nearest"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_impossible_request_is_refused_with_the_nearest_possible(
    tmp_path: Path, data: int, sets: tuple[str, ...], line: str, nearest: str
) -> None:
    slurm = programs(tmp_path / "bin")
    with pytest.raises(RecipeError) as caught:
        require_request(recipe(*sets, data=data), slurm)
    assert caught.value.message == line
    assert caught.value.hint == (f"change the recipe, or add `{nearest}`" if nearest else "sinfo")
    if nearest:
        words = shlex.split(nearest)
        require_request(recipe(*sets, *words[1::2], data=data), slurm)


def test_resources_of_different_nodes_are_not_combined(tmp_path: Path) -> None:
    kinds = ("64|100000|gpu:8|(null)", "128|200000|gpu:2|x")
    slurm = programs(tmp_path / "bin", "".join(f"p*|up|infinite|n/a|1-infinite|4|idle|{kind}\n" for kind in kinds))
    wanted = recipe("slurm={gpus_per_node=8, cpus_per_node=100, memory='150G'}", data=8)
    with pytest.raises(RecipeError) as caught:
        require_request(wanted, slurm)
    assert caught.value.message == (
        "--set: no single node of partition `p` has 8 GPUs, 100 CPUs, 153600 MiB of memory; nearest: `--set "
        "slurm.cpus_per_node=64 --set slurm.memory=100000M`"
    )


def test_more_nodes_than_the_partition_has_are_refused(tmp_path: Path) -> None:
    """Slurm accepts it: on CPUs each device may have its own node."""
    slurm = programs(tmp_path / "bin", LAB, None)
    with pytest.raises(RecipeError) as caught:
        require_request(recipe("slurm.nodes=5", data=5), slurm)
    assert caught.value.message == (
        "--set: `slurm.nodes` is `5`, but partition `main` has 2 such; nearest: `--set slurm.nodes=2`"
    )


def test_other_faults_are_reported_for_the_partition_meant(tmp_path: Path) -> None:
    slurm = programs(tmp_path / "bin", LAB, None)
    with pytest.raises(RecipeError) as caught:
        require_request(recipe("slurm={partition='mian', gpus_per_node=4}", data=8), slurm)
    assert caught.value.message == (
        "--set: the cluster has no partition `mian`; it has `main`, `graced`, `urgent`; nearest: `--set "
        "slurm.partition=main`\n"
        "--set: no node of partition `main` has `4` GPUs; the most is 2, and a layout of at most 4 GPUs would fit on "
        "2 of them"
    )


def test_request_passes_if_any_partition_of_a_routing_plugin_fits(tmp_path: Path) -> None:
    """The default partition has no GPUs, and no option names another: the site's plugin sends each job to the right
    partition."""
    for settings in (ROUTED, ""):  # a controller that reports no settings may have one
        slurm = programs(tmp_path / "bin", settings=settings)
        assert require_request(recipe("slurm.gpus_per_node=4", data=8), slurm).nodes == 2
    slurm = programs(tmp_path / "bin", SITE.replace("*", "", 1), settings=ROUTED)
    assert require_request(recipe("slurm.gpus_per_node=4", data=8), slurm).nodes == 2


def test_request_that_no_routed_partition_meets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        require_request(recipe("slurm.gpus_per_node=16", data=16), programs(tmp_path / "bin", settings=ROUTED))
    assert caught.value.message == (
        "--set: no node of partition `gpu` has `16` GPUs; the most is 8; nearest: `--set slurm.gpus_per_node=8`"
    )


def test_gpu_types_are_mixed_only_if_no_type_is_requested(tmp_path: Path) -> None:
    slurm = programs(tmp_path / "bin", TYPED, shown=TYPED_SHOWN)
    assert require_request(recipe("slurm.gpus_per_node=2", data=4), slurm).nodes == 2
    assert require_request(recipe("slurm={gpus_per_node=1, gpu_type='h100'}"), slurm).gpu_type == "h100"
    with pytest.raises(
        RecipeError, match="the layout's 4 GPUs require 2 nodes of `2`, but partition `main` has 1 such"
    ):
        require_request(recipe("slurm={gpus_per_node=2, gpu_type='a100'}", data=4), slurm)


def test_gpu_type_on_untyped_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="its GPUs have no types: leave the key out"):
        require_request(recipe("slurm={gpus_per_node=2, gpu_type='a100'}", data=2), programs(tmp_path / "bin", LAB))


def test_qos_limits_replace_partition_limits(tmp_path: Path) -> None:
    slurm = programs(tmp_path / "bin")
    wide = recipe(*GPUS, "slurm.time=3-00:00:00", "slurm.qos=long", data=40)
    assert require_request(wide, slurm).nodes == 10  # the partition: one day, eight nodes
    require_request(recipe("slurm.warn_s=4000", "slurm.qos=long"), slurm)


def test_partition_with_hidden_nodes_is_not_checked(tmp_path: Path) -> None:
    slurm = programs(tmp_path / "bin", TYPED, shown=TYPED_SHOWN)
    sets = "slurm={partition='cloud', gpus_per_node=8, gpu_type='h100', memory='2T', constraint='ib'}"
    assert require_request(recipe(sets, data=64), slurm).nodes == 8


def test_partition_without_visible_nodes_is_suggested_last(tmp_path: Path) -> None:
    order = "".join(sorted(SITE.splitlines(keepends=True) + TYPED.splitlines(keepends=True)[2:3]))
    slurm = programs(tmp_path / "bin", order, shown="cloud cpu gpu")
    for name, nearest in (("clouds", "cloud"), ("x", "gpu")):
        with pytest.raises(RecipeError, match=f"nearest: `--set slurm.partition={nearest}`"):
            require_request(recipe(f"slurm={{partition='{name}', gpus_per_node=4}}", data=4), slurm)


@pytest.mark.parametrize(("shown", "nearest"), [("main", "main"), ("main hid", "hid")])
def test_partition_hidden_from_the_user_is_never_suggested(tmp_path: Path, shown: str, nearest: str) -> None:
    slurm = programs(tmp_path / "bin", TYPED, shown=shown)
    with pytest.raises(RecipeError, match=f"nearest: `--set slurm.partition={nearest}`"):
        require_request(recipe("slurm.partition=hidd"), slurm)
    require_request(recipe("slurm.partition=hid"), slurm)


def test_cluster_without_a_default_partition_requires_a_partition(tmp_path: Path) -> None:
    slurm = programs(tmp_path / "bin", LAB.replace("*", ""), None)
    with pytest.raises(RecipeError) as caught:
        require_request(recipe(), slurm)
    assert caught.value.message == (
        "default: the cluster has no default partition, and `slurm.partition` names none of `main`, `graced`, "
        "`urgent`; nearest: `--set slurm.partition=main`"
    )


def test_request_needs_only_one_of_several_partitions(tmp_path: Path) -> None:
    slurm = programs(tmp_path / "bin")
    both = recipe("slurm.partition='debug,gpu'", "slurm.gpus_per_node=4", data=12)
    assert require_request(both, slurm).partitions == ("debug", "gpu")


@pytest.mark.parametrize("constraint", ["a100", "a100&ib", "v100|h100", "[a100*2&h100*1]", "!ib"])
def test_available_node_features_are_accepted(tmp_path: Path, constraint: str) -> None:
    require_request(recipe(*GPUS, f"slurm.constraint={constraint}", data=4), programs(tmp_path / "bin"))


def test_unenforced_or_unknown_accounts_are_left_to_slurm(tmp_path: Path) -> None:
    wanted = recipe("slurm.account=any", "slurm.qos=any")
    unenforced = SETTINGS.replace("associations,limits,qos,safe", "none")
    for accounts, settings in ((None, SETTINGS), ("", SETTINGS), (ACCOUNTS, unenforced)):
        assert require_request(wanted, programs(tmp_path / "bin", SITE, accounts, settings=settings)).nodes == 1


def test_node_count_follows_from_the_layout() -> None:
    for data, sets, nodes, gpus in (
        (16, ("slurm.gpus_per_node=8",), 2, 8),
        (9, ("slurm.gpus_per_node=8",), 2, 8),
        (4, ("slurm.gpus_per_node=8",), 1, 8),
        (4, (), 1, None),
        (4, ("slurm.nodes=2",), 2, None),
    ):
        wanted = request_of(recipe(*sets, data=data).recipe)
        assert (wanted.nodes, wanted.gpus_per_node) == (nodes, gpus)
    wanted = request_of(recipe("slurm={time='1-12', memory='2G', cpus_per_node=4}").recipe)
    assert (wanted.time_s, wanted.memory_mib, wanted.cpus_per_node) == (129600, 2048, 4)


def test_sinfo_output_is_parsed() -> None:
    found = {partition.name: partition for partition in partitions_in(SITE, SHOWN.split())}
    gpu = found["gpu"]
    assert [(kind.count, kind.gpus, kind.cpus) for kind in gpu.kinds] == [
        (12, {"a100": 4}, 128),
        (4, {"h100": 8}, 192),
        (2, {"a100": 2}, 32),
    ]
    assert (gpu.nodes, gpu.most_nodes, gpu.is_default, gpu.is_up) == (18, 8, False, True)
    assert [kind.gpus for kind in found["cpu"].kinds] == [{}]
    assert gpu.kinds[1].features == {"h100", "ib"}
    typed = {partition.name: partition for partition in partitions_in(TYPED, TYPED_SHOWN.split())}
    assert [kind.gpus for kind in typed["main"].kinds] == [{"a100": 2}, {"a100": 1, "h100": 1}]
    assert [name for name, partition in typed.items() if partition.is_shown] == ["main", "cloud"]
    assert partitions_in(LAB, ())[0].kinds[0].gpus == {"": 2}
    assert (found["cpu"].is_default, found["retired"].is_up, found["cpu"].most_nodes) == (True, False, None)


def test_empty_partition_has_no_nodes() -> None:
    [empty] = partitions_in("empty|up|infinite|n/a|1-infinite|0|n/a|0|0|(null)|(null)\n", ())
    assert (empty.kinds, empty.nodes) == ((), 0)


def test_machine_without_slurm_raises_slurm_error(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="`sinfo` is not installed"):
        require_request(recipe(), Slurm({"PATH": str(tmp_path)}))
