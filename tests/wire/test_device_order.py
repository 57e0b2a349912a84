"""No moment of a run takes more of a GPU than `plan` says of the stage: whole runs on a device that counts bytes."""

from pathlib import Path

import pytest

from fakes.device import CountedDevice
from wire.device_order import SITUATIONS, Harness, names, train, usable_gib


def excess(harness: Harness, device: CountedDevice) -> dict[str, object]:
    """What is on the device where it holds more than is planned, by stage."""
    planned = harness.planned
    return {stage: device.at_peak[stage] for stage, size in device.peaks.items() if size > planned[stage]}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_model_that_fills_a_gpu_stays_within_its_plan(tmp_path: Path, situation: str) -> None:
    harness = Harness.of("own/qwen3-4b-80g", 80.0)
    device = SITUATIONS[situation](harness, tmp_path / "run")
    assert excess(harness, device) == {}
    # It is counted: engines have their share while the actor sends, and a whole trainer fits no GPU beside that.
    engine, actor = harness.memory.generator, harness.memory.roles["actor"].ranks[0]
    share = engine.weights + engine.kv_cache
    assert device.peaks["eval"] > share + actor.weights
    assert device.peaks["actor_load"] > actor.weights + actor.gradients + actor.main_weights + actor.moments
    assert device.peaks["actor_load"] + share > 80 * 2**30


@pytest.mark.parametrize("name", [name for name in names() if name != "own/qwen3-4b-80g"])
def test_own_recipes_stay_within_their_plans_if_eval_runs_first(tmp_path: Path, name: str) -> None:
    harness = Harness.of(name, usable_gib(name))
    assert excess(harness, train(harness, tmp_path / "run")) == {}


@pytest.mark.parametrize("offload", ["[]", "['generator']", "['actor', 'critic']", "['critic', 'generator']"])
def test_plan_counts_roles_that_are_not_offloaded(tmp_path: Path, offload: str) -> None:
    harness = Harness.of("own/qwen3-0.6b-80g", 80.0, f"cluster.offload={offload}")
    device = train(harness, tmp_path / "run")
    assert excess(harness, device) == {}
    assert (("actor", "training") in device.at_peak["values"]) == ("actor" not in offload)
    assert (("generator", "share") in device.at_peak["values"]) == ("generator" not in offload)
