"""Explanations of a request that Slurm refuses, on clusters that the tests cannot start: GPUs with types, hidden
partitions, plugins that choose the partition, accounts.

The outputs of `sinfo` are recorded: from a real Slurm 22.05 (`TYPED`: nodes with GPUs of two types, a cloud partition
whose nodes are powered down, a hidden partition, and a partition of a group without the user), and in the form of
larger and newer clusters (`SITE`: types of GPUs with their sockets, limits, features, nodes that differ; written by
hand). The answers of `sbatch` are those of Slurm 22.05 (`test_requests_on_slurm.py` has the real ones).
"""

import shlex
from pathlib import Path

import pytest

from ppoctl.core.errors import RecipeError, SlurmError
from ppoctl.core.finding import Finding
from ppoctl.recipe.loading.load import Loaded, load
from ppoctl.recipe.parallel import nodes_of
from ppoctl.recipe.schema import Recipe
from ppoctl.start.slurm.partitions import partitions_in
from ppoctl.start.slurm.request import request_findings
from ppoctl.start.slurm.script import Work, batch_script
from ppoctl.start.slurm.slurm_client import Slurm, SlurmAwayError

ROOT = Path(__file__).resolve().parents[2]
TYPED = """\
main*|up|infinite|10:00|1-infinite|1|idle|4|4000|gpu:a100:2|(null)
main*|up|infinite|10:00|1-infinite|1|idle|4|4000|gpu:a100:1,gpu:h100:1|(null)
cloud|up|infinite|n/a|1-infinite|0|n/a|0|0|(null)|(null)
hid|up|infinite|n/a|1-infinite|1|idle|4|4000|gpu:a100:2|(null)
closed2|up|infinite|n/a|1-infinite|1|idle|4|4000|gpu:a100:2|(null)
"""
SITE = """\
cpu*|up|2-00:00:00|1:00:00|1-infinite|100|allocated|64|256000|(null)|icelake,ib
gpu|up|1-00:00:00|n/a|1-8|12|mixed|128|1031000|gpu:a100:4(S:0-1),gres:lscratch:1T|a100,ib
gpu|up|1-00:00:00|n/a|1-8|4|allocated|192|2063000|gpu:h100:8(S:0,3)|h100,ib
gpu|up|1-00:00:00|n/a|1-8|2|idle|32|128000|gpu:a100:2(S:0-1)|a100
debug|up|30:00|n/a|1-2|2|idle~|128|1031000|gpu:a100:4|a100,ib
retired|inact|infinite|n/a|1-infinite|8|down|32|64000|gpu:v100:4|v100
"""
SHOWN = "cpu gpu debug retired main cloud"
NODES = "Requested node configuration is not available"
PARTITION = "Invalid partition name specified"
ACCOUNT = "Invalid account or account/partition combination specified"


def script_of(recipe: Recipe) -> str:
    return batch_script(recipe, Work(("resume", "run"), Path("/tmp"), "%j.log", is_run=True), ["ppoctl"])


def recipe(*sets: str, data: int = 1) -> Loaded:
    """Return the quickstart in a layout of this many devices."""
    layout = [f"actor.parallel={{data={data}}}"] if data > 1 else []
    return load([ROOT / "recipes" / "quickstart.toml"], [*layout, *sets], {})


def found(
    folder: Path, loaded: Loaded, *refusals: str, sinfo: str = SITE, shown: str = SHOWN, chosen: str = "cpu"
) -> list[Finding]:
    """Return the findings on a cluster whose `sbatch` refuses with these messages, then accepts the job."""
    (folder / "refusals").write_text("\n".join(f"allocation failure: {words}" for words in refusals))
    (folder / "all").write_text(sinfo)
    (folder / "shown").write_text(shown)
    programs = {
        "sinfo": f"case $* in *--all*) cat {folder}/all;; *) cat {folder}/shown;; esac",
        "sbatch": f"cat >{folder}/script; read -r words <{folder}/refusals; sed -i 1d {folder}/refusals\n"
        f'[ -z "$words" ] || {{ echo "$words" >&2; exit 1; }}\n'
        f'echo "sbatch: Job 5 to start at 1795709102 using 1 processors on nodes n1 in partition {chosen}" >&2',
    }
    for name, lines in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    return request_findings(loaded, Slurm({"PATH": f"{folder}:/usr/bin:/bin"}), script_of)


