"""Process groups in a real Ray: replies, errors, deaths and hangs."""

import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError, RaySystemError

import ray_forks
from leftover import all_gone
from ppoctl.core.activity import ACTIVITIES, track_items
from ppoctl.core.batch.sequences import one_sequence
from ppoctl.core.errors import EnvironmentProblemError, HangError, NonFiniteError, ProcessLostError
from ppoctl.engines.megatron import process_group
from ppoctl.engines.ray import groups_of_processes
from ppoctl.engines.ray.cluster import RayCluster
from ppoctl.engines.ray.groups_of_processes import Deadline, GroupSettings, PendingCall, RayProcesses, first_done
from ppoctl.engines.ray.placement import DevicePlacement
from ppoctl.engines.weights.bucket import Bucket, bucket_of, flatten
from ppoctl.engines.weights.sharing import Shared, SharedBuffers
from ppoctl.models.convert.checksum import TensorChecksum, checksum_of
from ppoctl.recipe.parallel import OBJECT_STORE_BYTES


def worker() -> Callable[[int, int, str], Any]:  # noqa: C901 - a class of small methods
    """Return a class defined locally, so that Ray sends it along instead of importing this file."""

    class Worker:
        def __init__(self, rank: int, size: int, address: str) -> None:
            self.rank, self.size, self.address = rank, size, address

        def who(self, greeting: str) -> tuple[str, int, int]:
            return greeting, self.rank, self.size

        def meeting_place(self) -> str:
            return self.address

        def pid(self) -> int:
            return os.getpid()

        def folder(self) -> str:
            return os.getcwd()  # noqa: PTH109 - a method must not import

        def notify(self) -> None:
            print(f"python {self.rank}")
            os.system(f"echo child {self.rank}")
            os.write(2, f"library {self.rank}\n".encode())

        def fail_at(self, rank: int) -> None:
            if self.rank == rank:
                raise NonFiniteError("loss is `nan`", hint="look")
            time.sleep(60)  # as a rank that waits for the others in a collective

        def fail_unexpectedly_at(self, rank: int) -> None:
            if self.rank == rank:
                raise ZeroDivisionError(f"of rank {rank}")
            time.sleep(60)  # as a rank that waits for the others

        def die_at(self, rank: int) -> None:
            if self.rank == rank:
                os.kill(os.getpid(), 9)
            time.sleep(60)  # the others wait for the dead rank, as above

        def threads(self) -> int:
            return torch.get_num_threads()

        def sleep(self, seconds: float) -> int:
            time.sleep(seconds)
            return self.rank

        def count(self, go_on: Path) -> None:
            for number, _ in track_items("abc", "minibatch"):
                while number == 1 and not go_on.exists():
                    time.sleep(0.01)

        def weights(self) -> Bucket:
            made = bucket_of([("a", torch.full((2**19,), float(self.rank))), ("b", torch.ones(3, 4).t().bfloat16())])
            return replace(made, contents=(flatten(made.tensors()),))

        def shared_weights(self) -> Bucket:
            self.staging = SharedBuffers(torch.device("cpu"))
            return bucket_of(tensors := [("a", torch.full((2**19,), float(self.rank)))], self.staging.put(tensors))

        def held(self, bucket: Bucket) -> dict[str, TensorChecksum]:
            return {name: checksum_of(tensor) for name, tensor in bucket.tensors()}

        def hang_at(self, rank: int) -> None:
            if self.rank == rank:
                time.sleep(60)  # the hang itself; ended by the deadline of 4 s

        def lose(self, rank: int) -> None:
            """Die; the other ranks notice it long before Ray does."""
            if self.rank == rank:
                time.sleep(1.5)  # the errors of the others arrive well before that
                os.kill(os.getpid(), 9)
            raise RuntimeError("connection closed by peer")

        def meet(self) -> None:
            patience = process_group.GroupTimeouts(meet_s=60.0, collective_s=60.0)
            process_group.join(process_group.RankInfo(self.rank, self.size, self.address), patience)

        def reduce_without(self, rank: int, fate: str) -> None:
            """Make all ranks except one wait in a collective for this one, which hangs or dies."""
            if self.rank == rank:
                time.sleep(1.0)  # until the others are in the collective
                if fate == "dies":
                    os.kill(os.getpid(), 9)
                time.sleep(60)
            torch.distributed.all_reduce(torch.zeros(1))

    return Worker


