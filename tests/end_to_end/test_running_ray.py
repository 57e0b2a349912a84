"""A run in an existing Ray (`cluster.ray_address`): the run's processes come and go, the Ray remains."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from end_to_end.cli_process import fresh
from end_to_end.real_drill import real_recipe
from ppoctl.recipe.loading.write import recipe_as_toml
from ppoctl.store import manifest as manifests
from ppoctl.store.run_paths import RunPaths

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.minutes(1), pytest.mark.timeout(600)]

TOKEN = {"RAY_AUTH_TOKEN": "of-the-tests-own-ray"}
PROCESSES = 4
MEMORY_BYTES = 2**29
"""Memory that this Ray reports for its node: less than a run takes."""
OURS = ("ray::actor", "ray::critic", "ray::generator")
PATIENCE_S = 60.0

ASK = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
print("answers", ray.get(ray.remote(lambda: 6 * 7).remote()))
"""


@pytest.fixture
def running_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, psutil.Process]]:
    """Start a Ray; yield its address and its head process. It requires a token, which this machine has."""
    folder = tempfile.mkdtemp(prefix="foreign-", dir="/tmp")  # it contains sockets, whose paths must be short
    port, client_port = _free_port(), _free_port()
    options = {
        "port": port,
        "node-ip-address": "127.0.0.1",
        "num-cpus": PROCESSES,
        "object-store-memory": 2**27,
        "memory": MEMORY_BYTES,
        "temp-dir": folder,
        "ray-client-server-port": client_port,
        "min-worker-port": 0,  # any free port
        "max-worker-port": 0,
        "include-dashboard": "false",
        "include-log-monitor": "false",
    }
    command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"]
    command += ["--disable-usage-stats", *(f"--{name}={value}" for name, value in options.items())]
    environment = {**os.environ, **TOKEN, "RAY_AUTH_MODE": "token"}
    with (Path(folder) / "log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    try:
        yield _address_of(head, port, Path(folder) / "log"), psutil.Process(head.pid)
    finally:
        everyone = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.terminate()  # it ends its Ray, and no other
        head.wait(PATIENCE_S)
        _, left = psutil.wait_procs(everyone, timeout=PATIENCE_S)
        for process in left:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def test_run_joins_an_existing_ray_and_leaves_it_running(
    tmp_path: Path, running_ray: tuple[str, psutil.Process]
) -> None:
    address, head = running_ray
    before = {process.pid for process in head.children(recursive=True)}
    tables = {
        "actor": {"optimizer": {"lr": 1e-3}, "parallel": {"data": 2}},
        "critic": {"optimizer": {"lr": 1e-3}, "parallel": {"data": 1}},
        "cluster": {"threads": 1, "ray_address": address},
    }
    recipe = real_recipe(every_steps=1, name="guest", steps=1, **tables)
    (tmp_path / "guest.toml").write_text(recipe_as_toml(recipe), encoding="utf-8")
    refused = fresh(tmp_path, "train", "guest.toml")
    assert refused.returncode == 7, refused.stderr
    assert "GiB on all nodes of the Ray together, which has 0.5; most of it is libraries" in refused.stderr
    assert not (tmp_path / "runs").exists()
    done = fresh(tmp_path, "train", "guest.toml", "--force")
    assert done.returncode == 0, done.stderr
    assert manifests.read(RunPaths(tmp_path / "runs/guest").stage(1, "actor_update")) is not None

    assert _ours(head, gone_within_s=PATIENCE_S) == []
    assert head.is_running()
    assert {pid for pid in before if psutil.pid_exists(pid)} == before
    command, shows_token = [sys.executable, "-c", ASK, address], {**os.environ, "RAY_AUTH_MODE": "token"}
    called = subprocess.run(command, env=shows_token, capture_output=True, text=True, check=False)
    assert "answers 42" in called.stdout, called.stderr


def _address_of(head: "subprocess.Popen[bytes]", port: int, log: Path) -> str:
    """Return the address of the Ray, once it has started."""
    until = time.monotonic() + PATIENCE_S
    while "Ray runtime started" not in log.read_text():
        assert head.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.2)
    return f"127.0.0.1:{port}"


def _ours(head: psutil.Process, *, gone_within_s: float) -> list[str]:
    """Return the titles of a run's processes in this Ray that remain after a while."""
    until = time.monotonic() + gone_within_s
    while True:
        titles = [_title(process) for process in head.children(recursive=True)]
        left = [title for title in titles if title.startswith(OURS)]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.5)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