GPUS = "partition='gpu', gpus_per_node=4"
CASES: dict[str, tuple[int, str, tuple[str, ...], str, str]] = {
    "a partition that is not there": (
        4,
        "partition='gpus', gpus_per_node=4",
        (PARTITION,),
        "`slurm.partition` is `gpus`: `sbatch` refused: Invalid partition name specified; partitions: `cpu`, `gpu`, "
        "`debug`; nearest: `--set slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    "a partition that is closed": (
        4,
        "partition='retired', gpus_per_node=4",
        ("Required partition not available (inactive or drain)",),
        "partition `retired` accepts no jobs: it is `inact`; nearest: `--set slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    "GPUs where there are none": (
        1,
        "gpus_per_node=1",
        (NODES,),
        "no node of partition `cpu` has `1` GPUs; the most is 0; nearest: `--set slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    "more GPUs than any node has": (
        16,
        "partition='gpu', gpus_per_node=16, nodes=1",
        (NODES,),
        "no node of partition `gpu` has `16` GPUs; the most is 8; nearest: `--set slurm.gpus_per_node=8 --set "
        "slurm.nodes=2`",
        "--set slurm.gpus_per_node=8 --set slurm.nodes=2",
    ),
    "more nodes than the partition gives to one job": (
        40,
        GPUS,
        (NODES,),
        "the layout's 40 GPUs require 10 nodes of `4`, but partition `gpu` has 8 such for a job: a layout of at most "
        "32 GPUs would fit",
        "",
    ),
    "more nodes with a type of GPUs than there are": (
        40,
        "partition='gpu', gpus_per_node=8, gpu_type='h100'",
        (NODES,),
        "the layout's 40 GPUs require 5 nodes of `8` of type `h100`, but partition `gpu` has 4 such for a job: a "
        "layout of at most 32 GPUs would fit",
        "",
    ),
    "more GPUs of a type than any node has": (
        8,
        "partition='gpu', gpus_per_node=8, gpu_type='a100'",
        (NODES,),
        "no node of partition `gpu` has `8` GPUs of type `a100`; the most is 4; nearest: `--set "
        "slurm.gpus_per_node=4`",
        "--set slurm.gpus_per_node=4",
    ),
    "a type of GPUs that no node has": (
        4,
        f"{GPUS}, gpu_type='h1000'",
        (NODES,),
        "no node of partition `gpu` has `4` GPUs of type `h1000`; its nodes have `a100`, `h100`; nearest: `--set "
        "slurm.gpu_type=h100`",
        "--set slurm.gpu_type=h100",
    ),
    "a type of GPUs that another partition has": (
        4,
        "partition='debug', gpus_per_node=4, gpu_type='h100'",
        (NODES,),
        "no node of partition `debug` has `4` GPUs of type `h100`; its nodes have `a100`; nearest: `--set "
        "slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    "more nodes than need be, of which there are too few": (
        24,
        "partition='gpu', gpus_per_node=2, nodes=12",
        (NODES,),
        "the layout's 24 GPUs require 12 nodes of `2`, but partition `gpu` has 8 such for a job; nearest: `--set "
        "slurm.gpus_per_node=8 --set slurm.nodes=3`",
        "--set slurm.gpus_per_node=8 --set slurm.nodes=3",
    ),
    "too few nodes in this partition and enough in another": (
        12,
        "partition='debug', gpus_per_node=4",
        (NODES,),
        "the layout's 12 GPUs require 3 nodes of `4`, but partition `debug` has 2 such for a job; nearest: `--set "
        "slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    "what only different nodes have": (
        8,
        "partition='gpu', gpus_per_node=4, gpu_type='a100', memory='1500G'",
        (NODES,),
        "no single node of partition `gpu` has as many GPUs of type `a100` and CPUs and as much memory as requested; "
        "`slurm.memory` is `1500G`",
        "",
    ),
    "features that no node has together": (
        4,
        f"{GPUS}, constraint='a100&h100'",
        (NODES,),
        "no node of partition `gpu` has `a100&h100`; its nodes have `a100`, `h100`, `ib`; nearest: `--set "
        "slurm.constraint=h100`",
        "--set slurm.constraint=h100",
    ),
    "a feature that another partition has": (
        2,
        "partition='debug', gpus_per_node=1, constraint='h100&ib'",
        (NODES,),
        "no node of partition `debug` has `h100&ib`; its nodes have `a100`, `ib`; nearest: `--set "
        "slurm.partition=gpu`",
        "--set slurm.partition=gpu",
    ),
    "too few nodes with a feature": (
        40,
        "partition='gpu', gpus_per_node=8, constraint='h100'",
        (NODES,),
        "the layout's 40 GPUs require 5 nodes of `8`, but partition `gpu` has 4 such for a job: a layout of at most "
        "32 GPUs would fit",
        "",
    ),
    "an expression of features": (
        4,
        f"{GPUS}, constraint='[a100*2&x*1]'",
        (NODES,),
        f"`slurm.constraint` is `[a100*2&x*1]`: `sbatch` refused: {NODES}",
        "",
    ),
    "an account of somebody else": (
        1,
        "account='phisics'",
        (ACCOUNT,),
        f"`slurm.account` is `phisics`: `sbatch` refused: {ACCOUNT}",
        "sacctmgr show associations user=$USER format=account,qos",
    ),
}


