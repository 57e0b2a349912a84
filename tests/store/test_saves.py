"""States that are written while training continues: when they count as saved, and what failures and stops do to
them."""

import errno
import os
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import pytest

from fakes.bigram import BigramSaving
from fakes.clock import Clock
from fakes.components import fake_recipe
from fakes.job import (
    StopError,
    Stops,
    Witness,
    finished,
    open_run,
    play,
    result,
    saved_checkpoints,
    stop_at,
    stopping_at,
    undisturbed,
)
from ppoctl.core.batch.digest import FileDigest
from ppoctl.core.errors import HealthStopError, PreemptedError, StorageError
from ppoctl.core.step_metrics import of_step
from ppoctl.recipe.schema import Recipe
from ppoctl.run.loop.steps import run
from ppoctl.show.report.expectations import history
from ppoctl.store import artifact
from ppoctl.store import manifest as manifests
from ppoctl.store.journal import Journal, read_lines
from ppoctl.store.run_paths import MANIFEST, RunPaths
from ppoctl.store.saves import Saves
from store.conftest import a_manifest, stops_from, working

STEPS = 4
SPLIT = {"optimizer": {"lr": 0.05}, "parallel": {"distributed_optimizer": True}}


def digest_of(data: bytes) -> FileDigest:
    return FileDigest("", len(data))


def published(paths: RunPaths, written: Mapping[str, FileDigest]) -> Path:
    """Publish a state of two files, as its writer describes them."""
    folder = paths.state("actor", 1)
    draft = artifact.Draft(folder, working(paths, 1), lambda moment: None)
    with draft.work():
        draft.open()
        (draft.aside / "a").write_bytes(b"12")
        (draft.aside / "b").write_bytes(b"345")
        draft.publish(a_manifest(stage="state/actor"), written)
    return folder


def test_manifest_has_the_digests_of_the_writers(paths: RunPaths) -> None:
    written = {"a": digest_of(b"12"), "b": digest_of(b"345")}
    found = manifests.read(published(paths, written))
    assert found is not None
    assert found.files == written


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"a": 2}, "b` has no digest from the process"),
        ({"a": 2, "b": 3, "c": 1}, "c` has a digest but does not exist"),
        ({"a": 2, "b": 4}, "b` has 3 bytes, but 4 were written"),
        ({"a": 1, "b": 3}, "a` has 2 bytes, but 1 were written"),
    ],
)
def test_mismatch_between_files_and_digests_is_not_published(
    paths: RunPaths, written: dict[str, int], says: str
) -> None:
    with pytest.raises(StorageError, match=says):
        published(paths, {name: FileDigest("", size) for name, size in written.items()})
    assert not paths.state("actor", 1).exists()
    assert list(working(paths, 1).own.iterdir()) == []


@pytest.mark.parametrize("looks", [1, inf, pytest.param(4, marks=pytest.mark.ci("1 and inf"))])
def test_state_needs_its_manifest_and_older_states_are_removed_later(tmp_path: Path, looks: float) -> None:
    paths = RunPaths(tmp_path / "run")
    pairs: list[list[int]] = []
    folders: list[int] = []

    def look(number: int, name: str) -> None:
        for role in ("actor", "critic"):
            for step in paths.saved_steps(role):
                assert (paths.state(role, step) / MANIFEST).is_file(), name
        pairs.append(saved_checkpoints(paths))
        folders.append(sum(1 for role in ("actor", "critic") for _ in paths.state(role, 1).parent.glob("*")))

    play(paths.root, fake_recipe(steps=STEPS), Witness(act=look, looks=looks))
    assert saved_checkpoints(paths) == [STEPS - 1, STEPS]
    newest = [max(found, default=0) for found in pairs]
    assert newest == sorted(newest)
    since_two = pairs[next(i for i, found in enumerate(pairs) if len(found) == 2) :]
    assert min(map(len, since_two)) == 2
    # Two checkpoints that count, and one that is being written.
    assert max(folders) == 6


def test_training_continues_during_a_save_and_the_next_save_waits(tmp_path: Path) -> None:
    witness = Witness(looks=inf)
    play(tmp_path / "run", fake_recipe(steps=2), witness)
    found = witness.moments
    assert found.index("1 state/critic writing") < found.index("2 rollout starts") < found.index("2 eval renamed")
    assert found.index("2 eval renamed") < found.index("1 state/critic written")
    assert found.index("1 state/actor renamed") < found.index("2 state/critic writing")


