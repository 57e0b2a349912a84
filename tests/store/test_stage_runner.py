"""`StageRunner`: reuses what is committed, refuses what does not belong, and names what is corrupt."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.components import fake_recipe
from fakes.job import Witness, finished, open_run, play, stop_at
from ppoctl.algorithms.ppo import PPO
from ppoctl.algorithms.trace import trace
from ppoctl.core.batch.sealed_json import seal, unseal
from ppoctl.core.errors import CorruptArtifactError, StorageError, SupersededError
from ppoctl.run.loop.steps import run
from ppoctl.store import attempt as attempts
from ppoctl.store import manifest as manifests
from ppoctl.store.discard import repair
from ppoctl.store.journal import Journal, read_lines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import FORMAT, MANIFEST, RunPaths
from store.conftest import Disk

SAVES_AT_THE_END = {"checkpoint": {"every_steps": 3}}


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stop_at(tmp_path_factory.mktemp("stopped") / "run", "3 actor_update starts", **SAVES_AT_THE_END).root


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """Return a run of three steps, stopped in step 3 before its actor was trained: steps 1 and 2 are only in the redo
    log."""
    return shutil.copytree(stopped_once, tmp_path / "run")


def test_reused_stage_runs_and_journals_nothing(stopped: Path) -> None:
    witness = Witness()
    wiring = open_run(stopped, fake_recipe(**SAVES_AT_THE_END), witness)
    run(wiring.job)
    assert [line["stage"] for line in witness.committed] == ["actor_update", "eval"]
    stages = [(line["step"], line["stage"]) for line in read_lines(RunPaths(stopped).journal) if "stage" in line]
    assert len(stages) == len(set(stages))


def test_resuming_a_finished_run_does_nothing(tmp_path: Path) -> None:
    play(tmp_path / "run")
    witness = Witness()
    play(tmp_path / "run", witness=witness)
    assert witness.moments == []


@pytest.mark.sampled(12, 24)
@pytest.mark.parametrize("stage", trace(PPO).outline.names[:-1])
@pytest.mark.parametrize("damage", ["a flipped bit", "a truncated file", "a missing file", "a manifest of nonsense"])
def test_damage_to_any_stage_record_is_named(stopped: Path, stage: str, damage: str) -> None:
    folder = RunPaths(stopped).stage(3, stage)
    path = folder / (MANIFEST if "manifest" in damage else "record.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[:-1] if "truncated" in damage else b"{}" if "manifest" in damage else data)
    if damage == "a missing file":
        path.unlink()
    with pytest.raises(CorruptArtifactError, match=re.escape(f"{folder.name}/{path.name}")):
        play(stopped, fake_recipe(**SAVES_AT_THE_END))
    broken = plan_resume(RecordedRun(RunPaths(stopped))).broken
    assert [item.name for item in broken] == [f"steps/000003/{folder.name}"]
    assert broken[0].action == "corrupt"


def test_damage_to_a_saved_state_is_named_before_loading(tmp_path: Path) -> None:
    recipe = fake_recipe(steps=3)
    play(tmp_path / "run", recipe)
    paths = RunPaths(tmp_path / "run")
    table = paths.state("actor", 3) / "table.bin"
    data = bytearray(table.read_bytes())
    data[7] ^= 16
    table.write_bytes(data)
    with pytest.raises(CorruptArtifactError, match=r"states/actor/000003/table\.bin"):
        play(tmp_path / "run", fake_recipe(steps=4))


def test_repaired_stage_is_rerun_with_the_same_result(stopped: Path, tmp_path: Path) -> None:
    paths = RunPaths(stopped)
    record = paths.stage(2, "values") / "record.safetensors"
    record.write_bytes(record.read_bytes()[:-3])
    _, done = repair(RecordedRun(paths), plan_resume(RecordedRun(paths)))
    assert done[0] == "moved aside steps/000002/30-values"
    assert (stopped / "discarded/attempt-2/steps/000002/30-values").is_dir()
    play(stopped, fake_recipe(**SAVES_AT_THE_END))
    play(tmp_path / "whole", fake_recipe(**SAVES_AT_THE_END))
    assert paths.ledger.read_bytes() == RunPaths(tmp_path / "whole").ledger.read_bytes()


def test_artifact_made_with_other_settings_is_refused(stopped: Path) -> None:
    changed = fake_recipe(**SAVES_AT_THE_END, seed=4)
    with pytest.raises(StorageError, match="other recipe keys"):
        play(stopped, changed)


def test_older_of_two_live_attempts_is_superseded_before_publishing(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def act(number: int, name: str) -> None:
        if name == "2 values written":
            play(root)  # a second process finishes the run meanwhile

    with pytest.raises(SupersededError, match=r"attempt 1 .* superseded by attempt 2"):
        play(root, witness=Witness(act=act))
    finished(tmp_path / "alone")
    assert RunPaths(root).ledger.read_bytes() == RunPaths(tmp_path / "alone").ledger.read_bytes()
    stages = [(line["step"], line["stage"]) for line in read_lines(RunPaths(root).journal) if "stage" in line]
    assert len(stages) == len(set(stages)) == 3 * 7 + 3
    assert not list(root.glob("steps/*/*.attempt-*"))


def test_run_directory_that_is_a_file_raises_storage_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="cannot write to run directory"):
        attempts.claim(RunPaths(tmp_path / "run"))


def test_full_disk_during_a_journal_append_leaves_no_torn_line(stopped: Path, disk: Disk) -> None:
    paths = RunPaths(stopped)
    attempt = attempts.claim(paths)
    journal = Journal(paths, attempt)
    size = paths.journal.stat().st_size
    with disk(size + 20), pytest.raises(StorageError, match="cannot write"):
        journal.event("attempt_ended", status="failed", exit_code=8)
    assert paths.journal.stat().st_size == size
    journal.event("attempt_ended", status="failed", exit_code=8)
    lines = read_lines(paths.journal)
    assert [line["seq"] for line in lines] == list(range(1, len(lines) + 1))


def test_two_journal_writers_write_each_line_once(stopped: Path) -> None:
    paths = RunPaths(stopped)
    one, other = (Journal(paths, attempt) for attempt in [attempts.claim(paths)] * 2)
    manifest = manifests.read(paths.stage(1, "values"))
    assert manifest is not None
    new = replace(manifest, step=9)
    assert one.ensure(new) is not None
    assert other.ensure(new) is None
    seqs = [line["seq"] for line in read_lines(paths.journal)]
    assert seqs == list(range(1, len(seqs) + 1))


KEEPS_EACH = {"prompts_per_step": 4, "max_prompt_tokens": 4, "max_new_tokens": 6, "keep_finished_every_s": 1e-9}


@pytest.mark.parametrize("moment", ["1 rollout renamed", "1 reward starts"])
def test_finished_samples_are_removed_when_their_stage_commits(tmp_path: Path, moment: str) -> None:
    layout = stop_at(tmp_path / "run", moment, rollout=KEEPS_EACH)
    assert layout.parts(1, "rollout").exists() == (moment == "1 rollout renamed")
    play(layout.root, fake_recipe(rollout=KEEPS_EACH))  # reuses it if the kill came before they were removed
    assert not list(layout.root.rglob("*.parts"))


def test_unknown_format_is_refused_and_is_not_corruption(stopped: Path) -> None:
    paths = RunPaths(stopped)
    readers: dict[Path, Callable[[], object]] = {
        paths.stage(2, "values") / MANIFEST: lambda: plan_resume(RecordedRun(paths)),
        paths.run_json: lambda: RecordedRun(paths).facts,
    }
    for path, read in readers.items():
        path.write_text(seal({**unseal(path.read_text()), "format": 7}, indent=1))
        with pytest.raises(StorageError, match=re.escape(f"`{path}` has format 7, this version")) as raised:
            read()
        assert not isinstance(raised.value, CorruptArtifactError)  # which `--allow-missing` would move aside


def test_invalid_manifest_with_a_valid_checksum_is_corrupt(stopped: Path) -> None:
    folder = RunPaths(stopped).stage(2, "values")
    (folder / MANIFEST).write_text(seal({"format": FORMAT, "files": ["record.safetensors"]}, indent=1))
    with pytest.raises(CorruptArtifactError, match=r"30-values/manifest\.json` is corrupt: not a manifest"):
        manifests.read(folder)
