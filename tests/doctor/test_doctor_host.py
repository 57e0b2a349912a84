"""The doctor's checks of shared memory, limits, ports, and the file system of the runs folder."""

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doctor.machines import WIDE, node
from ppoctl.core.finding import Finding, Level
from ppoctl.start.doctor import folders, host

MIB = 1 << 20


def named(found: Any, name: str) -> Finding:
    return {finding.where: finding for finding in found}[name]


def test_missing_shared_memory_is_wrong(tmp_path: Path) -> None:
    found = host.shared_memory(node(tmp_path / "shm"))
    assert found.level == Level.ERROR
    assert found.what == f"`{tmp_path}/shm`: No such file or directory"
    assert found.hint == f"sudo mount -o remount,size=50% {tmp_path}/shm  # in a container: --shm-size 64g"


@pytest.mark.parametrize(
    ("size_mib", "free_mib", "level"),
    [(64, 64, Level.ERROR), (511, 511, Level.ERROR), (1024, 100, Level.WARNING), (1024, 600, Level.OK)],
)
def test_shared_memory_must_exceed_the_ray_store(
    monkeypatch: pytest.MonkeyPatch, size_mib: int, free_mib: int, level: Level
) -> None:
    """Docker gives a container 64 MiB by default."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_frsize=MIB, f_blocks=size_mib, f_bavail=free_mib))
    found = host.shared_memory(node())
    assert found.level == level
    assert f"{free_mib} MiB free" in found.what


@pytest.mark.parametrize(
    ("letter", "value", "name", "level", "hint"),
    [
        ("n", 256, "open files", Level.ERROR, "ulimit -n 65536"),
        ("n", 1024, "open files", Level.WARNING, "ulimit -n 65536"),
        ("u", 1000, "processes", Level.WARNING, "ulimit -u 4096"),
        ("v", 64 << 30, "address space", Level.ERROR, "ulimit -v unlimited"),
    ],
)
def test_low_limit_is_found(letter: str, value: int, name: str, level: Level, hint: str) -> None:
    found = named(host.limits(replace(node(), limits={**WIDE, letter: value})), name)
    assert (found.level, found.hint) == (level, hint)


def test_address_space_limit_without_gpus_is_only_a_warning() -> None:
    hidden = replace(node(), limits={**WIDE, "v": 64 << 30}, environ={"CUDA_VISIBLE_DEVICES": ""})
    assert named(host.limits(hidden), "address space").level == Level.WARNING


def test_failing_loopback_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    assert host.ports(node()).level == Level.OK
    monkeypatch.setattr(socket, "create_server", refuse)
    assert host.ports(node()).hint == "sudo ip link set lo up"


def test_slurm_is_reported_and_not_required() -> None:
    assert host.slurm(node()).what == "none, and not needed"
    job = replace(node(), environ={"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "4"})
    assert host.slurm(job).what == "job 17 on 4 nodes"


def raises(code: int) -> Callable[..., None]:
    def call(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return call


def test_complete_file_system_is_ok_and_left_unchanged(tmp_path: Path) -> None:
    found = list(folders.runs_folder(tmp_path / "runs"))
    assert [finding.where for finding in found] == ["runs folder", "locks", "rename", "listing"]
    assert {finding.level for finding in found[1:]} == {Level.OK}
    assert list(tmp_path.iterdir()) == []


def test_file_system_without_locks_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", raises(errno.ENOLCK))
    found = named(folders.runs_folder(tmp_path), "locks")
    assert (found.level, found.what) == (Level.ERROR, f"in `{tmp_path}`: No locks available")
    assert found.hint == folders.ELSEWHERE


def test_lock_granted_twice_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system that is mounted with node-local locks, or without locks."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    found = named(folders.runs_folder(tmp_path), "locks")
    assert (found.level, found.what) == (Level.ERROR, "two processes can lock a file at the same time")


def test_failing_rename_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "rename", raises(errno.EXDEV))
    found = named(folders.runs_folder(tmp_path), "rename")
    assert (found.level, found.what) == (Level.ERROR, f"in `{tmp_path}`: {os.strerror(errno.EXDEV)}")


def test_late_directory_listing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda _: [])
    assert named(folders.runs_folder(tmp_path), "listing").level == Level.ERROR


def test_unwritable_folder_is_reported_like_at_a_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    [found] = folders.runs_folder(tmp_path / "file" / "runs")
    assert found.what == f"`{tmp_path}/file` is a file, but `{tmp_path}/file/runs` must be a folder"


def test_dangling_link_is_reported_with_its_disk(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("gone")
    [found] = folders.runs_folder(tmp_path / "runs" / "mine")
    assert found.what == f"`{tmp_path}/runs` is a link to `{tmp_path}/gone`, which does not exist"
    assert found.hint == f"mkdir -p {tmp_path}/gone"
    assert [finding.where for finding in folders.disk(tmp_path / "runs")] == ["disk", "disk of /tmp"]


def test_nearly_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = SimpleNamespace(total=100 << 30, used=97 << 30, free=3 << 30)
    monkeypatch.setattr("shutil.disk_usage", lambda _: room)
    assert [finding.level for finding in folders.disk(tmp_path)] == [Level.WARNING, Level.WARNING]
    assert named(folders.disk(tmp_path), "disk").hint == f"df -h {tmp_path}"
