"""The doctor's checks of a recipe's requirements, with the same messages as at the start of a run."""

import base64
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from doctor.machines import driver, node
from fakes.hostile import closed_port
from fakes.nvml import FakeNvml
from ppoctl.core.errors import OutOfMemoryError, StorageError
from ppoctl.core.finding import Finding, Level
from ppoctl.core.machine import nvml
from ppoctl.core.machine.host_info import HostInfo
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe
from ppoctl.start.doctor.examine import of_recipe
from ppoctl.start.preflight import resource_checks
from preflight.conftest import MODEL, ROWS
from recipe.conftest import SMALLEST

LAPTOP = replace(node(), driver=nvml.NoDriver("NVML Shared Library Not Found"))
Ask = Callable[..., Recipe]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return `ask("steps=3")`, which checks the recipe with these keys, in a folder with its model and data."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MODEL, "base")
    Path("r.toml").write_text(SMALLEST, "utf-8")
    Path("train.jsonl").write_text("\n".join(ROWS) + "\n", "utf-8")
    return lambda *sets: load([Path("r.toml")], sets).recipe


@pytest.fixture
def listening() -> Iterator[str]:
    """Yield the address of a local port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def found_by(check: str, machine: HostInfo, *sets: str) -> list[Finding]:
    """Return the findings of one check of the doctor."""
    loaded = load([Path("r.toml")], sets)
    found = of_recipe(loaded, machine, Path("runs"))[check]()
    return [found] if isinstance(found, Finding) else list(found)


@pytest.mark.usefixtures("ask")
def test_model_without_a_tokenizer_is_wrong() -> None:
    [found] = found_by("model", LAPTOP)
    assert found.level == Level.OK
    for file in Path("base").glob("tokenizer*"):
        file.unlink()
    [found] = found_by("model", LAPTOP)
    assert (found.level, found.where) == (Level.ERROR, "r.toml:4")
    assert "has no tokenizer" in found.what


def test_layout_with_more_gpus_than_the_machine_is_wrong(ask: Ask) -> None:
    wanted = ask("generator.engines=4")
    found = resource_checks.layout(wanted, node())
    assert (found.level, found.what) == (Level.ERROR, "the recipe needs 4 GPUs, but this machine offers 2")
    assert resource_checks.layout(wanted, replace(node(), driver=driver(FakeNvml(count=8)))).what == "4 of 8 GPUs"
    hidden = replace(node(), driver=driver(FakeNvml(count=8)), environ={"CUDA_VISIBLE_DEVICES": "5,6,7"})
    assert resource_checks.layout(wanted, hidden).what.endswith("this machine offers 3 of 8 (`CUDA_VISIBLE_DEVICES`)")
    assert resource_checks.layout(wanted, LAPTOP).what == "4 processes on CPUs"
    joined = ask("generator.engines=4", "cluster.ray_address='head:6379'")
    assert resource_checks.layout(joined, node()).level == Level.OK


@pytest.mark.usefixtures("ask")
def test_memory_and_disk_findings_match_the_start_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    [fits] = found_by("memory", LAPTOP)
    assert fits.level == Level.OK
    [small] = found_by("memory", replace(node(), driver=driver(FakeNvml(memory=(64 << 20, 0)))))
    assert (small.error, "needs" in small.what) == (OutOfMemoryError, True)
    [joined] = found_by("memory", node(), "generator.engines=4", "cluster.ray_address='head:6379'")
    assert joined.what == "not checked: ppoctl train queries the Ray at `head:6379`"
    [space] = found_by("space", node())
    assert space.level == Level.OK
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1 << 10))
    [full] = found_by("space", node())
    assert (full.error, full.where, full.kind) == (StorageError, "", "disk")
    assert "has 1 KiB free, and the run needs" in full.what


def test_unreachable_ray_address_is_wrong(ask: Ask, listening: str) -> None:
    several = "generator.engines=2"
    address = closed_port()
    assert resource_checks.joined_ray(ask(f"cluster.ray_address='{address}'")).level == Level.OK, (
        "one process needs none"
    )
    found = resource_checks.joined_ray(ask(several, f"cluster.ray_address='{address}'"))
    assert (found.level, found.hint) == (Level.ERROR, f"ray status --address {address}")
    assert resource_checks.joined_ray(ask(several, f"cluster.ray_address='{listening}'")).level == Level.OK


def test_unreachable_mlflow_is_only_a_warning(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def at(uri: str) -> Recipe:
        return ask(f"tracking={{kind='mlflow', uri='{uri}'}}")

    assert resource_checks.mlflow(ask()).what == "a sqlite file in the runs folder"
    address = closed_port()
    found = resource_checks.mlflow(at(f"http://{address}"))
    assert (found.level, found.hint) == (Level.WARNING, f"curl -sS -o /dev/null http://{address}")
    assert resource_checks.mlflow(at("sqlite:////nowhere/at/all.db")).level == Level.WARNING
    monkeypatch.setenv("WHERE", f"postgresql://me:secret@{address}")
    found = resource_checks.mlflow(at("$WHERE/db"))
    assert found.level == Level.WARNING
    assert "secret" not in found.what
    monkeypatch.delenv("WHERE")
    assert resource_checks.mlflow(at("$WHERE/db")).level == Level.ERROR, "a start refuses that"


@contextmanager
def server(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the address of a server with one fixed answer, and the requests that it received."""
    heard: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            heard.append(connection.recv(4096))
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", heard
        thread.join(5)