Listener = tuple[int, str, int]
"""Id of the process, address and port."""


def listeners() -> Iterator[tuple[str, list[str], Listener]]:
    """Yield name, command and listener, of this process and all that it started."""
    driver = psutil.Process()
    for process in (driver, *driver.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it may end meanwhile
            name, command = process.name(), process.cmdline()
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    yield name, command, (process.pid, *each.laddr)


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """Fork workers: most of these tests need new processes. (`test_ray_workers.py` does not fork.)"""
    with ray_forks.served():
        yield


@pytest.fixture(scope="module")
def others() -> set[Listener]:
    """Return where processes of other tests listen."""
    return {listener for _, _, listener in listeners()}


@pytest.fixture(scope="module")
def cluster(others: set[Listener], forks: None) -> Iterator[RayCluster]:
    made = RayCluster(
        DevicePlacement({"actor": 2, "critic": 2}, colocated=True),
        None,
        start_deadline_s=60.0,
        object_store_bytes=OBJECT_STORE_BYTES,
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def group() -> GroupSettings:
    return GroupSettings("actor", "actor", 2, worker(), threads=5, start_deadline_s=60.0, call_deadline_s=60.0)


@pytest.fixture(scope="module")
def processes(cluster: RayCluster, group: GroupSettings) -> Iterator[RayProcesses]:
    """Return one group for all tests, because starting it takes longer than a test. If a test breaks it, the next one
    starts it again."""
    made = RayProcesses(group, cluster)
    yield made
    made.close()


def test_repeated_argument_is_put_into_object_store_once(processes, cluster):
    first, second = one_sequence((5, 6, 7)), one_sequence((5, 6, 7))
    for argument in (first, first, second):
        for answer, _, _ in processes.call("who", argument):
            assert (answer.tokens.tolist(), answer.prompt_tokens.tolist()) == ([[6, 7]], [5])
    kept = cluster.sent_once(second)
    processes.call("who", "hello")
    assert cluster.sent_once(second) is kept
    assert cluster.sent_once(first) is not kept
    assert cluster.sent_once("hello") == "hello"


def test_call_returns_replies_in_rank_order(processes):
    assert processes.call("who", "hello") == [("hello", 0, 2), ("hello", 1, 2)]
    assert processes.call_ranks([1], "who", "you") == [("you", 1, 2)]
    assert processes.call("threads") == [2, 2], "of the node's 5"
    places = processes.call("meeting_place")
    assert len(set(places)) == 1
    assert places[0].split(":")[0] == "127.0.0.1"
    pids = processes.call("pid")
    assert len({*pids, os.getpid()}) == 3
    assert {psutil.Process(pid).parent().name() for pid in pids} != {"raylet"}  # they are forked, see `ray_forks`


@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere"])
def test_missing_ray_address_is_named_in_error(address):
    with pytest.raises(EnvironmentProblemError, match=f"no Ray cluster answers at `cluster.ray_address = {address}`"):
        RayCluster(
            DevicePlacement({"actor": 2}, colocated=True),
            address,
            start_deadline_s=60.0,
            object_store_bytes=OBJECT_STORE_BYTES,
        ).start()


def test_processes_run_in_working_directory_of_command(cluster, group, tmp_path, monkeypatch):
    """Paths of a run are relative to that folder; an existing Ray was started in another folder."""
    cluster.start()
    monkeypatch.chdir(tmp_path)
    made = RayProcesses(group, cluster)
    assert made.call("folder") == [str(tmp_path)] * 2
    made.close()
    monkeypatch.setattr(Path, "cwd", lambda: tmp_path / "gone")
    with pytest.raises(EnvironmentProblemError, match="is not accessible on node"):
        RayProcesses(group, cluster).call("folder")


def test_process_output_goes_to_log_file_per_rank(cluster, group, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "logs", tmp_path)
    for _ in range(2):  # a restarted group appends to existing logs
        made = RayProcesses(group, cluster)
        made.call("notify")
        made.close()
    for rank in range(2):
        text = (tmp_path / f"actor-{rank}.log").read_text()
        assert text == 2 * f"python {rank}\nchild {rank}\nlibrary {rank}\n"


def test_remote_error_is_reraised_and_other_ranks_end(processes):
    pids = processes.call("pid")
    started = time.monotonic()
    with pytest.raises(NonFiniteError) as caught:
        processes.call("fail_at", 1)
    assert (caught.value.message, caught.value.hint) == ("loss is `nan`", "look")
    assert time.monotonic() - started < 30
    assert_gone(pids)


@pytest.mark.ci("test_rank_death_in_collective_names_rank")
def test_process_death_error_names_rank(processes):
    pids = processes.call("pid")
    with pytest.raises(ProcessLostError, match="process 0 of the actor's 2 died during `die_at`"):
        processes.call("die_at", 0)
    assert_gone(pids)


@pytest.mark.ci("test_hang_in_collective_shows_stack_of_every_rank")
def test_hang_error_shows_stack_of_waiting_ranks(processes, group, monkeypatch):
    processes.call("sleep", 0.0)  # they are up
    monkeypatch.setattr(processes, "group", replace(group, call_deadline_s=4.0))
    pids = processes.call("pid")
    with pytest.raises(HangError, match=r"waiting for 1 of 2 processes:\n  rank 1: .*hang_at") as caught:
        processes.call("hang_at", 1)
    assert "rank 0" not in caught.value.message
    assert_gone(pids)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_death_is_reported_even_if_other_ranks_fail_first(processes, rank):
    with pytest.raises(ProcessLostError, match=f"process {rank} of the actor's 2 died during `lose`"):
        processes.call("lose", rank)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_death_in_collective_names_rank(processes, rank):
    processes.call("meet")
    pids = processes.call("pid")
    with pytest.raises(ProcessLostError, match=f"process {rank} of the actor's 2 died during `reduce_without`"):
        processes.call("reduce_without", rank, "dies")
    assert_gone(pids)


def test_call_uses_its_own_deadline(processes, group, monkeypatch):
    own = {"hang_at": Deadline(1.0, "cluster.update_deadline_s")}
    monkeypatch.setattr(processes, "group", replace(group, deadlines=own))
    processes.call("sleep", 0.0)
    with pytest.raises(HangError, match=r"`hang_at` within 1 s \(`cluster\.update_deadline_s`\)"):
        processes.call("hang_at", 1)


def test_hang_in_collective_shows_stack_of_every_rank(processes, group, monkeypatch):
    processes.call("meet")
    monkeypatch.setattr(processes, "group", replace(group, call_deadline_s=6.0))
    with pytest.raises(HangError) as caught:
        processes.call("reduce_without", 1, "hangs")
    says = caught.value.message
    assert "waiting for 2 of 2 processes" in says
    assert re.search("rank 0: .*all_reduce", says)
    assert re.search("rank 1: .*reduce_without", says)


@pytest.mark.ci("test_remote_error_is_reraised_and_other_ranks_end")
def test_remote_error_without_process_death_is_reraised(processes):
    with pytest.raises(ZeroDivisionError, match="of rank 1"):
        processes.call("fail_unexpectedly_at", 1)


def test_prestarted_groups_report_start_errors_at_first_call(cluster: RayCluster, group: GroupSettings) -> None:
    def broken(rank: int, size: int, address: str) -> None:
        raise NonFiniteError("cannot be made")

    fine, wrong = (RayProcesses(replace(group, make=make), cluster) for make in (group.make, broken))
    with closing(fine), closing(wrong):
        for each in (wrong, fine):
            each.prestart()
        ranks = list(fine.ranks)
        assert fine.call("who", "hello") == [("hello", rank, group.size) for rank in range(group.size)]
        fine.prestart()
        assert fine.ranks == ranks  # not restarted
        with pytest.raises(NonFiniteError, match="cannot be made"):
            wrong.call("who", "hello")


def preparing_worker(folder: Path, prepare: Callable[[], None] = lambda: None) -> Any:
    """Return a `make` that notes in the folder which of its methods were called, in order, and by which process."""
    made = worker()

    class Preparing:
        def note(self, what: str) -> None:
            with (folder / str(os.getpid())).open("a") as file:
                file.write(what + "\n")

        def prepare(self) -> None:
            self.note("prepare")
            prepare()

        def __call__(self, rank: int, size: int, address: str) -> Any:
            self.note("make")
            return made(rank, size, address)

    return Preparing()


def require_preparing(folder: Path, size: int) -> None:
    """Wait until all processes of a group prepare."""
    until = time.monotonic() + 60
    while len(list(folder.iterdir())) < size:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_prepared_processes_create_their_objects_at_first_call(
    cluster: RayCluster, group: GroupSettings, tmp_path: Path
) -> None:
    prepared = RayProcesses(replace(group, make=preparing_worker(tmp_path)), cluster)
    with closing(prepared):
        for _ in range(2):
            prepared.prepare()
        ranks = list(prepared.ranks)
        ray.get([rank.act.remote() for rank in ranks])
        pids = prepared.call("pid")
        assert prepared.ranks == ranks
        prepared.prepare()  # they run
        assert prepared.call("who", "hello") == [("hello", rank, group.size) for rank in range(group.size)]
        notes = {file.name: file.read_text().split() for file in tmp_path.iterdir()}
        assert notes == {str(pid): ["prepare", "make"] for pid in pids}
        assert len(set(prepared.call("meeting_place"))) == 1
        assert len(prepared.nodes()) == group.size
        prepared.close()
        assert_gone(pids)
        assert len(set(prepared.call("pid")) - set(pids)) == group.size, "a closed group starts again, as a whole"


def test_prepared_processes_that_are_not_called_end_with_their_group(
    cluster: RayCluster, group: GroupSettings, tmp_path: Path
) -> None:
    prepared = RayProcesses(replace(group, make=preparing_worker(tmp_path)), cluster)
    prepared.prepare()
    require_preparing(tmp_path, group.size)
    prepared.close()
    files = list(tmp_path.iterdir())
    assert [file.read_text() for file in files] == ["prepare\n"] * group.size
    assert_gone([int(file.name) for file in files])


@pytest.mark.parametrize("size", [1, 2])
def test_failure_while_preparing_is_reported_by_first_call(
    cluster: RayCluster, group: GroupSettings, tmp_path: Path, size: int
) -> None:
    def fail() -> None:
        raise NonFiniteError("cannot be prepared")

    def die() -> None:
        os.kill(os.getpid(), 9)

    def hang() -> None:
        time.sleep(60)  # the hang itself; ended by the deadline

    class Broken:
        def prepare(self) -> None:
            fail()

        def __call__(self, rank: int, size: int, address: str) -> Any:
            fail()

    settings = replace(group, size=size)
    broken = RayProcesses(replace(settings, make=Broken()), cluster)
    with closing(broken):
        broken.prepare()
        with pytest.raises(NonFiniteError, match="cannot be prepared"):
            broken.call("pid")
        assert broken.ranks == []
    dying = RayProcesses(replace(settings, make=preparing_worker(tmp_path, die)), cluster)
    with closing(dying):
        dying.prepare()
        with pytest.raises(ProcessLostError, match=r"died during `start`"):  # noqa: PT012 - two ranks fail in `begin`
            pending = dying.begin("pid")
            references = list(pending.open)
            ray.wait(references, num_returns=len(references), timeout=60)
            pending.take(references[size:])  # the calls, before the starts
            pending.answers()
    (tmp_path / "hanging").mkdir()
    made = preparing_worker(tmp_path / "hanging", hang)
    hanging = RayProcesses(replace(settings, start_deadline_s=3.0, call_deadline_s=1.0, make=made), cluster)
    with closing(hanging):
        hanging.prepare()
        require_preparing(tmp_path / "hanging", size)  # otherwise the deadline might pass before that
        with pytest.raises(HangError, match=r"has not finished `pid` within 4 s(.|\n)*rank 0: .* hang"):
            hanging.call("pid")
        assert hanging.ranks == []


def test_rendezvous_timeout_raises_named_error():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    patience = process_group.GroupTimeouts(meet_s=1.0, collective_s=60.0)
    with pytest.raises(
        EnvironmentProblemError, match=rf"the 2 processes of a role did not connect at {address} within 1 s"
    ):
        process_group.join(process_group.RankInfo(0, 2, address), patience)


def test_too_small_ray_error_explains_missing_slots(cluster, processes):
    processes.call("pid")
    address = ray.get_runtime_context().gcs_address
    greedy = RayCluster(
        DevicePlacement({"actor": 5}, colocated=False),
        address,
        start_deadline_s=60.0,
        object_store_bytes=OBJECT_STORE_BYTES,
    )
    says = r"needs 5 processes \(actor 5, apart\), .* has 4 CPU slots on 1 nodes \(the largest has 4\)"
    with pytest.raises(EnvironmentProblemError, match=says):
        greedy.require_devices()


@pytest.mark.parametrize(
    ("gpus", "cpus", "says"),
    [
        (2, 12, "needs 3 GPUs (actor 3, critic 3, colocated), but the Ray cluster at `a:1` has 2 GPUs on 1 nodes"),
        (3, 5, "needs 6 processes (actor 3, critic 3, colocated), but the Ray cluster at `a:1` has 5 CPU slots on 1"),
    ],
)
def test_ray_requires_both_gpus_and_cpu_slots(monkeypatch, gpus, cpus, says):
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"GPU": gpus, "CPU": cpus}}])
    monkeypatch.setattr("ray.cluster_resources", lambda: {"GPU": gpus})
    cluster = RayCluster(
        DevicePlacement({"actor": 3, "critic": 3}, colocated=True),
        "a:1",
        start_deadline_s=1.0,
        object_store_bytes=OBJECT_STORE_BYTES,
    )
    with pytest.raises(EnvironmentProblemError, match=re.escape(says)):
        cluster.require_devices()