def test_training_waits_for_synchronous_saves(tmp_path: Path) -> None:
    witness = Witness(looks=inf)
    play(tmp_path / "run", fake_recipe(steps=2, checkpoint={"asynchronous": False}), witness)
    assert witness.moments.index("1 state/actor renamed") < witness.moments.index("2 rollout starts")


@pytest.mark.parametrize(("looks", "raised_after"), [(1, "1 state/actor writing"), (inf, "2 eval renamed")])
def test_full_disk_during_an_asynchronous_save_raises_at_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: float, raised_after: str
) -> None:
    witness = Witness(looks=looks)
    with monkeypatch.context() as full:
        full.setattr(BigramSaving, "_write_half", no_space)
        with pytest.raises(StorageError, match=r"cannot write .*states/critic/000001`: No space left") as raised:
            play(tmp_path / "run", fake_recipe(steps=2), witness)
    assert raised.value.hint is not None
    assert "df -h" in raised.value.hint
    assert witness.moments[-1] == raised_after
    paths = RunPaths(tmp_path / "run")
    assert saved_checkpoints(paths) == []
    assert not working(paths, 1).draft(paths.state("critic", 1)).exists()
    play(tmp_path / "run", fake_recipe(steps=2))
    assert result(tmp_path / "run") == undisturbed(steps=2)


def test_full_disk_after_the_last_step_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BigramSaving, "_write_half", no_space)
    with pytest.raises(StorageError, match="No space left"):
        play(tmp_path / "run", fake_recipe(steps=1), Witness(looks=inf))


def no_space(saving: BigramSaving) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_stopped_run_finishes_pending_saves(tmp_path: Path) -> None:
    witness, gate = Witness(looks=inf), Stops(when=lambda gate: gate.at == (2, "logprobs"))
    with pytest.raises(PreemptedError):
        run(open_run(tmp_path / "run", fake_recipe(), witness, gate=gate).job)
    assert "2 values renamed" in witness.moments
    assert saved_checkpoints(RunPaths(tmp_path / "run")) == [1]
    assert witness.moments[-1] == "1 state/actor renamed"


def test_health_stop_finishes_pending_saves(tmp_path: Path) -> None:
    with pytest.raises(HealthStopError):
        play(tmp_path / "run", fake_recipe(health=stops_from(1)), Witness(looks=inf))
    assert saved_checkpoints(RunPaths(tmp_path / "run")) == [1]


def test_unfinished_save_is_swept_and_repeated(tmp_path: Path) -> None:
    paths = stop_at(tmp_path / "run", "2 values starts")
    unfinished = working(paths, 1).draft(paths.state("actor", 1))
    assert (saved_checkpoints(paths), unfinished.exists()) == ([1], False)  # written by then
    with pytest.raises(StopError):
        play(tmp_path / "slow", fake_recipe(), stopping_at("2 values starts", looks=inf))
    paths = RunPaths(tmp_path / "slow")
    unfinished = working(paths, 1).draft(paths.state("actor", 1))
    assert (saved_checkpoints(paths), unfinished.exists()) == ([], True)
    play(paths.root)
    assert not unfinished.exists()
    assert result(paths.root) == undisturbed()


