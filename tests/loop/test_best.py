"""`checkpoint.best` keeps the actor that was measured, by the metric's direction, and none of a step that stops."""

from pathlib import Path

import pytest
import torch

from fakes.bigram import initial_table
from fakes.job import Witness, open_run
from fakes.sockets import fake_recipe
from ppoctl.errors import HealthStopError
from ppoctl.loop.run import Job, run
from ppoctl.recipe.schema import HealthRule, HealthTable
from ppoctl.store import manifest as manifests
from ppoctl.store.layout import RunLayout
from ppoctl.store.states import saved_state
from ppoctl.tracking.health import HealthMonitor

SAVED = {"every_steps": 1, "keep_last": 9}


def kept(root: Path) -> tuple[int, str]:
    """Step and lineage of the best actor."""
    [folder] = RunLayout(root).best.iterdir()
    manifest = manifests.read(folder)
    assert manifest is not None
    return int(folder.name), manifest.identity


def played(root: Path, best: str, health: HealthTable | None = None, **changes: object) -> Job:
    recipe = fake_recipe(**{"steps": 4, "checkpoint": {"best": best, **SAVED}, **changes})
    wiring = open_run(root, recipe, Witness(), health=HealthMonitor(health or HealthTable()))
    run(wiring.job)
    return wiring.job


def series(job: Job, name: str) -> list[float]:
    return [job.journal.figures(step)[name] for step in range(1, 5)]


def lineage(root: Path, step: int) -> str:
    saved = saved_state(RunLayout(root), "actor", step)
    assert saved is not None
    return saved[0].lineage


@pytest.mark.parametrize(("name", "better"), [("reward/score_mean", max), ("rollout/truncated_frac", min)])
def test_a_figure_of_training_measures_the_actor_that_the_step_began_with(
    tmp_path: Path, name: str, better: object
) -> None:
    assert callable(better)
    job = played(tmp_path / "run", name)
    values = series(job, name)
    last = 3 - values[::-1].index(better(values))  # of equal ones the later
    step, found = kept(tmp_path / "run")
    assert step == last
    assert step == 0 or found == lineage(tmp_path / "run", step)
    table = torch.frombuffer(
        bytearray((job.layout.best / f"{step:06d}" / "table.bin").read_bytes()), dtype=torch.float32
    )
    saved = (
        (job.layout.state("actor", step) / "table.bin").read_bytes()
        if step
        else initial_table("actor").numpy().tobytes()
    )
    assert table.numpy().tobytes() == saved


def test_an_evaluation_measures_the_actor_that_the_step_made(tmp_path: Path) -> None:
    name = "eval/held/pass_at_1"
    job = played(tmp_path / "run", name, eval={"every_steps": 1})
    values = series(job, name)
    step, found = kept(tmp_path / "run")
    assert step == 4 - values[::-1].index(max(values))
    assert found == lineage(tmp_path / "run", step)


def test_nothing_is_kept_where_the_measured_figures_stop_the_run(tmp_path: Path) -> None:
    free = played(tmp_path / "free", "reward/score_mean")
    values = series(free, "reward/score_mean")
    assert values[1] > values[0]
    stops = HealthTable(truncated=HealthRule(min=2.0, from_step=2, action="stop"))
    with pytest.raises(HealthStopError):
        played(tmp_path / "stopped", "reward/score_mean", stops)
    assert kept(tmp_path / "stopped")[0] == 0  # of step 1; step 2 was better, and stopped
    with pytest.raises(HealthStopError):
        played(
            tmp_path / "evaluated",
            "eval/held/pass_at_1",
            HealthTable(entropy=HealthRule(max=0.0, action="stop")),
            eval={"every_steps": 1},
        )
    assert not RunLayout(tmp_path / "evaluated").best.exists()


def test_keeping_the_best_replays_and_reloads_nothing(tmp_path: Path) -> None:
    job = played(tmp_path / "run", "reward/score_mean")
    engine = job.states.engines["actor"]
    assert (engine.starts, engine.loads) == (1, 0)  # type: ignore[attr-defined]
