"""The folder of a local Ray is private to the user, and a sweep removes only what the user's dead processes left."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ppoctl.engines.ray import node, shared_memory
from ppoctl.engines.ray.private_folder import PrivateFolder, sweep, write_token


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def left_in(parent: Path) -> Path:
    """Return the folder of a process that was killed."""
    program = (
        "import sys, time; from pathlib import Path; from ppoctl.engines.ray.private_folder import PrivateFolder\n"
        "print(PrivateFolder(Path(sys.argv[1])).path, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    sweep(parent)
    assert folder.exists(), "it lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return folder


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """Return a folder that stands for /dev/shm."""
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


def test_private_folder_is_unreadable_and_token_is_random(tmp_path):
    before = os.umask(0)
    try:
        folders = [PrivateFolder(tmp_path), PrivateFolder(tmp_path)]
        for folder in folders:
            write_token(folder.token)
    finally:
        os.umask(before)
    assert [mode(folder.path) for folder in folders] == [0o700] * 2
    assert [mode(folder.token) for folder in folders] == [0o600] * 2
    tokens = {folder.token.read_text() for folder in folders}
    assert len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)
    for folder in folders:
        folder.remove()
    assert not list(tmp_path.iterdir())


def test_sweep_removes_dead_folder_and_segments_but_keeps_live(tmp_path, memory):
    """A lock marks a live folder: process ids are ambiguous if containers share the folder."""
    parent = tmp_path / "tmp"
    parent.mkdir()
    live, dead = PrivateFolder(parent), left_in(parent)
    (memory / "psm_1").touch()
    (memory / "psm_2").touch()
    shared_memory.note(dead, ["psm_1"])
    shared_memory.note(live.path, ["psm_2"])
    sweep(parent)
    assert list(parent.iterdir()) == [live.path]
    assert [file.name for file in memory.iterdir()] == ["psm_2"]
    live.remove()


def test_sweep_ignores_folders_of_other_user(tmp_path, memory, monkeypatch):
    parent = tmp_path / "tmp"
    parent.mkdir()
    planted = left_in(parent)
    (memory / "mine").touch()
    shared_memory.note(planted, ["mine"])
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    sweep(parent)
    assert planted.exists()
    assert (memory / "mine").exists()


@pytest.mark.parametrize("name", ["../kept", "{folder}/kept", "inner/kept"])
def test_segment_removal_ignores_paths_outside_shared_memory(tmp_path, memory, name):
    (memory / "inner").mkdir()
    kept = [tmp_path / "kept", memory / "inner" / "kept"]
    for file in kept:
        file.touch()
    shared_memory.remove([name.format(folder=tmp_path)])
    assert all(file.exists() for file in kept)


def test_segment_removal_ignores_other_user(memory, monkeypatch):
    (memory / "psm_1").touch()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    shared_memory.remove(["psm_1"])
    assert (memory / "psm_1").exists()


def test_sweep_does_not_follow_symlink(tmp_path, memory):
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    (memory / "mine").touch()
    shared_memory.note(target, ["mine"])
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "ppoctl-ray-abcdefgh").symlink_to(target)
    sweep(tmp_path / "tmp")
    assert target.exists()
    assert (memory / "mine").exists()


@pytest.mark.parametrize("bits", [0o777, 0o755, 0o770])
def test_sweep_ignores_folder_accessible_to_others(tmp_path, bits):
    planted = tmp_path / "ppoctl-ray-abcdefgh"
    planted.mkdir()
    planted.chmod(bits)
    sweep(tmp_path)
    assert planted.exists()


def test_sweep_ignores_other_kinds_of_private_folder(tmp_path):
    """For example an export that an engine of another command is about to load, which is not locked."""
    export = Path(tempfile.mkdtemp(prefix="ppoctl-export-", dir=tmp_path))
    sweep(tmp_path)
    assert export.exists()


def test_node_sets_gloo_and_nccl_interface_unless_exported(tmp_path, monkeypatch):
    """NCCL treats a name as a prefix: `=` selects exactly this interface."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    folder = PrivateFolder(tmp_path)
    found = node._environment("127.0.0.1", folder)
    assert [found[name] for name in names] == ["lo", "=lo"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    found = node._environment("127.0.0.1", folder)
    assert [found[name] for name in names] == ["lo", "ib0"]
    assert "GLOO_SOCKET_IFNAME" not in node._environment("192.0.2.1", folder)  # not an address of this machine
