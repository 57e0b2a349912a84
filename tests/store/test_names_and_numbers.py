"""Details of a run's folders: sizes of files, numbers after names, and which folders count."""

from pathlib import Path

import pytest

from ppoctl.core.batch.digest import FileDigest
from ppoctl.core.errors import CorruptArtifactError
from ppoctl.store import manifest as manifests
from ppoctl.store.attempt import Attempt
from ppoctl.store.run_paths import MANIFEST, RunPaths


def test_file_with_the_right_size_and_other_bytes_is_corrupt(tmp_path: Path) -> None:
    found, expected = FileDigest("aa" * 32, 3), FileDigest("ab" * 32, 3)
    manifests.verify_bytes(tmp_path, found, found)
    with pytest.raises(CorruptArtifactError, match="digest aaaaaaaaaaaa, its manifest has abababababab"):
        manifests.verify_bytes(tmp_path, found, expected)


def test_moved_aside_folder_takes_the_next_free_name(tmp_path: Path) -> None:
    target = tmp_path / "10-rollout"
    names = []
    for _ in range(3):
        names.append(Attempt.free(target).name)
        Attempt.free(target).mkdir()
    assert names == ["10-rollout", "10-rollout.2", "10-rollout.3"]


def test_folder_left_by_a_kill_is_not_committed(paths: RunPaths) -> None:
    killed = paths.step(4) / "10-rollout.attempt-2"
    killed.mkdir(parents=True)
    (killed / MANIFEST).write_text("{}")
    assert not paths.has_committed(4)
    killed.rename(paths.stage(4, "rollout"))
    assert paths.has_committed(4)


def test_second_rollout_round_has_its_own_folders(paths: RunPaths) -> None:
    assert paths.stage(1, "rollout") != paths.stage(1, "rollout.2")
    assert paths.parts(1, "rollout") != paths.parts(1, "rollout.2")


def test_saved_steps_have_a_manifest_and_are_sorted(paths: RunPaths) -> None:
    for step, is_whole in ((10, True), (9, True), (11, False), (2, True)):
        folder = paths.state("actor", step)
        folder.mkdir(parents=True)
        if is_whole:
            (folder / MANIFEST).write_text("{}")
    assert paths.saved_steps("actor") == [2, 9, 10]
