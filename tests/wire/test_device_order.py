"""At no moment does a run take more of a GPU than `plan` estimates for the stage: complete runs on a device that
counts bytes."""

from pathlib import Path

import pytest

from fakes.device import CountedDevice
from wire.device_order import SITUATIONS, Harness, names, train, usable_gib


def excess(harness: Harness, device: CountedDevice) -> dict[str, object]:
    """Return the allocations of stages that exceed the plan."""
    planned = harness.planned
    return {stage: device.at_peak[stage] for stage, size in device.peaks.items() if size > planned[stage]}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_model_that_fills_a_gpu_stays_within_its_plan(tmp_path: Path, situation: str) -> None:
    harness = Harness.of("own/qwen3-4b-80g", 80.0)
    device = SITUATIONS[situation](harness, tmp_path / "run")
    assert excess(harness, device) == {}
    # The counts are realistic: engines keep their share while the actor sends, and a complete trainer does not fit
    # next to them.
    engine, actor = harness.memory.generator, harness.memory.roles["actor"].ranks[0]
    share = engine.weights + engine.kv_cache
    assert device.peaks["eval"] > share + actor.weights
    assert device.peaks["actor_load"] > actor.weights + actor.gradients + actor.main_weights + actor.moments
    assert device.peaks["actor_load"] + share > 80 * 2**30


DIFFERENT = (
    "calculator-small",
    "llama-3.2-1b-hh-rlhf-80g",
    "qwen3-0.6b-grpo-80g",
    "qwen3-4b-24g",
    "qwen3-8b-lora-80g",
    "dsr1-7b",
)
"""Recipes that differ most: an environment, a reward model, no critic, a small GPU, adapters, 64 GPUs."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.ci(", ".join(DIFFERENT))] * (not name.endswith(DIFFERENT)))
        for name in names()
        if name != "own/qwen3-4b-80g"
    ],
)
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