def test_first_done_returns_earliest_finished_call(cluster, group, tmp_path):
    slow, fast = (
        RayProcesses(replace(group, name=name, role="critic", size=1, first=first), cluster)
        for first, name in enumerate(("slow", "fast"))
    )
    for starting in (slow.begin("sleep", 0.0), fast.begin("sleep", 0.0)):
        starting.answers()  # they are up
    late, soon = slow.begin("count", tmp_path / "go on"), fast.begin("sleep", 0.0)
    assert first_done([late, soon]) == [soon]
    assert soon.answers() == [0]
    assert not late.is_done
    (tmp_path / "go on").touch()
    assert first_done([late]) == [late]
    slow.close(), fast.close()


def test_driver_gets_only_object_refs_of_weights(processes):
    first, second = processes.call("weights")
    assert first.checksums["a"] != second.checksums["a"]
    assert len(pickle.dumps(first.checksums)) + len(ray.cloudpickle.dumps(first.contents)) < 2000  # of 2 MiB
    assert processes.call("held", second) == [second.checksums, second.checksums]
    assert dict(first.tensors())["b"].dtype == torch.bfloat16  # it may read the memory itself


def test_shared_weights_are_read_locally_or_from_object_store(processes):
    _, shared = processes.call("shared_weights")
    [place] = shared.contents
    assert isinstance(place, Shared)
    assert processes.nodes() == [ray.get_runtime_context().get_node_id()] * 2
    assert len(ray.cloudpickle.dumps(shared)) < 2000  # of 2 MiB
    assert processes.call("held", shared) == [shared.checksums, shared.checksums]
    stored, _ = processes.call("weights")
    both = replace(stored, contents=(replace(place, machine="another"), *stored.contents))
    assert processes.call("held", both) == [stored.checksums, stored.checksums]


