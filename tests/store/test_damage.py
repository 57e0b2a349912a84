"""Damage to a run is reported by name, and the command of the hint is executed to its end for every kind of
damage."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from fakes.components import fake_recipe
from fakes.job import finished, play, result, saved_checkpoints, stop_at
from ppoctl.core.errors import CorruptArtifactError, RecipeError, StorageError
from ppoctl.store.compare_ledgers import compare
from ppoctl.store.discard import repair, roll_back
from ppoctl.store.journal import REPAIRED, read_lines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths

SAVES = {
    # States of step 3 only: without them the run starts over, from the recorded stages.
    "one pair": {"steps": 5, "checkpoint": {"every_steps": 3, "keep_last": 2}},
    # An older checkpoint two steps earlier.
    "two pairs": {"steps": 6, "checkpoint": {"every_steps": 2, "keep_last": 2}},
}
STOPPED_IN = {"one pair": 5, "two pairs": 6}


@pytest.fixture(scope="module", params=SAVES)
def stopped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """Return how the run saves, a run that was stopped in its last step, and the same run completed."""
    folder = tmp_path_factory.mktemp("damage")
    tables = SAVES[request.param]
    stop_at(folder / "half", f"{STOPPED_IN[request.param]} logprobs starts", **tables)
    finished(folder / "whole", **tables)
    return request.param, folder / "half", folder / "whole"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HOW: dict[str, Callable[[Path], None]] = {"flip": flip, "halve": halve, "delete": Path.unlink, "a folder": a_folder}
WHERE = {
    "the actor's table": "states/actor/{pair:06d}/table.bin",
    "the critic's table": "states/critic/{pair:06d}/table.bin",
    "the actor's manifest": "states/actor/{pair:06d}/manifest.json",
    "the critic's manifest": "states/critic/{pair:06d}/manifest.json",
    "a record": "steps/{last:06d}/20-reward/record.safetensors",
    "a manifest": "steps/{last:06d}/10-rollout/manifest.json",
}


@pytest.mark.sampled(6, 12)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("where", WHERE)
def test_recovery_from_the_hint_gives_the_undamaged_result(
    stopped: tuple[str, Path, Path], tmp_path: Path, where: str, how: str
) -> None:
    saves, half, whole = stopped
    paths = RunPaths(shutil.copytree(half, tmp_path / "run"))
    pair = saved_checkpoints(paths)[-1]
    HOW[how](paths.root / WHERE[where].format(pair=pair, last=STOPPED_IN[saves]))
    plan = plan_resume(RecordedRun(paths))
    unsaid = how in ("delete", "a folder") and "manifest" in where  # no manifest: nothing was committed there
    assert unsaid or plan.broken, plan
    if plan.broken:
        with pytest.raises(StorageError) as raised:
            plan.require_intact(paths)
        assert raised.value.hint is not None
        assert raised.value.hint.endswith(f"ppoctl resume {paths.root} --allow-missing")
        repaired, _ = repair(RecordedRun(paths), plan)
        assert not repaired.broken
    play(paths.root, fake_recipe(**SAVES[saves]))
    assert result(paths.root)["states"] == result(whole)["states"]
    assert compare(paths.ledger, RunPaths(whole).ledger).first is None


@pytest.mark.parametrize("name", ["journal.jsonl", "ledger.jsonl"])
@pytest.mark.parametrize("how", ["flip", "halve", "delete"])
def test_damaged_journal_or_ledger_is_named_and_intact_lines_kept(
    stopped: tuple[str, Path, Path], tmp_path: Path, name: str, how: str
) -> None:
    saves, half, whole = stopped
    paths = RunPaths(shutil.copytree(half, tmp_path / "run"))
    before = (paths.root / name).read_bytes()
    HOW[how](paths.root / name)
    plan = plan_resume(RecordedRun(paths))
    assert [item.name for item in plan.broken] == [name]
    with pytest.raises(CorruptArtifactError, match=name):
        plan.require_intact(paths)
    with pytest.raises(CorruptArtifactError, match=name):
        play(paths.root, fake_recipe(**SAVES[saves])) if how != "halve" else plan.require_intact(paths)
    _, done = repair(RecordedRun(paths), plan)
    assert any(name in text for text in done)
    if how != "delete":
        assert list((paths.root / "discarded").rglob(name))
    kept = (paths.root / name).read_bytes()
    assert how == "delete" or len(set(kept.splitlines()) & set(before.splitlines())) > 3
    play(paths.root, fake_recipe(**SAVES[saves]))
    assert result(paths.root)["states"] == result(whole)["states"]
    lines = read_lines(paths.journal)
    assert sorted({line["seq"] for line in lines}) == [line["seq"] for line in lines]
    assert [line["files"] for line in lines if line.get("event") == REPAIRED] == [[name]]
    assert not plan_resume(RecordedRun(paths)).broken


def test_changed_ledger_line_fails_its_checksum(stopped: tuple[str, Path, Path], tmp_path: Path) -> None:
    paths = RunPaths(shutil.copytree(stopped[1], tmp_path / "run"))
    lines = paths.ledger.read_bytes().splitlines(keepends=True)
    changed = lines[3].replace(b'"score": ', b'"score": 1', 1)
    assert changed != lines[3]
    paths.ledger.write_bytes(b"".join([*lines[:3], changed, *lines[4:]]))
    with pytest.raises(CorruptArtifactError, match=r"ledger\.jsonl` is corrupt: line 4"):
        compare(paths.ledger, RunPaths(stopped[2]).ledger)
    (item,) = plan_resume(RecordedRun(paths)).broken
    assert item.name == "ledger.jsonl"


def test_flipped_bit_in_a_manifest_fails_its_checksum(stopped: tuple[str, Path, Path], tmp_path: Path) -> None:
    paths = RunPaths(shutil.copytree(stopped[1], tmp_path / "run"))
    pair = saved_checkpoints(paths)[-1]
    path = paths.state("actor", pair) / "manifest.json"
    path.write_text(path.read_text().replace('"updates": ', '"updates": 1'))
    (item,) = plan_resume(RecordedRun(paths)).broken
    assert item.name == f"states/actor/{pair:06d}"
    assert "does not match its own checksum" in item.note


def test_roll_back_moves_later_steps_and_states_aside(tmp_path: Path) -> None:
    tables = SAVES["two pairs"]
    layout = stop_at(tmp_path / "half", "6 logprobs starts", **tables)
    finished(tmp_path / "whole", **tables)
    newest, older = saved_checkpoints(layout)[-1], saved_checkpoints(layout)[-2]
    shutil.copytree(layout.state("critic", newest), layout.at_stop / "critic")
    plan, done = roll_back(RecordedRun(layout), older)
    assert (plan.start, plan.broken) == (older, ())
    assert f"moved aside states/critic/{newest:06d}" in done
    assert {f"moved aside steps/{step:06d}" for step in range(older + 1, 7)} <= set(done)
    assert (layout.root / f"discarded/attempt-2/steps/{older + 1:06d}/10-rollout").is_dir()
    # The state that the stop left belongs to a later step.
    assert "moved aside states/at-stop" in done
    assert not layout.at_stop.exists()
    play(layout.root, fake_recipe(**tables))
    assert result(layout.root)["states"] == result(tmp_path / "whole")["states"]
    assert layout.ledger.read_bytes() == RunPaths(tmp_path / "whole").ledger.read_bytes()
    with pytest.raises(RecipeError, match=r"step 1 has no saved states to go back to \(saved steps: "):
        roll_back(RecordedRun(layout), 1)


def test_roll_back_by_one_step_discards_states_of_that_step(tmp_path: Path) -> None:
    checkpoint = {"every_steps": 1, "keep_last": 3, "asynchronous": False}
    layout = stop_at(tmp_path / "run", "4 rollout starts", checkpoint=checkpoint, steps=4)
    assert saved_checkpoints(layout) == [1, 2, 3]
    roll_back(RecordedRun(layout), 2)
    assert saved_checkpoints(layout) == [1, 2]


def test_run_restarts_if_every_checkpoint_is_broken(tmp_path: Path) -> None:
    tables = SAVES["two pairs"]
    layout = stop_at(tmp_path / "half", "6 logprobs starts", **tables)
    finished(tmp_path / "whole", **tables)
    assert not layout.stage(1, "actor_update").exists()
    for step in saved_checkpoints(layout):
        flip(layout.state("critic", step) / "table.bin")
    plan, done = repair(RecordedRun(layout), plan_resume(RecordedRun(layout)))
    assert plan.start == 0
    assert any(text.startswith("moved aside states/actor") for text in done)
    play(layout.root, fake_recipe(**tables))
    assert result(layout.root)["states"] == result(tmp_path / "whole")["states"]
    assert layout.ledger.read_bytes() == RunPaths(tmp_path / "whole").ledger.read_bytes()


@dataclass(frozen=True)
class OldListing(RunPaths):
    """A run directory on a file server whose listing still has states that were moved."""

    known: tuple[int, ...]

    def saved_steps(self, *roles: str) -> list[int]:
        return list(self.known)


@pytest.mark.timeout(30)
def test_repair_stops_if_an_item_breaks_again(stopped: tuple[str, Path, Path], tmp_path: Path) -> None:
    root = shutil.copytree(stopped[1], tmp_path / "run")
    layout = OldListing(root, tuple(saved_checkpoints(RunPaths(root))))
    newest = layout.known[-1]
    flip(layout.state("actor", newest) / "table.bin")
    with pytest.raises(StorageError, match=rf"`states/actor/{newest:06d}` \(missing\).* is broken again") as raised:
        repair(RecordedRun(layout), plan_resume(RecordedRun(layout)))
    assert raised.value.hint is not None
    assert raised.value.hint.endswith(f"ppoctl resume {root} --allow-missing")
    # The hint's command repairs the run once the listing is current.
    repaired, _ = repair(RecordedRun(RunPaths(root)), plan_resume(RecordedRun(RunPaths(root))))
    assert not repaired.broken
