"""The event file for TensorBoard, read with TensorBoard's own reader."""

import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracking_lab import RECIPE, MessageLog, RunDir, stage_lists

from fakes.components import fake_components, fake_recipe
from fakes.job import StopError, Witness
from ppoctl.cli.app import run as command
from ppoctl.core.errors import StorageError
from ppoctl.recipe.schema import Recipe
from ppoctl.run import new_run, session
from ppoctl.show.tracking.event_file import EventFile, TensorBoardMirror, write_event_file
from ppoctl.store.journal import read_lines
from ppoctl.store.recorded_run import STORIES, RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths

Values = dict[tuple[str, int], float]
DIGESTS = {"model": "a" * 64, "data": "b" * 64}


def accumulated(paths: RunPaths) -> EventAccumulator:
    """Return TensorBoard's view of a run, with all values."""
    return EventAccumulator(str(paths.tensorboard), size_guidance={"scalars": 0})


def shown(reader: EventAccumulator) -> Values:
    """Return the values that TensorBoard shows now; no metric has two values for one step."""
    reader.Reload()
    points = [(name, point) for name in reader.Tags()["scalars"] for point in reader.Scalars(name)]
    values = {(name, point.step): point.value for name, point in points}
    assert len(values) == len(points)
    return values


def journaled(paths: RunPaths) -> Values:
    """Return the last value of each metric of a journal without rounds, in the precision of event files."""
    values: Values = {}
    for line in read_lines(paths.journal):
        if "stage" in line:
            metrics = {**line["figures"], **line.get("clocked", {}), f"time/{line['stage']}_s": line["seconds"]}
            values |= {(name, line["step"]): float(np.float32(value)) for name, value in metrics.items()}
        elif line["event"] == "saved":
            values[f"time/{line['role']}_save_s", line["step"]] = float(np.float32(line["waited_s"]))
    return values


def attempt(paths: RunPaths, recipe: Recipe, witness: Witness | None = None) -> None:
    plan = plan_resume(RecordedRun(paths))
    observers = () if witness is None else (witness,)
    session.attempt_run(session.OpenedRun(paths, {1: recipe}, fake_components(recipe), plan, observers))


def new(folder: Path, **tracking: object) -> tuple[RunPaths, Recipe]:
    """Return a new run on fakes."""
    rows = {"format": "gsm8k", "path": "none", "instruction": "Answer with the number only."}
    recipe = fake_recipe(tracking={"kind": "none", **tracking}, data={"train": rows, "eval": {"held": rows}})
    new_run.create(RunPaths(folder / "fake"), recipe, DIGESTS, command="train")
    return RunPaths(folder / "fake"), recipe