def test_weights_lost_with_sender_raise_process_lost(processes, cluster, group):
    sender = RayProcesses(replace(group, name="sender", role="critic", size=1), cluster)
    [bucket] = sender.call("weights")
    sender.kill()
    with pytest.raises(ProcessLostError, match="weights were lost because the process that sent them has ended"):
        read_until_lost(processes, bucket)


def read_until_lost(processes: RayProcesses, bucket: Bucket) -> None:
    """Read until the loss is reported; the store learns of the death a moment later."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        processes.call("held", bucket)
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("error", "expected", "says"),
    [
        (
            OutOfMemoryError("the node was low on memory"),
            ProcessLostError,
            "ended by Ray during `update`: its node ran",
        ),
        (ActorDiedError(), ProcessLostError, "died during `update`"),
        (RaySystemError("a message that cannot be read"), RaySystemError, "a message that cannot be read"),
    ],
)
def test_every_ray_error_ends_the_pending_call(group, monkeypatch, error, expected, says):
    """Without a real Ray, which cannot be made to raise these errors on demand."""

    def get(reference: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)
    killed = []
    alive = SimpleNamespace(require_alive=lambda: None, name_of=lambda role, rank: None)
    group_of_call = SimpleNamespace(
        group=replace(group, death_notice_s=0.0), cluster=alive, kill=lambda: killed.append(1)
    )
    pending = PendingCall(group_of_call, "update", {}, {"reference": 1})
    pending.take(["reference"])
    with pytest.raises(expected, match=says):
        pending.answers()
    assert killed == [1]


def test_long_wait_reports_awaited_call(cluster, processes, monkeypatch):
    lines: list[str] = []
    processes.call("sleep", 0.0)  # they are up
    monkeypatch.setattr(cluster, "notify", lines.append)
    processes.call("sleep", 0.5)
    assert lines == []
    monkeypatch.setattr(groups_of_processes, "SAY_EVERY_S", 0.2)
    processes.call("sleep", 2.0)
    assert len(lines) >= 2
    says = "waiting for 2 of 2 processes of the actor in `sleep`; rank 0: test_ray_processes.py"
    assert any(says in line for line in lines)


def test_group_start_and_rank_progress_show_as_driver_activity(processes, tmp_path):
    processes.kill()  # they may be up
    processes.prestart()
    seen: list[str] = []

    def look() -> None:
        until = time.monotonic() + 30
        while "minibatch 2/3" not in seen and time.monotonic() < until:
            seen.append(str(ACTIVITIES.now()))
            time.sleep(0.01)
        (tmp_path / "go on").touch()

    looking = threading.Thread(target=look)
    looking.start()
    processes.call("count", tmp_path / "go on")
    looking.join()
    assert seen[-1] == "minibatch 2/3"
    assert "starting the actor" in seen
    assert ACTIVITIES.now() is None


def assert_gone(pids: list[int]) -> None:
    """Require that Ray ends them within moments."""
    assert all_gone(pids), "a process of the group is still there"


METHODS = {
    "gcs_server": ["NodeInfoGcsService/CheckAlive"],
    "raylet": ["NodeManagerService/GetNodeStats", "ObjectManagerService/Push"],
}
"""RPC methods of Ray's services by process name; all other processes serve calls of workers."""


