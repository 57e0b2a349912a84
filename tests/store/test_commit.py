"""Commits: what is on the disk at which moment, what is never overwritten, and which attempt may commit."""

import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.job import PPO_STEP_FUNCTIONS, new_run_dir
from ppoctl.core.errors import StorageError, SupersededError
from ppoctl.store import artifact, run_dir
from ppoctl.store import manifest as manifests
from ppoctl.store.append import opened
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.disk_errors import size_of
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import MANIFEST, RunPaths
from store.conftest import Disk, Stale, a_manifest, working


def ignore_moment(moment: str) -> None:
    """Do nothing."""


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the inodes that were flushed to the disk, in order."""
    inodes: list[object] = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        inodes.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    return inodes


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_commit_flushes_data_then_manifest_then_rename(paths: RunPaths, flushed: list[object]) -> None:
    folder = paths.stage(1, "values")
    write = artifact.write_bytes({"a": b"1", "b": b"2"})
    artifact.commit(folder, write, a_manifest(), working(paths, 1), flushed.append)
    data = [inode(folder / name) for name in ("a", "b", MANIFEST)]
    assert flushed == ["writing", *data, inode(folder), "written", inode(folder.parent), "renamed"]


def test_commit_renames_only_after_all_files_are_written(paths: RunPaths) -> None:
    folder = paths.stage(1, "values")
    seen: dict[str, tuple[bool, bool]] = {}

    def look(moment: str) -> None:
        aside = working(paths, 1).draft(folder)
        seen[moment] = (folder.exists(), (aside / MANIFEST).is_file() or (folder / MANIFEST).is_file())

    artifact.commit(folder, artifact.write_bytes({"a": b"1"}), a_manifest(), working(paths, 1), look)
    assert seen == {"writing": (False, False), "written": (False, True), "renamed": (True, True)}
    manifest = manifests.read(folder)
    assert manifest is not None
    assert (list(manifest.files), manifest.files["a"].size) == (["a"], 1)


def test_commit_never_overwrites_an_artifact(paths: RunPaths) -> None:
    folder = paths.stage(1, "values")
    attempt = working(paths, 1)
    artifact.commit(folder, artifact.write_bytes({"a": b"first"}), a_manifest(), attempt, ignore_moment)
    with pytest.raises(StorageError):
        artifact.commit(folder, artifact.write_bytes({"a": b"second"}), a_manifest(), attempt, ignore_moment)
    assert (folder / "a").read_bytes() == b"first"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_full_disk_leaves_no_folder_and_no_partial_artifact(paths: RunPaths, disk: Disk) -> None:
    folder = paths.state("actor", 1)
    with disk(100), pytest.raises(StorageError, match="File too large"):
        artifact.commit(
            folder, artifact.write_bytes({"a": b"x" * 200}), a_manifest(), working(paths, 1), ignore_moment
        )
    assert not folder.parent.exists()
    assert list(working(paths, 1).own.iterdir()) == []


@pytest.mark.parametrize("moment", ["writing", "written"])
def test_overtaken_attempt_does_not_publish(paths: RunPaths, moment: str) -> None:
    folder = paths.state("actor", 1)
    attempt = working(paths, 1)

    def take_over(reached: str) -> None:
        if reached == moment:
            claim(paths)

    with pytest.raises(SupersededError, match="superseded by attempt 2"):
        artifact.commit(folder, artifact.write_bytes({"a": b"1"}), a_manifest(), attempt, take_over)
    assert not folder.exists()


def test_sweep_removes_only_half_written_and_half_removed_folders(paths: RunPaths) -> None:
    kept = [paths.stage(1, "values"), paths.state("actor", 1), paths.parts(2, "rollout")]
    half = [folder.with_name(f"{folder.name}.attempt-1") for folder in kept[:2]]
    half_removed = paths.state("critic", 1)
    for folder in (*kept, *half, half_removed):
        folder.mkdir(parents=True)
    for folder in (*kept[:2], *half):
        (folder / MANIFEST).write_text("{}")
    artifact.sweep(working(paths, 1))
    assert [folder.is_dir() for folder in (*kept, *half, half_removed)] == [True] * 3 + [False] * 3


def test_small_file_write_is_atomic(paths: RunPaths, disk: Disk, flushed: list[object]) -> None:
    working(paths, 1).write(paths.run_json, b'{"id": 1}')
    assert flushed == [inode(paths.run_json), inode(paths.root)]
    with disk(4), pytest.raises(StorageError):
        working(paths, 1).write(paths.run_json, b'{"id": 2}')
    assert paths.run_json.read_bytes() == b'{"id": 1}'


def test_run_directory_is_not_created_on_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    with disk(10), pytest.raises(StorageError, match="cannot write"):
        run_dir.create(RunPaths(tmp_path / "run"), recipe_toml="x" * 50, resolved=PPO_STEP_FUNCTIONS, facts={})
    assert list(tmp_path.iterdir()) == []


def test_append_flushes_the_line_before_returning(paths: RunPaths, flushed: list[object]) -> None:
    with opened(paths.journal) as file:
        file.append(b"line\n")
        assert flushed == [inode(paths.journal)]


def test_attempt_numbers_are_never_reused(paths: RunPaths) -> None:
    """Even if nothing is left of the first attempts."""
    claim(paths)
    newest = claim(paths).number
    for number in range(1, newest):
        paths.attempt(number).rmdir()
        paths.drafts(number).unlink()
    assert claim(paths).number == newest + 1


def test_racing_claims_get_distinct_numbers_and_the_last_owns_the_run(paths: RunPaths) -> None:
    for _ in range(10):
        gate = threading.Barrier(8)
        claimed: list[Attempt] = []

        def race(gate: threading.Barrier = gate, claimed: list[Attempt] = claimed) -> None:
            gate.wait()
            with suppress(SupersededError):
                claimed.append(claim(paths))

        racers = [threading.Thread(target=race) for _ in range(8)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join()
        assert len({attempt.number for attempt in claimed}) == len(claimed)
        newest = max(claimed, key=lambda attempt: attempt.number)
        assert newest.number == paths.newest_attempt
        newest.require_newest()
        for attempt in claimed:
            if attempt is not newest:
                with pytest.raises(SupersededError):
                    replace(attempt, paths=Stale(paths.root, (attempt.number,))).require_newest()


def test_attempt_whose_folder_a_newer_attempt_is_closing_is_superseded(paths: RunPaths) -> None:
    class Listed(RunPaths):
        """A newer attempt begins after the first listing."""

        def attempts(self) -> list[int]:
            return next(listings)

    old = claim(paths)
    listings = iter(([old.number], [old.number, old.number + 1]))
    old.close()  # what the newer attempt does before it creates the file in place of the folder
    with pytest.raises(SupersededError, match="superseded by a newer one"):
        replace(old, paths=Listed(paths.root)).require_newest()


def test_run_facts_are_completed_only_once(tmp_path: Path) -> None:
    paths = new_run_dir(tmp_path / "run", sources={"model": "m"})
    attempt = claim(paths)
    run_dir.complete(attempt, {"model": "m", "tokenizer": "t"}, {"data.train": {"read": 3, "used": 2}})
    run_dir.complete(attempt, {"model": "m", "tokenizer": "t"}, {"data.train": {"read": 9, "used": 9}})
    found = RecordedRun(paths).facts
    assert found["sources"] == {"model": "m", "tokenizer": "t"}
    assert found["rows"] == {"data.train": {"read": 3, "used": 2}}


def test_link_files_keeps_relative_paths_and_uses_no_space(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("a", "x/a", "x/y/b", MANIFEST):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(name.encode() * 1000)
    target.mkdir()
    artifact.link_files(source, target)
    found = {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert found == {name: name.encode() * 1000 for name in ("a", "x/a", "x/y/b")}
    # A file with two names is counted once.
    assert size_of(tmp_path) == size_of(source) == 1000 * (1 + 3 + 5 + len(MANIFEST))
    assert size_of(tmp_path / "nowhere") == 0
