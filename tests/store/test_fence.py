"""The fence: a superseded attempt changes nothing, at any moment and after any check."""

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from end_to_end.drill import side_by_side
from fakes.components import fake_recipe
from fakes.job import Witness, new_run_dir, open_run, play, result
from ppoctl.core.errors import StorageError, SupersededError
from ppoctl.run.loop.steps import run
from ppoctl.store import artifact, run_dir
from ppoctl.store.attempt import Attempt, claim
from ppoctl.store.journal import Journal
from ppoctl.store.run_paths import RunPaths
from store.conftest import Stale, a_manifest, working

RECIPE = {
    "steps": 3,
    "checkpoint": {"every_steps": 1, "keep_last": 2, "best": "reward/score_mean"},
    "rollout": {
        "prompts_per_step": 2,
        "samples_per_prompt": 1,
        "max_prompt_tokens": 4,
        "max_new_tokens": 6,
        "keep_finished_every_s": 1e-9,
    },
    "ppo": {"epochs": 1, "minibatch_seqs": 2},
}
"""Everything that writes into a run: stages, both ways of saving, the best state, finished samples, retention."""


def contents(root: Path) -> dict[str, bytes | None]:
    """Return a folder's files with their bytes; folders map to None."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None for path in root.rglob("*")
    }


@dataclass(frozen=True)
class Slow(Attempt):
    """An attempt whose process pauses right after it has checked that it is the newest."""

    pause: Callable[[int], None]
    checks: list[int] = field(default_factory=list)

    def require_newest(self) -> None:
        super().require_newest()
        self.checks.append(len(self.checks))
        self.pause(self.checks[-1])


def overtaken(root: Path, *, at_moment: str = "", at_check: int = -1) -> list[str]:
    """Run; at this moment, or after this check, let another attempt finish the run. Return the checks and moments so
    far; without arguments, those of a complete run.

    The old attempt sees only its own number in the list of attempts, for as long as it lives.
    """
    after: list[dict[str, bytes | None]] = []
    passed: list[str] = []

    def another() -> None:
        play(root, fake_recipe(**RECIPE))
        after.append(contents(root))

    def on_moment(number: int, name: str) -> None:
        passed.append(name)
        if name == at_moment:
            another()

    def on_check(number: int) -> None:
        passed.append(f"check {number}")
        if number == at_check:
            another()

    def slow(paths: RunPaths) -> Attempt:
        found = claim(paths)
        stale = Stale(paths.root, (found.number,))
        return Slow(stale, found.number, found.key, on_check)

    witness = Witness(act=on_moment)
    if not at_moment and at_check < 0:
        run(open_run(root, fake_recipe(**RECIPE), witness, claim=slow).job)
        return passed
    with suppress(SupersededError):  # an attempt superseded at its last moment has nothing left to do
        run(open_run(root, fake_recipe(**RECIPE), witness, claim=slow).job)
    assert len(after) == 1, "nobody overtook it"
    assert contents(root) == after[0]
    return passed


@pytest.mark.parametrize("each", [60, pytest.param(10, marks=pytest.mark.ci("one in 60"))])
def test_overtaken_attempt_changes_nothing_at_any_moment(tmp_path: Path, each: int) -> None:
    """Every `each`th moment, and every `each`th check, is tried."""
    passed = overtaken(tmp_path / "whole")
    moments = list(dict.fromkeys(name for name in passed if not name.startswith("check")))
    checks = [name for name in passed if name.startswith("check")]
    kinds = {name.split()[-1] for name in moments}
    assert {"writing", "written", "renamed", "samples"} <= kinds
    assert len(checks) > 40

    def at(number: int, name: str) -> None:
        try:
            if name.startswith("check"):
                overtaken(tmp_path / f"{number}", at_check=int(name.split()[1]))
            else:
                overtaken(tmp_path / f"{number}", at_moment=name)
            assert result(tmp_path / f"{number}") == result(tmp_path / "whole")
        except BaseException as error:
            error.add_note(f"overtaken at: {name}")
            raise

    # All 250 of them take minutes; neighbours differ little.
    selected = [*moments[3::each], *checks[1::each]]
    side_by_side([partial(at, number, name) for number, name in enumerate(selected)])


@pytest.fixture
def old(paths: RunPaths) -> Attempt:
    """Return the first attempt of a run; on its machine the listing shows no newer attempt."""
    return replace(working(paths, 1), paths=Stale(paths.root, (1,)))


def test_overtaken_attempt_cannot_change_files_without_checking(paths: RunPaths, old: Attempt) -> None:
    written = old.draft(paths.stage(1, "values"))
    written.mkdir()
    newer = claim(paths)
    newer.write(paths.stage(1, "rollout") / "a", b"1")
    before = contents(paths.root)
    changes: list[Callable[[], object]] = [
        lambda: written.rename(paths.stage(1, "values")),
        lambda: written.mkdir(),
        lambda: old.place(written, paths.stage(7, "values")),
        lambda: old.write(paths.recipe_toml, b"x"),
        lambda: old.remove(paths.stage(1, "rollout")),
        lambda: old.renew(paths.journal),
        lambda: old.set_aside(paths.stage(1, "rollout")),
        lambda: artifact.commit(paths.stage(1, "values"), artifact.write_bytes({}), a_manifest(), old, print),
        lambda: Journal(old.paths, old).event("attempt_ended"),
        lambda: run_dir.change_recipe(old, {"steps": 2}, from_step=1),
        lambda: artifact.sweep(old),
    ]
    for change in changes:
        with pytest.raises((OSError, SupersededError)):
            change()
        assert contents(paths.root) == before


def test_writes_to_a_file_opened_by_an_old_attempt_are_lost(paths: RunPaths) -> None:
    descriptor = os.open(paths.journal, os.O_RDWR)
    newer = claim(paths)
    Journal(paths, newer).event("attempt_started")
    before = paths.journal.read_bytes()
    os.pwrite(descriptor, b"{}\n" * 100, 0)
    os.ftruncate(descriptor, 1)
    os.close(descriptor)
    assert paths.journal.read_bytes() == before


def test_attempt_of_a_replaced_run_cannot_write_to_the_new_run(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    attempts = []
    for _ in range(2):
        if paths.root.exists():
            run_dir.remove(paths)
        new_run_dir(paths.root)
        attempts.append(claim(paths))
    old, newer = attempts
    assert old.number == newer.number == 1
    with pytest.raises(StorageError):
        old.write(paths.recipe_toml, b"x")
    newer.write(paths.recipe_toml, b"y")


def test_folder_being_moved_aside_survives_a_new_claim(paths: RunPaths, old: Attempt) -> None:
    state = paths.state("actor", 3)
    old.write(state / "a", b"1")
    state.rename(old.own / "discarded.states.actor.000003")  # and it was killed here
    claim(paths)
    assert (paths.discarded(1) / "states.actor.000003" / "a").read_bytes() == b"1"


def test_claim_finishes_while_the_old_attempt_keeps_writing(paths: RunPaths, old: Attempt) -> None:
    begun, refused = threading.Event(), list[OSError]()

    def keeps_writing() -> None:
        number = 0
        while not refused:
            try:
                folder = old.own / f"{number}"
                folder.mkdir()
                (folder / "a").write_bytes(b"1")
                folder.rename(paths.root / f"published-{number}")
            except OSError as error:
                if not old.own.is_dir():
                    refused.append(error)
            number += 1
            if number == 20:
                begun.set()

    writer = threading.Thread(target=keeps_writing)
    writer.start()
    begun.wait()
    claim(paths)
    before = contents(paths.root)
    writer.join()
    assert contents(paths.root) == before
    published = [name for name in before if name.startswith("published-")]
    whole = {name for name in published if name.endswith("/a")}
    assert len(published) == 2 * len(whole), "one was published without its file"


def test_draft_under_deletion_cannot_be_published(
    paths: RunPaths, old: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = old.draft(paths.state("actor", 1))
    draft.mkdir()
    (draft / "a").write_bytes(b"1")
    deleted: list[Path] = []

    def slowly(path: Path, **_: object) -> None:
        deleted.append(path)
        (path / "a").unlink()
        with suppress(OSError):
            draft.rename(paths.root / "published")  # by the old attempt, in the middle of it
        path.rmdir()

    monkeypatch.setattr(shutil, "rmtree", slowly)
    claim(paths)
    assert len(deleted) == 1
    assert not (paths.root / "published").exists()


def test_claim_closes_attempts_of_an_earlier_version(tmp_path: Path) -> None:
    paths = new_run_dir(tmp_path / "run")
    for number in (1, 2):
        paths.attempt(number).mkdir()
    assert claim(paths).number == 3
    assert [paths.drafts(number).is_file() for number in (1, 2, 3)] == [True, True, False]