@pytest.mark.parametrize(("data", "table", "refusals", "line", "hint"), CASES.values(), ids=CASES)
def test_refused_request_is_explained_with_the_nearest_possible(
    tmp_path: Path, data: int, table: str, refusals: tuple[str, ...], line: str, hint: str
) -> None:
    loaded = recipe(f"slurm={{{table}}}", data=data)
    (finding,) = found(tmp_path, loaded, *refusals)
    assert str(finding) == f"--set: {line}"
    assert (finding.kind, finding.error) == ("slurm", RecipeError)
    if hint.startswith("--set"):
        assert finding.hint == f"change the recipe, or add `{hint}`"
        assert found(tmp_path, recipe(f"slurm={{{table}}}", *shlex.split(hint)[1::2], data=data)) == []
    else:
        assert str(finding.hint).startswith(hint or "sinfo --format=")


def test_every_wrong_value_has_a_line_and_its_origin(tmp_path: Path) -> None:
    table = f"slurm={{{GPUS}, nodes=3, time='2-00', constraint='v100', account='chemistry'}}"
    lines = found(tmp_path, recipe(table, data=16), "", ACCOUNT)
    assert [finding.what.partition(";")[0] for finding in lines] == [
        "`slurm.nodes` `3` x `slurm.gpus_per_node` `4` are 12 GPUs, but the layout requires 16 (actor 16, critic 16, "
        "generator 1, colocated)",
        "a time limit of `2-00` is longer than that of partition `gpu`, `1-00:00:00`",
        f"`slurm.account` is `chemistry`: `sbatch` refused: {ACCOUNT}",
    ]
    assert {finding.where for finding in lines} == {"--set"}
    loaded = recipe("slurm={partition='gpu', gpus_per_node=4, nodes=3, time='2-00', constraint='v100'}", data=16)
    first, *_, last = found(tmp_path, loaded, "Requested time limit is invalid", "Invalid feature specification")
    assert last.what.startswith("no node of partition `gpu` has `v100`; its nodes have `a100`, `h100`, `ib`; ")
    sets = "--set slurm.nodes=4 --set slurm.time=1-00:00:00 --set slurm.constraint=h100"
    assert first.hint == last.hint == f"change the recipe, or add `{sets}`"


def test_refusal_about_no_key_is_an_error_of_slurm(tmp_path: Path) -> None:
    policy = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
    (finding,) = found(tmp_path, recipe("slurm.qos=long", "slurm.account=x"), policy)
    assert (str(finding), finding.error) == (f"`sbatch` refused: {policy}", SlurmError)
    with pytest.raises(SlurmAwayError, match="Socket timed out"):
        found(tmp_path, recipe(), "Socket timed out on send/recv operation")
    with pytest.raises(SlurmError, match="`sinfo` is not installed"):
        request_findings(recipe(), Slurm({"PATH": str(tmp_path / "none")}), script_of)


def test_limits_are_those_of_the_partition_that_a_plugin_chooses(tmp_path: Path) -> None:
    """The default partition has no GPUs and a limit of two days; the plugin of the site sends the job elsewhere."""
    wide = recipe("slurm={gpus_per_node=4, time='3-00'}", data=8)
    assert found(tmp_path, wide, chosen="other") == []
    (finding,) = found(tmp_path, wide, chosen="gpu")
    assert "`3-00` is longer than that of partition `gpu`, `1-00:00:00`" in finding.what


def test_request_needs_only_one_of_several_partitions(tmp_path: Path) -> None:
    both = recipe("slurm={partition='debug,gpu', gpus_per_node=4, time='60'}", data=12)
    assert found(tmp_path, both) == []
    assert found(tmp_path, recipe("slurm={partition='cpu,gpu', warn_s=4000}")) == []  # the default of `cpu`: 3600 s
    (finding,) = found(tmp_path, recipe("slurm={partition='debug,gpu', time='3-00'}"))
    assert "that of partition `gpu`" in finding.what


