"""Further rounds of a step on disk: in a resume plan, in a repair, and in retention."""

from itertools import takewhile
from pathlib import Path
from shutil import rmtree

import pytest

from ppoctl.core.batch.records import Record
from ppoctl.run.new_run import holds_only_rollouts
from ppoctl.store import manifest as manifests
from ppoctl.store.discard import repair
from ppoctl.store.journal import read_lines
from ppoctl.store.outline import Outline, OutlineEntry
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.retention import Retention
from ppoctl.store.rounds import stages_in_rounds, stages_present
from ppoctl.store.run_paths import MANIFEST
from store import steps_on_disk
from store.steps_on_disk import ROUNDS, RunOnDisk, on_disk, two_rounds

AFTER = ["40-logprobs", "50-advantages", "70-actor_update"]


def until(stage: str) -> dict[str, Record]:
    """Return the records before a stage."""
    return dict(takewhile(lambda item: item[0] != stage, two_rounds().items()))


def actions(run: RunOnDisk) -> dict[str, str]:
    """Return stage folder -> action of a resume of step 1."""
    return {item.name.rpartition("/")[2]: item.action for item in plan_resume(RecordedRun(run.paths)).items}


@pytest.fixture
def whole(tmp_path: Path) -> RunOnDisk:
    run = on_disk(tmp_path / "run", ROUNDS)
    run.commit(1, two_rounds())
    return run


def test_loops_run_round_by_round_and_two_loops_do_not_mix() -> None:
    entries = [OutlineEntry(name, (), at_most=3, loop=loop) for name, loop in (("a", 1), ("b", 1), ("c", 2))]
    stages = stages_in_rounds(Outline("two loops", (*entries, OutlineEntry("d", ()))), {1: 2, 2: 3})
    assert [stage.name for stage in stages] == ["a", "b", "a.2", "b.2", "c", "c.2", "c.3", "d"]


def test_manifest_of_a_selection_says_whether_it_is_full(whole: RunOnDisk) -> None:
    found = {name: manifests.require(whole.paths.stage(1, name)).extra for name in ("rollout", "keep", "keep.2")}
    assert found == {
        "rollout": {"clocked": {}},
        "keep": {"clocked": {}, "is_full": False},
        "keep.2": {"clocked": {}, "is_full": True},
    }


def test_plan_has_the_stages_of_each_round_in_order(whole: RunOnDisk) -> None:
    first = ["10-rollout", "20-reward", "keep"]
    folders = [*first, *(f"{name}.2" for name in first), *AFTER]
    assert list(actions(whole).items()) == [
        (name, "replayed" if name == "70-actor_update" else "recalled") for name in folders
    ]


def test_round_that_must_follow_is_planned(tmp_path: Path) -> None:
    run = on_disk(tmp_path / "run", ROUNDS)
    run.commit(1, until("rollout.2"))
    assert [name for name, action in actions(run).items() if action == "run"] == [
        "10-rollout.2",
        "20-reward.2",
        "keep.2",
        *AFTER,
    ]
    run.commit(1, dict(list(two_rounds().items())[3:6]))
    assert not any(name.endswith(".3") for name in actions(run))
    run.paths.parts(1, "rollout.3").mkdir()  # finished samples, which the step may not need
    assert not any(name.endswith(".3") for name in actions(run))


def test_last_possible_round_is_followed_by_no_further_round(tmp_path: Path) -> None:
    run = on_disk(tmp_path / "run", ROUNDS)
    for number in (1, 2, 3):
        run.commit(1, steps_on_disk.a_round(number, steps_on_disk.FIRST, steps_on_disk.TO_CONTINUE))
    assert [stage.name for stage in stages_present(run.paths, 1, ROUNDS)][-6:-3] == [
        "rollout.3",
        "reward.3",
        "keep.3",
    ]