class SlowSave:
    """A trainer that takes 2 s to copy its state, and the save, of which 3 s are left when it is waited for."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def save(self, folder: Path, *, in_background: bool) -> "SlowSave":
        assert in_background
        (folder / "a").write_bytes(b"12")
        self.clock.now += 2.0
        return self

    def is_written(self) -> bool:
        return False

    def finish(self) -> dict[str, FileDigest]:
        self.clock.now += 3.0
        return {"a": digest_of(b"12")}


def test_journal_has_the_seconds_for_which_training_waited_for_a_save(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, attempt = Clock(), working(paths, 1)
    monkeypatch.setattr("time.monotonic", clock)
    saves = Saves(lambda _: None, in_background=True, journal=Journal(paths, attempt))
    draft = artifact.Draft(paths.state("actor", 4), attempt, lambda _: None)
    saves.begin(draft, a_manifest(stage="state/actor", step=4), SlowSave(clock))  # type: ignore[arg-type]
    clock.now += 30.0
    saves.settle()
    assert read_lines(paths.journal) == []
    saves.finish()
    [line] = read_lines(paths.journal)
    assert line | {"at": 0.0} == {
        "seq": 1, "event": "saved", "attempt": 1, "at": 0.0, "step": 4, "role": "actor", "seconds": 35.0,
        "waited_s": 5.0,
    }  # fmt: skip
    assert of_step([line]) == {"time/actor_save_s": 5.0}


def saved_lines(paths: RunPaths) -> list[tuple[int, str]]:
    return [(line["step"], line["role"]) for line in read_lines(paths.journal) if line.get("event") == "saved"]


def test_resumed_run_has_each_save_once(tmp_path: Path) -> None:
    """The second attempt replays the updates of step 3, and saves step 4."""
    recipe = fake_recipe(steps=4, checkpoint={"every_steps": 2})
    with pytest.raises(StopError):
        play(tmp_path / "run", recipe, stopping_at("4 logprobs starts"))
    paths = RunPaths(tmp_path / "run")
    assert sorted(saved_lines(paths)) == [(2, "actor"), (2, "critic")]
    play(paths.root, recipe)
    assert sorted(saved_lines(paths)) == [(2, "actor"), (2, "critic"), (4, "actor"), (4, "critic")]
    series = history(read_lines(paths.journal))
    assert [step for step, _ in series["time/actor_save_s"]] == [2, 4]
    assert [step for step, _ in series["time/values_s"]] == [1, 2, 3, 4]
    journal = open_run(paths.root, recipe, Witness()).job.journal
    assert not any(name.startswith("time/") for _, metrics in journal.history(up_to=4) for name in metrics)


def test_save_at_a_stop_succeeds_without_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk becomes full between the state and its line."""
    write = os.pwrite

    def full(file: int, data: bytes, at: int) -> int:
        if b'"event": "saved"' in data:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, at)

    monkeypatch.setattr("os.pwrite", full)
    gate = Stops(when=lambda gate: gate.at == (2, "logprobs"))
    with pytest.raises(PreemptedError):
        run(open_run(tmp_path / "run", fake_recipe(), Witness(looks=inf), gate=gate).job)
    paths = RunPaths(tmp_path / "run")
    assert saved_checkpoints(paths) == [1]
    assert saved_lines(paths) == []
    monkeypatch.undo()
    play(paths.root)
    assert result(paths.root) == undisturbed()


def narrow_tables(**checkpoint: object) -> dict[str, Any]:
    """Return the tables of a recipe with a distributed optimizer for both roles."""
    return {"actor": SPLIT, "critic": {"optimizer": {"lr": 0.1}}, "checkpoint": checkpoint}


def narrow_recipe(**checkpoint: object) -> Recipe:
    return fake_recipe(**narrow_tables(**checkpoint))


def reshardable(paths: RunPaths, step: int) -> list[str]:
    found = [manifests.read(paths.state(role, step)) for role in ("actor", "critic")]
    return [item.extra["layout"]["reshardable"] for item in found if item is not None]


def test_reshard_saves_a_checkpoint_without_training(tmp_path: Path) -> None:
    paths = finished(tmp_path / "run", **narrow_tables(reshardable="dp"))
    before = result(paths.root)
    assert reshardable(paths, 3) == ["dp", "dp"]
    witness = Witness()
    job = open_run(paths.root, narrow_recipe(), witness).job
    assert job.states.reshard(3) == ["actor", "critic"]
    assert reshardable(paths, 3) == ["full", "full"]
    assert result(paths.root) == before
    assert not any(moment.startswith("inside critic_update") for moment in witness.moments)
    assert job.states.reshard(3) == []


@pytest.mark.parametrize(
    ("role", "moment"),
    [
        *(("actor", "writing"), ("actor", "removed"), ("critic", "written"), ("critic", "renamed")),
        *(
            pytest.param(role, moment, marks=pytest.mark.ci("the same moment of the other role"))
            for role, moments in (("critic", ("writing", "removed")), ("actor", ("written", "renamed")))
            for moment in moments
        ),
    ],
)
def test_kill_during_reshard_costs_at_most_a_replay(tmp_path: Path, role: str, moment: str) -> None:
    finished(tmp_path / "run", **narrow_tables(reshardable="dp"))
    before = undisturbed(**narrow_tables(reshardable="dp"))
    job = open_run(tmp_path / "run", narrow_recipe(), stopping_at(f"3 state/{role} {moment}")).job
    with pytest.raises(StopError):
        job.states.reshard(3)
    play(tmp_path / "run", narrow_recipe())
    assert result(tmp_path / "run") == before