def test_mlflow_check_sends_and_hides_the_uri_password(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = ask("tracking={kind='mlflow', uri='$WHERE'}")
    with server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as (address, heard):
        monkeypatch.setenv("WHERE", f"http://me:gehe%40im@{address}/base/")
        assert resource_checks.mlflow(tracked).level == Level.OK
    assert heard[0].startswith(b"GET /base/health ")
    assert f"Authorization: Basic {base64.b64encode(b'me:gehe@im').decode()}".encode() in heard[0]
    with server(b"220 mail.example ready\r\n") as (address, _):
        monkeypatch.setenv("WHERE", f"http://{address}")
        assert "RemoteProtocolError: " in resource_checks.mlflow(tracked).what


@pytest.mark.parametrize(("status", "level"), [(b"200", Level.OK), (b"403", Level.OK)])
def test_mlflow_server_is_reached_through_a_proxy(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, status: bytes, level: Level
) -> None:
    with server(b"HTTP/1.1 " + status + b" So\r\nContent-Length: 0\r\n\r\n") as (address, heard):
        monkeypatch.setenv("http_proxy", f"http://us:er@{address}")
        found = resource_checks.mlflow(ask("tracking={kind='mlflow', uri='http://mlflow.example:5000/base'}"))
    assert heard[0].startswith(b"GET http://mlflow.example:5000/base/health HTTP/1.1")
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"us:er") in heard[0]
    assert found.level == level, "any answer of the server is enough, and a proxy forwards it"


@pytest.mark.parametrize("uri", ["http://me:geheim@h:p", "http://me:geheim@[x", "postgresql://me@h:geheim/db"])
def test_invalid_uri_is_a_warning_without_its_text(ask: Ask, monkeypatch: pytest.MonkeyPatch, uri: str) -> None:
    monkeypatch.setenv("WHERE", uri)
    found = resource_checks.mlflow(ask("tracking={kind='mlflow', uri='$WHERE'}"))
    assert found.level == Level.WARNING
    assert found.what.endswith("is not reachable: it cannot be read as a URI; training continues without it")


def test_listening_database_is_reached(ask: Ask, listening: str) -> None:
    found = resource_checks.mlflow(ask(f"tracking={{kind='mlflow', uri='postgresql+psycopg2://{listening}/db'}}"))
    assert (found.level, found.what) == (Level.OK, f"`postgresql+psycopg2://{listening}/db`")