def test_local_ray_ports_use_loopback_and_require_token(processes, cluster, others):
    """All listeners except the autoscaler's monitor, which serves its metrics to every local user."""
    processes.call("who", "hello")
    found = [each for each in listeners() if each[2] not in others]
    assert {address.removeprefix("::ffff:") for _, _, (_, address, _) in found} <= {"127.0.0.1"}, found
    asked = {
        port: (name, command)
        for name, command, (_, _, port) in found
        if not any("monitor.py" in word for word in command)
    }
    with ThreadPoolExecutor(len(asked)) as pool:  # most of them answer one of the two protocols only after a limit
        methods = [METHODS.get(name, ["CoreWorkerService/PushTask"]) for name, _ in asked.values()]
        replies = dict(zip(asked, pool.map(call_without_token, asked, methods), strict=True))
    for port, (_, command) in asked.items():
        assert replies[port] & {"UNAUTHENTICATED", "401"}, f"{command} says {replies[port]}"
        assert replies[port] <= {"UNAUTHENTICATED", "401", "UNIMPLEMENTED"}, f"{command} says {replies[port]}"
    assert {"gcs_server", "raylet"} < {name for name, _ in asked.values()}
    assert cluster.folder is not None
    assert (cluster.folder / "auth_token").stat().st_mode & 0o777 == 0o600


def call_without_token(port: int, methods: list[str]) -> set[str]:
    """Return Ray's reply at this port without a token."""
    with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=5.0)) as connection:
        connection.request("POST", "/get_or_create_runtime_env")
        with connection.getresponse() as answer:
            return {str(answer.status)}
    replies = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in methods:
            try:
                channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=60.0)
                replies.add("an answer")
            except grpc.RpcError as error:
                replies.add(error.code().name)
    return replies
