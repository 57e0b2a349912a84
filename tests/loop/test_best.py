"""`checkpoint.best` keeps the best actor by the metric's direction, and none of a step that stops."""

from pathlib import Path

import pytest
import torch

from fakes.bigram import initial_table
from fakes.components import fake_recipe
from fakes.job import finished, play, stop_at
from ppoctl.core.errors import HealthStopError
from ppoctl.run.loop.steps import RunContext
from ppoctl.store import manifest as manifests
from ppoctl.store.discard import roll_back
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.states import saved_state

SAVED = {"every_steps": 1, "keep_last": 9}


def all_kept(root: Path) -> list[int]:
    """Return the steps of the best actors."""
    return sorted(int(folder.name) for folder in RunPaths(root).best.iterdir())


def kept(root: Path) -> tuple[int, str]:
    """Return step and lineage of the best actor."""
    [folder] = RunPaths(root).best.iterdir()
    manifest = manifests.read(folder)
    assert manifest is not None
    return int(folder.name), manifest.identity


def played(root: Path, best: str, **changes: object) -> RunContext:
    return play(root, fake_recipe(**{"steps": 4, "checkpoint": {"best": best, **SAVED}, **changes})).job


def series(job: RunContext, name: str) -> list[float]:
    return [job.journal.metrics(step)[name] for step in range(1, 5)]


def lineage(root: Path, step: int) -> str:
    saved = saved_state(RunPaths(root), "actor", step)
    assert saved is not None
    return saved[0].lineage


@pytest.mark.parametrize(("name", "better"), [("reward/score_mean", max), ("rollout/truncated_frac", min)])
def test_training_metric_rates_actor_at_start_of_step(tmp_path: Path, name: str, better: object) -> None:
    assert callable(better)
    job = played(tmp_path / "run", name)
    values = series(job, name)
    last = 3 - values[::-1].index(better(values))  # of equal values the later
    step, found = kept(tmp_path / "run")
    assert step == last
    assert step == 0 or found == lineage(tmp_path / "run", step)
    table = torch.frombuffer(
        bytearray((job.paths.best / f"{step:06d}" / "table.bin").read_bytes()), dtype=torch.float32
    )
    saved = (
        (job.paths.state("actor", step) / "table.bin").read_bytes()
        if step
        else initial_table("actor").numpy().tobytes()
    )
    assert table.numpy().tobytes() == saved


@pytest.mark.parametrize(
    ("keep", "direction"),
    [
        (2, "lower"),
        (3, None),
        *(
            pytest.param(*each, marks=pytest.mark.ci("two of lower, three of the metric's own direction"))
            for each in ((2, None), (2, "higher"), (3, "lower"), (3, "higher"))
        ),
    ],
)
def test_best_keep_limits_number_of_kept_actors(tmp_path: Path, keep: int, direction: str | None) -> None:
    best = {"best": "reward/score_mean", "best_keep": keep, "best_direction": direction, **SAVED}
    job = played(tmp_path / "run", "", checkpoint=best)
    values = series(job, "reward/score_mean")
    assert len(set(values)) == 4
    sign = -1 if direction == "lower" else 1
    # A training metric belongs to the actor that the step began with.
    assert all_kept(tmp_path / "run") == sorted(sorted(range(4), key=lambda step: sign * values[step])[-keep:])


def test_equal_metrics_keep_later_actors(tmp_path: Path) -> None:
    best = {"best": "reward/error_frac", "best_keep": 2, "best_direction": "lower", **SAVED}
    job = played(tmp_path / "run", "", checkpoint=best)
    assert len(set(series(job, "reward/error_frac"))) == 1
    assert all_kept(tmp_path / "run") == [2, 3]


MOMENTS = {"reward/score_mean": "3 actor_update starts", "eval/held/pass_at_1": "4 eval renamed"}
"""A training metric is known before the update, a score of an evaluation at the end of the step."""
OTHERS = [(name, moment) for name in MOMENTS for moment in ("3 values starts", "5 rollout starts")]
OTHERS += zip(MOMENTS, reversed(MOMENTS.values()), strict=True)
SEEN = pytest.mark.ci("one moment of each metric")


@pytest.mark.parametrize(
    ("name", "moment"), [*MOMENTS.items(), *(pytest.param(*each, marks=SEEN) for each in OTHERS)]
)
def test_repeated_steps_keep_same_best_actors(tmp_path: Path, name: str, moment: str) -> None:
    tables = {"steps": 5, "checkpoint": {"every_steps": 5, "best": name, "best_keep": 2}, "eval": {"every_steps": 1}}

    def folders(root: Path) -> dict[int, bytes]:
        best = RunPaths(root).best
        return {step: (best / f"{step:06d}" / "table.bin").read_bytes() for step in all_kept(root)}

    root = stop_at(tmp_path / "run", moment, **tables).root
    play(root, fake_recipe(**tables))
    assert folders(root) == folders(finished(tmp_path / "whole", **tables).root)


def test_changed_metric_and_dropped_steps_remove_best_actors(tmp_path: Path) -> None:
    root, keys = tmp_path / "run", {"every_steps": 1, "keep_last": "all", "best_keep": 2}
    play(root, fake_recipe(steps=4, checkpoint={**keys, "best": "reward/score_mean"}))
    before = all_kept(root)
    roll_back(RecordedRun(RunPaths(root)), 2)
    assert all_kept(root) == [step for step in before if step <= 2]
    # The mean of the kept actor is greater than each of these standard deviations, but it is another metric.
    play(root, fake_recipe(steps=4, checkpoint={**keys, "best": "reward/score_std", "best_direction": "higher"}))
    assert all_kept(root) == [2, 3]
    extras = [manifests.require(RunPaths(root).best / f"{step:06d}").extra for step in (2, 3)]
    assert [extra["metric"] for extra in extras] == ["reward/score_std"] * 2


def test_evaluation_metric_rates_actor_at_end_of_step(tmp_path: Path) -> None:
    name = "eval/held/pass_at_1"
    job = played(tmp_path / "run", name, eval={"every_steps": 1})
    values = series(job, name)
    step, found = kept(tmp_path / "run")
    assert step == 4 - values[::-1].index(max(values))
    assert found == lineage(tmp_path / "run", step)


def test_health_stop_keeps_no_best_actor_of_that_step(tmp_path: Path) -> None:
    free = played(tmp_path / "free", "reward/score_mean")
    values = series(free, "reward/score_mean")
    assert values[1] > values[0]
    stops = {"truncated": {"min": 2.0, "from_step": 2, "action": "stop"}}
    with pytest.raises(HealthStopError):
        played(tmp_path / "stopped", "reward/score_mean", health=stops)
    assert kept(tmp_path / "stopped")[0] == 0  # of step 1; step 2 was better, and stopped
    with pytest.raises(HealthStopError):
        played(
            tmp_path / "evaluated",
            "eval/held/pass_at_1",
            health={"entropy": {"max": 0.0, "action": "stop"}},
            eval={"every_steps": 1},
        )
    assert not RunPaths(tmp_path / "evaluated").best.exists()


def test_keeping_best_actor_causes_no_replay_or_reload(tmp_path: Path) -> None:
    job = played(tmp_path / "run", "reward/score_mean")
    engine = job.states.engines["actor"]
    assert (engine.starts, engine.loads) == (1, 0)  # type: ignore[attr-defined]