@contextmanager
def full_disk(largest: int) -> Iterator[None]:
    """No file can have more than `largest` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def bare(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_file_of_an_interrupted_and_resumed_run_equals_its_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, recipe = new(tmp_path, tensorboard=True)
    running = accumulated(paths)  # a TensorBoard that is not restarted
    seen: list[Values] = []

    def stop(_: int, moment: str) -> None:
        if moment == "2 logprobs starts":
            seen.append(shown(running))
            raise StopError

    with pytest.raises(StopError):
        attempt(paths, recipe, Witness(act=stop))
    ended = {key: value for key, value in journaled(paths).items() if key[1] < 2}
    assert seen[0] == shown(running) == ended != journaled(paths)
    attempt(paths, recipe)
    assert {step for name, step in shown(running) if name == "policy/loss"} == {1, 2, 3}
    assert ("eval/held/pass_at_1", 2) in shown(running)
    assert shown(running) == shown(accumulated(paths)) == journaled(paths)
    assert "tensorboard" not in capsys.readouterr().err


def test_run_without_the_key_has_no_event_file(tmp_path: Path) -> None:
    paths, recipe = new(tmp_path)
    attempt(paths, recipe)
    assert not paths.tensorboard.exists()


def test_values_are_written_when_their_step_has_ended(bare: RunDir) -> None:
    file, running = EventFile(bare.paths), accumulated(bare.paths)
    bare.stage(1, "rollout", rollout__tokens=100.0)
    file.update()
    assert not bare.paths.tensorboard.exists()
    bare.stage(1, "actor_update", policy__loss=-0.25, policy__approx_kl=math.inf)
    file.update()
    assert shown(running) == journaled(bare.paths)
    assert (shown(running)["policy/loss", 1], shown(running)["policy/approx_kl", 1]) == (-0.25, math.inf)
    assert [point.wall_time for point in running.Scalars("policy/loss")] == [1_763_712_002.25]  # of the second line
    bare.evaluation(1)
    file.update()
    assert shown(running) == journaled(bare.paths)
    bare.stage(2, "rollout", rollout__tokens=200.0)
    file.update()
    assert ("rollout/tokens", 2) not in shown(running)
    bare.event("attempt_ended", status="finished")  # of a command that only generates
    file.update()
    assert shown(running) == journaled(bare.paths)
    assert file.num_values == len(journaled(bare.paths)) == 9


def test_values_of_a_repeated_stage_replace_the_earlier_ones(bare: RunDir) -> None:
    for step in (1, 2):
        bare.step(step)
    file = EventFile(bare.paths)
    file.update()
    assert shown(accumulated(bare.paths))["reward/score_mean", 1] == float(np.float32(0.1))
    bare.stage(1, "reward", reward__score_mean=0.75)
    bare.stage(1, "actor_update", policy__loss=0.5, policy__approx_kl=0.01)
    file.update()
    values = shown(accumulated(bare.paths))
    assert values["reward/score_mean", 1] == 0.75
    assert values == journaled(bare.paths)
    assert file.num_values == len(values)


def test_step_of_several_rounds_has_one_value_of_each_metric(bare: RunDir) -> None:
    bare.recipe({**RECIPE, STORIES: stage_lists(of_rounds=True)})
    bare.round(1, 1, score=0.5, of_all=0.5)
    bare.event("attempt_ended", status="preempted")
    bare.round(1, 2, score=0.0, of_all=0.25)
    assert write_event_file(bare.paths) == 0
    bare.stage(1, "actor_update", policy__loss=-0.5)
    write_event_file(bare.paths)
    values = shown(accumulated(bare.paths))
    assert values["reward/score_mean", 1] == 0.25
    assert (values["rollout/tokens", 1], values["groups/rounds", 1]) == (300.0, 2.0)  # 100 + 200 tokens


@pytest.mark.parametrize("damage", ["deleted", "cut short", "has other bytes"])
def test_damaged_file_is_made_whole(bare: RunDir, damage: str) -> None:
    file = EventFile(bare.paths)
    bare.step(1)
    file.update()
    content = file.path.read_bytes()
    if damage == "deleted":
        shutil.rmtree(bare.paths.tensorboard)
    else:
        file.path.write_bytes(content[:-7] if damage == "cut short" else content[:-7] + b"1234567890")
    bare.step(2)
    file.update()
    assert shown(accumulated(bare.paths)) == journaled(bare.paths)


def test_later_attempt_only_appends(bare: RunDir) -> None:
    bare.step(1)
    write_event_file(bare.paths)
    bare.step(2)
    file = EventFile(bare.paths)
    content = file.path.read_bytes()
    with full_disk(1), pytest.raises(OSError, match="File too large"):
        file.update()
    assert file.path.read_bytes() == content
    file.update()
    assert file.path.read_bytes().startswith(content)
    assert shown(accumulated(bare.paths)) == journaled(bare.paths)


def test_attempt_with_fewer_lines_keeps_the_records_of_a_newer_one(bare: RunDir) -> None:
    bare.step(1)
    older = EventFile(bare.paths)
    journal = bare.paths.journal.read_bytes()
    bare.step(2)
    write_event_file(bare.paths)
    content = older.path.read_bytes()
    bare.paths.journal.write_bytes(journal)  # what an older attempt has read
    older.update()
    assert older.path.read_bytes() == content


def test_run_continues_if_the_folder_cannot_be_created(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, recipe = new(tmp_path, tensorboard=True)
    paths.tensorboard.touch()
    attempt(paths, recipe)
    assert read_lines(paths.journal)[-1]["status"] == "finished"
    assert [line for line in capsys.readouterr().err.splitlines() if "tensorboard" in line] == [
        f"tensorboard: cannot write `{paths.tensorboard}` ([Errno 17] File exists: '{paths.tensorboard}'); training "
        f"continues, and this writes what is missing: ppoctl track {paths.root}"
    ]


def test_full_disk_is_reported_once_and_the_rest_is_written_later(bare: RunDir, messages: MessageLog) -> None:
    mirror = TensorBoardMirror(bare.paths, messages)
    bare.step(1)
    mirror.update()
    bare.step(2)
    (file,) = bare.paths.tensorboard.iterdir()
    with full_disk(file.stat().st_size + 100):  # a part of the next record
        for _ in range(2):
            mirror.update()
        (line,) = messages.lines
        assert "File too large" in line
        with pytest.raises(StorageError, match=r"cannot write `.*/events.out.tfevents.ppoctl`: File too large"):
            write_event_file(bare.paths)
    assert {step for _, step in shown(accumulated(bare.paths))} == {1}
    mirror.update()
    assert shown(accumulated(bare.paths)) == journaled(bare.paths)
    assert len(messages.lines) == 1


def test_track_writes_the_file_of_a_run_without_the_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, recipe = new(tmp_path)
    attempt(paths, recipe)
    capsys.readouterr()
    assert command(["track", str(paths.root)]) == 2
    assert 'has `tracking.kind = "none"` and `tracking.tensorboard = false`' in capsys.readouterr().err
    assert command(["track", str(paths.root), "--set", "tracking.tensorboard=true"]) == 0
    assert capsys.readouterr().out == f"sent\ntensorboard  {len(journaled(paths))}\n"
    assert shown(accumulated(paths)) == journaled(paths)


def test_writing_does_not_import_tensorflow(bare: RunDir, tmp_path: Path) -> None:
    bare.step(1)
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('tensorflow was imported')\n")
    code = (
        "import sys; from pathlib import Path; from ppoctl.store.run_paths import RunPaths; "
        "from ppoctl.show.tracking.event_file import write_event_file; "
        "assert 'tensorboard' not in sys.modules; write_event_file(RunPaths(Path(sys.argv[1])))"
    )
    path = os.pathsep.join((str(tmp_path), *sys.path))
    environ = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code, str(bare.root)], check=True, env=environ)
    assert shown(accumulated(bare.paths)) == journaled(bare.paths)