def test_qos_limits_replace_partition_limits(tmp_path: Path) -> None:
    wide = f"slurm={{{GPUS}, time='3-00', qos='long'}}"
    assert found(tmp_path, recipe(wide, data=40)) == []  # the partition: one day
    assert found(tmp_path, recipe("slurm={warn_s=4000, qos='long'}")) == []
    (finding,) = found(tmp_path, recipe("slurm={warn_s=4000}"))
    assert "the default of partition `cpu` is 3600 s; nearest: `--set slurm.time=134`" in finding.what


def test_partition_with_hidden_nodes_is_not_checked(tmp_path: Path) -> None:
    sets = "slurm={partition='cloud', gpus_per_node=8, gpu_type='h100', memory='2T'}"
    assert found(tmp_path, recipe(sets, data=64), sinfo=TYPED) == []
    (finding,) = found(tmp_path, recipe(sets, data=64), NODES, sinfo=TYPED)
    assert str(finding) == f"`sbatch` refused: {NODES}"


@pytest.mark.parametrize(
    ("name", "shown", "nearest"), [("hidd", "main", "main"), ("hidd", "main hid", "hid"), ("x", "cloud main", "main")]
)
def test_partition_without_nodes_or_hidden_from_the_user_is_not_suggested(
    tmp_path: Path, name: str, shown: str, nearest: str
) -> None:
    (finding,) = found(tmp_path, recipe(f"slurm.partition={name}"), PARTITION, sinfo=TYPED, shown=shown)
    assert finding.what.endswith(f"nearest: `--set slurm.partition={nearest}`")


def test_cluster_without_a_default_partition_requires_a_partition(tmp_path: Path) -> None:
    message = "No partition specified or system default partition"
    (finding,) = found(tmp_path, recipe(), message, sinfo=TYPED.replace("*", ""), shown="main")
    assert finding.where == "default"
    assert finding.what.endswith("; partitions: `main`; nearest: `--set slurm.partition=main`")


@pytest.mark.parametrize(
    ("state", "accepts"), [("drained", True), ("idle*", True), ("maint", True), ("idle~", False), ("mixed", False)]
)
def test_request_that_only_lacks_nodes_that_may_return_is_accepted(tmp_path: Path, state: str, accepts: bool) -> None:
    """Slurm's answer is the same as for a node that does not exist."""
    sinfo = SITE.replace("allocated|192", f"{state}|192")
    wanted = recipe("slurm={partition='gpu', gpus_per_node=8}", data=32)
    assert (found(tmp_path, wanted, NODES, sinfo=sinfo) == []) == accepts


def test_node_count_follows_from_the_layout() -> None:
    for data, sets, nodes in (
        (16, ("slurm.gpus_per_node=8",), 2),
        (9, ("slurm.gpus_per_node=8",), 2),
        (4, ("slurm.gpus_per_node=8",), 1),
        (4, (), 1),
        (4, ("slurm.nodes=2",), 2),
    ):
        assert nodes_of(recipe(*sets, data=data).recipe) == nodes


def test_sinfo_output_is_parsed() -> None:
    partitions = {partition.name: partition for partition in partitions_in(SITE, SHOWN.split())}
    gpu = partitions["gpu"]
    assert [(kind.count, kind.gpus, kind.cpus) for kind in gpu.kinds] == [
        (12, {"a100": 4}, 128),
        (4, {"h100": 8}, 192),
        (2, {"a100": 2}, 32),
    ]
    assert (gpu.most_nodes, gpu.is_default, gpu.state) == (8, False, "up")
    assert [kind.gpus for kind in partitions["cpu"].kinds] == [{}]
    assert gpu.kinds[1].features == {"h100", "ib"}
    typed = {partition.name: partition for partition in partitions_in(TYPED, ["main", "cloud"])}
    assert [kind.gpus for kind in typed["main"].kinds] == [{"a100": 2}, {"a100": 1, "h100": 1}]
    assert [kind.gpus_of(None) for kind in typed["main"].kinds] == [2, 2]
    assert [name for name, partition in typed.items() if partition.is_shown] == ["main", "cloud"]
    assert typed["cloud"].kinds == ()
    assert partitions_in(TYPED.replace("gpu:a100:2", "gpu:2"), ())[0].kinds[0].gpus == {"": 2}
    assert (partitions["cpu"].is_default, partitions["retired"].state) == (True, "inact")