@pytest.mark.parametrize("stage", ["rollout.2", "reward.2", "keep.2"])
def test_hole_inside_a_round_is_missing(whole: RunOnDisk, stage: str) -> None:
    rmtree(whole.paths.stage(1, stage))
    assert [name for name, action in actions(whole).items() if action == "missing"] == [
        whole.paths.stage(1, stage).name
    ]


def test_whole_round_that_is_gone_is_missing(whole: RunOnDisk) -> None:
    for stage in ("rollout.2", "reward.2", "keep.2"):
        rmtree(whole.paths.stage(1, stage))
    plan = plan_resume(RecordedRun(whole.paths))
    assert [item.name for item in plan.broken] == [f"steps/000001/{n}.2" for n in ("10-rollout", "20-reward", "keep")]
    repaired, moved = repair(RecordedRun(whole.paths), plan)
    assert moved == [f"moved aside steps/000001/{name}" for name in AFTER]
    assert not repaired.broken


def test_round_before_the_last_that_is_gone_is_missing(tmp_path: Path) -> None:
    run = on_disk(tmp_path / "run", ROUNDS)
    run.commit(1, steps_on_disk.a_round(1, steps_on_disk.FIRST, steps_on_disk.KEPT))
    run.commit(1, steps_on_disk.a_round(3, steps_on_disk.FIRST, steps_on_disk.KEPT))
    assert [name for name, action in actions(run).items() if action == "missing"] == [
        "10-rollout.2",
        "20-reward.2",
        "keep.2",
    ]


def test_damaged_selection_is_corrupt_and_set_aside_with_what_follows(whole: RunOnDisk) -> None:
    file = whole.paths.stage(1, "keep.2") / MANIFEST
    file.write_bytes(file.read_bytes().replace(b"true", b"null"))
    plan = plan_resume(RecordedRun(whole.paths))
    assert [(item.name, item.action) for item in plan.broken] == [("steps/000001/keep.2", "corrupt")]
    repaired, moved = repair(RecordedRun(whole.paths), plan)
    assert moved == [f"moved aside steps/000001/{name}" for name in ("keep.2", *AFTER)]
    assert not repaired.broken


def test_lost_journal_lines_of_further_rounds_are_restored(whole: RunOnDisk) -> None:
    lines = whole.paths.journal.read_bytes().splitlines(keepends=True)
    whole.paths.journal.write_bytes(b"".join([*lines[:2], b"{}\n"]))
    repaired, _ = repair(RecordedRun(whole.paths), plan_resume(RecordedRun(whole.paths)))
    assert not repaired.broken
    stages = [line["stage"] for line in read_lines(whole.paths.journal) if "stage" in line]
    assert stages == list(two_rounds())


def test_retention_deletes_every_round(tmp_path: Path) -> None:
    run = on_disk(tmp_path / "run", ROUNDS)
    for step in (1, 2, 3):
        run.commit(step, two_rounds(step))
        run.save(step)
    retention = Retention(run.attempt, run.outlines, keep_last=2, keep_rollouts_every_steps=0)
    assert retention.apply() == [1, 2]
    assert run.paths.committed_steps() == [3]
    assert retention.apply() == []


def test_kept_rollouts_are_those_of_every_round(tmp_path: Path) -> None:
    run = on_disk(tmp_path / "run", ROUNDS)
    run.commit(1, two_rounds())
    run.save(1)
    Retention(run.attempt, run.outlines, keep_last=1, keep_rollouts_every_steps=1).apply()
    assert [path.name for path in sorted(run.paths.step(1).iterdir())] == sorted(
        run.paths.stage(1, name).name for name in two_rounds() if name != "actor_update"
    )


def test_run_of_rollouts_alone_has_no_other_stage_in_any_round(tmp_path: Path) -> None:
    run = on_disk(tmp_path / "run", ROUNDS, command="rollout")
    run.commit(1, {name: record for name, record in two_rounds().items() if name.startswith("r")})
    assert holds_only_rollouts(run.paths)
    run.commit(1, {"keep.2": two_rounds()["keep.2"]})
    assert not holds_only_rollouts(run.paths)
