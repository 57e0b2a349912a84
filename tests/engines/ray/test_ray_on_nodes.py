"""Ray over the nodes of a job, with an `srun` that runs everything on this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import ray

from ppoctl.core.errors import EnvironmentProblemError, ProcessLostError
from ppoctl.engines.ray.cluster import RayCluster
from ppoctl.engines.ray.groups_of_processes import GroupSettings, RayProcesses
from ppoctl.engines.ray.node import NodeOrder, lost_daemon
from ppoctl.engines.ray.placement import DevicePlacement
from ppoctl.engines.ray.srun import JobNodes, NodeSteps
from ppoctl.recipe.parallel import OBJECT_STORE_BYTES

SRUN = r"""#!/bin/bash
# In the place of Slurm's: the step runs here, as a child that ends with its stdin, and leaves its words.
for word in "$@"; do case $word in --nodelist=*) node=${word#*=} ;; esac; done
[ "$node" = broken ] && { echo "srun: error: Node failure on broken" >&2; exit 1; }
printf '%s\n' "${!SLURM_@}" "$@" >"$SEEN/$node"
while [[ $1 == -* || $1 == srun ]]; do shift; done
SLURMD_NODENAME=$node exec "$@"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder for logs, with an `srun` first on PATH, in a job that requested GPUs with options of its
    own."""
    made = tmp_path_factory.mktemp("job")
    (made / "srun").write_text(SRUN)
    (made / "srun").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{made}:{os.environ['PATH']}")
        patch.setenv("SEEN", str(made))
        for name, value in {
            "JOB_ID": "7",
            "GPUS_ON_NODE": "8",
            "GPUS": "16",
            "CPUS_PER_TASK": "4",
            "EXPORT_ENV": "NONE",
        }.items():
            patch.setenv(f"SLURM_{name}", value)
        yield made


def cluster_of(folder: Path, *names: str) -> RayCluster:
    made = RayCluster(
        DevicePlacement({"actor": 2, "critic": 1}, colocated=True),
        JobNodes("7", names[0], dict.fromkeys(names, "127.0.0.1")),
        start_deadline_s=600.0,  # a busy machine takes minutes
        object_store_bytes=OBJECT_STORE_BYTES,
    )
    made.logs = folder
    return made


def worker() -> Callable[[int, int, str], Any]:
    """Return a class defined locally, so that Ray sends it along instead of importing this file."""

    class Worker:
        def __init__(self, rank: int, size: int, address: str) -> None:
            self.address = address

        def variables(self, *names: str) -> list[str | None]:
            return [os.environ.get(name) for name in names]

        def meeting_place(self) -> str:
            return self.address

        def parent(self) -> int:
            return os.getppid()

        def sleep(self) -> None:
            time.sleep(60)  # ended by the death of its node

    return Worker


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[RayCluster]:
    made = cluster_of(folder, "node1", "node2")
    yield made
    made.close()


@pytest.fixture(scope="module")
def actor(cluster: RayCluster) -> Iterator[RayProcesses]:
    made = RayProcesses(GroupSettings("actor", "actor", 2, worker(), 2, 600.0, 60.0), cluster)
    made.call("meeting_place")
    yield made
    made.close()


def of_the_nodes() -> list[psutil.Process]:
    """Return the node programs and the processes that they started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "SLURMD_NODENAME" in process.environ():
                found.append(process)
    return found


def raylet_of(node: str) -> psutil.Process:
    return next(
        each for each in of_the_nodes() if each.name() == "raylet" and each.environ()["SLURMD_NODENAME"] == node
    )


def watched(cluster: RayCluster) -> None:
    """Poll as a waiting driver does, until a result is found."""
    until = time.monotonic() + 15
    while time.monotonic() < until:
        cluster.require_alive()
        time.sleep(0.1)


def test_ranks_fill_nodes_in_order_and_use_node_interface(actor, cluster):
    names = ("SLURMD_NODENAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert actor.call("variables", *names) == [["node1", "lo", "=lo"], ["node2", "lo", "=lo"]]
    assert [cluster.name_of("actor", rank) for rank in range(2)] == ["node1", "node2"]
    assert cluster.name_of("critic", 0) == "node1"
    # Each is an interpreter that Ray started. (Those of `test_ray_processes.py` are forked.)
    assert [psutil.Process(pid).name() for pid in actor.call("parent")] == ["raylet"] * 2
    assert [actor.cluster.neighbours("actor", rank) for rank in range(2)] == [1, 1]
    assert actor.call("meeting_place")[0].startswith("127.0.0.1:")
    assert cluster.host is None
    assert cluster.driver_host() == "127.0.0.1"


def test_srun_step_does_not_inherit_job_gpu_request(actor, folder):
    """`--gpus=16` of a job of two nodes cannot be met on one: Slurm would refuse the step."""
    variables, _, words = (folder / "node2").read_text().partition("--overlap")
    assert variables.split() == ["SLURM_GPUS_ON_NODE", "SLURM_JOB_ID"]
    assert "--gpus-per-node=8" in words.split()


def test_ray_token_is_only_in_one_private_file(actor, folder):
    file = folder / "ray-token-7"
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().encode()
    assert len(token) == 64
    shown = [Path(f"/proc/{each.pid}/{what}") for each in of_the_nodes() for what in ("cmdline", "environ")]
    shown += [Path(f"/proc/self/{what}") for what in ("cmdline", "environ")]
    private = [Path(name) for line in actor.call("variables", "PPOCTL_RAY_FOLDER") for name in line]
    shown += [path for top in (folder, *private) for path in top.rglob("*") if path.is_file() and path != file]
    assert len(shown) > 20
    assert [path for path in shown if token in path.read_bytes()] == []
    assert [path.stat().st_mode & 0o777 for path in private] == [0o700] * 2


def test_ray_rejects_client_without_token(actor):
    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        with pytest.raises(grpc.RpcError) as caught:
            ask(b"", timeout=5.0)
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_ray_opens_no_unused_ports(actor):
    """Ray starts its dashboard process anyway, for its internal metrics."""
    commands = {" ".join(each.cmdline()): each.net_connections("inet") for each in of_the_nodes()}
    assert any("gcs_server" in command for command in commands)
    assert not any("util.client.server" in command for command in commands)
    unused = [found for command, found in commands.items() if "dashboard/dashboard.py" in command]
    assert [each.laddr for found in unused for each in found if each.status == psutil.CONN_LISTEN] == []


def test_ray_survives_sigterm_to_all_step_processes(actor):
    """Slurm sends it some time before SIGKILL: the driver may still save."""
    before = actor.call("variables", "SLURMD_NODENAME")
    for process in of_the_nodes():
        process.terminate()
    assert actor.call("variables", "SLURMD_NODENAME") == before
    assert {each.name() for each in of_the_nodes()} >= {"raylet", "gcs_server"}


def test_dead_raylet_error_names_node_and_ranks(folder, actor, cluster):
    cluster.notice_s = 60.0  # the node's program reports the reason later on a loaded machine
    actor.call("meeting_place")
    waiting = actor.begin("sleep")
    started = time.monotonic()
    raylet_of("node2").kill()
    with pytest.raises(ProcessLostError, match="node `node2`"):
        waiting.answers()
    assert time.monotonic() - started < 60
    with pytest.raises(ProcessLostError) as caught:
        watched(cluster)
    assert caught.value.message == "node `node2` is lost (Ray's raylet was killed by SIGKILL), and with it actor 1"
    cluster.close()
    assert_nothing_left(folder)


def assert_nothing_left(folder: Path) -> None:
    assert [process.cmdline() for process in of_the_nodes()] == []
    assert not list(folder.glob("ray-token*"))
    for log in folder.glob("ray-*.log"):
        for name in re.findall(r"/tmp/ppoctl-ray-[^/\s]+", log.read_text()):
            assert not Path(name).exists()


def test_daemon_that_ended_before_ray_started_is_noticed(tmp_path: Path) -> None:
    """`ray start` does not: it waits for the raylet, which ends if the node is too busy for Ray's own limits."""
    (tmp_path / "raylet").symlink_to("/bin/sleep")
    program = "import subprocess, sys, time; subprocess.Popen([sys.argv[1], sys.argv[2]]); time.sleep(100)"
    for seconds, lost in (("100", None), ("0", "raylet")):
        command = [sys.executable, "-c", program, str(tmp_path / "raylet"), seconds]
        with subprocess.Popen(command, start_new_session=True) as starting:
            until = time.monotonic() + 60
            while not psutil.Process(starting.pid).children() and time.monotonic() < until:
                time.sleep(0.05)
            while lost is not None and lost_daemon(starting.pid) is None and time.monotonic() < until:
                time.sleep(0.05)
            assert lost_daemon(starting.pid) == lost
            os.killpg(starting.pid, signal.SIGKILL)


RAY = """#!/bin/sh
# In the place of `python -m ...raylet start`: each start leaves an address, and fails until the last one that is due.
for word in "$@"; do case $word in --temp-dir=*) ray=${word#*=} ;; esac; done
echo >>"$SEEN"; starts=$(wc -l <"$SEEN")
mkdir -p "$ray"
[ "$starts" -le "$FAILS" ] && { echo old:1 >"$ray/ray_current_cluster"; echo "RuntimeError: too slow"; exit 3; }
sleep 1
echo new:2 >"$ray/ray_current_cluster"
exec sleep 100
"""


@pytest.mark.parametrize(("fails", "code", "starts"), [(0, 0, 1), (1, 0, 2), (2, 1, 2)])
def test_failed_start_of_ray_is_tried_once_more(tmp_path: Path, fails: int, code: int, starts: int) -> None:
    (tmp_path / "python").write_text(RAY)
    (tmp_path / "python").chmod(0o755)
    program = "import sys; sys.executable = sys.argv[1]; from ppoctl.engines.ray.node import main; sys.exit(main())"
    order = NodeOrder("node3", "127.0.0.1", "127.0.0.1:1", slots=1, object_store_bytes=1 << 20)
    variables = {**os.environ, "SEEN": str(tmp_path / "starts"), "FAILS": str(fails)}
    command = [sys.executable, "-c", program, str(tmp_path / "python")]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, env=variables) as node:
        assert node.stdin is not None
        assert node.stdout is not None
        assert node.stderr is not None
        node.stdin.write(json.dumps(asdict(order)) + "\n")
        node.stdin.flush()
        started = node.stdout.readline()
        node.stdin.close()
        assert node.wait(60) == code
        reported = node.stderr.read()
    assert started == ("" if code else 'ppoctl-ray {"address": "new:2"}\n')
    assert ("node3: `ray start` ended with code 3: RuntimeError: too slow" in reported) is bool(code)
    assert len((tmp_path / "starts").read_text()) == starts


def test_ray_start_timeout_names_missing_nodes(folder):
    """A message announces the wait before: the program of a node takes longer than this to start."""
    nodes, messages = JobNodes("7", "node1", dict.fromkeys(("node1", "node2"), "127.0.0.1")), []
    late = NodeSteps(nodes, folder, say_every_s=0.0)
    with pytest.raises(EnvironmentProblemError, match=r"did not start on `node1` of job 7 within `cluster\.start_"):
        late.start(3, OBJECT_STORE_BYTES, time.monotonic() + 0.05, messages.append)
    late.end(messages.append)
    assert messages[0] == "waiting for Ray on `node1` of 2 nodes"
    assert_nothing_left(folder)


def test_failed_node_start_error_quotes_srun_output(folder):
    broken = cluster_of(folder, "node1", "broken")
    with pytest.raises(
        EnvironmentProblemError, match="Ray did not start on node `broken` of job 7: srun: error: Node failure"
    ):
        broken.start()
    broken.close()
    assert_nothing_left(folder)


@pytest.mark.ci("test_dead_raylet_error_names_node_and_ranks, which also looks at what is left")
def test_killed_driver_leaves_no_processes_or_files_on_nodes(folder):
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from test_ray_on_nodes import cluster_of\n"
        "cluster_of(Path(sys.argv[2]), 'node1', 'node2').start(); print('up', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        left = [each for each in of_the_nodes() if each.pid != driver.pid]
        private = {each.environ().get("PPOCTL_RAY_FOLDER") for each in left} - {None}
        assert {each.name() for each in left} >= {"raylet", "gcs_server"}
        assert len(private) == 2
        driver.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(left, timeout=60)
    assert alive == []
    assert [name for name in private if Path(name).exists()] == []
    assert not list(folder.glob("ray-token*"))


def test_slow_ray_shutdown_names_awaited_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\ncase $* in *nodelist=deaf*) exec sleep 60 ;; esac\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    messages = list[str]()
    nodes = JobNodes("7", "here", {"here": "127.0.0.1", "deaf": "127.0.0.1"})
    steps = NodeSteps(nodes, tmp_path, say_every_s=0.5, end_deadline_s=1.0)
    steps._steps[0].process.wait()
    steps.end(messages.append)
    assert messages == ["waiting for Ray to end on `deaf`, at most 6 s in all"]
