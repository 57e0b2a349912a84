"""Tokens per second and MFU of measured passes, by hand and against the count of `benchmarks/roofline.py`."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppoctl.core.machine.matrix_rate import MatrixRate, matrix_rate, published_rate
from ppoctl.core.measured import Measured, MeasuredPass, Measurements, ProcessUsage
from ppoctl.plan.throughput import StageMeter
from ppoctl.recipe.loading.load import load
from ppoctl.recipe.schema import Recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
MODELS = Path(__file__).parents[2] / "recipes" / "models"
LENGTHS = torch.tensor([7, 40, 13])
"""Tokens that the model reads of each sequence; the responses have 5, 30 and 2 tokens."""
OUTPUTS = 37
GIB = 2**30


def recipe_of(file: Path, *sets: str) -> Recipe:
    return load([file], [f"model.path={MODELS / 'meta-llama--Llama-3.2-1B'}", *sets], {}).recipe


def measured(kind: Any = "train", role: str = "actor", **changed: Any) -> MeasuredPass:
    pairs = int((LENGTHS * (LENGTHS + 1) // 2).sum())
    return MeasuredPass(
        **{"role": role, "kind": kind, "tokens": 60, "pairs": pairs, "outputs": OUTPUTS, "seconds": 2.0} | changed
    )


def h100(dtype: str) -> MatrixRate:
    return MatrixRate({"bfloat16": 989e12, "float32": 67e12}[dtype], is_of_all_ranks=False)


def of_cpu(_: str) -> MatrixRate:
    return MatrixRate(3e12, is_of_all_ranks=True)


def test_flops_of_an_update_equal_those_of_the_roofline(smallest: Path) -> None:
    """16 layers of width 2048, 32 heads of 64 and 8 of keys and values, MLPs of 8192, 128,256 ids."""
    import roofline

    shape = SimpleNamespace(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8
    )
    responses = torch.tensor([5, 30, 2])
    sequences = SimpleNamespace(prompt_lengths=LENGTHS - responses + 1, lengths=responses)
    meter = StageMeter(recipe_of(smallest))
    expected: Any = roofline.update_flops(shape, sequences, 128256)  # type: ignore[arg-type]
    assert meter.flops(measured()) == pytest.approx(expected)
    assert meter.flops(measured("forward")) == pytest.approx(expected / 3)
    assert meter.flops(measured("forward", with_reference=True)) == pytest.approx(2 * expected / 3)
    of_critic: Any = roofline.update_flops(shape, sequences, 1)  # type: ignore[arg-type]
    assert meter.flops(measured(role="critic")) == pytest.approx(of_critic)


def test_pass_of_a_reference_with_a_shared_trunk_counts_its_top(smallest: Path) -> None:
    sets = ["actor.train={top_layers=4}", "ppo.kl={place='reward', coef=0.05}"]
    meter = StageMeter(recipe_of(smallest, *sets))
    alone, both = (meter.flops(measured("forward", with_reference=with_it)) for with_it in (False, True))
    head = 2.0 * OUTPUTS * 128256 * 2048
    assert both - alone == pytest.approx(head + (alone - head) * 4 / 16)


def test_forward_pass_counts_what_the_model_has_beside_its_reference(smallest: Path) -> None:
    """Adapters of rank 16 on q_proj (2048 to 2048) in 16 layers: 2 FLOPs per weight and token, three times that in an
    update."""
    lora = "actor.train={lora={rank=16, targets=['q_proj']}}"
    meter, plain = StageMeter(recipe_of(smallest, lora)), StageMeter(recipe_of(smallest))
    weights = 16 * 16 * (2048 + 2048)
    reference = meter.flops(measured("reference"))
    assert reference == plain.flops(measured("forward"))
    assert meter.flops(measured("forward")) - reference == pytest.approx(2 * 60 * weights)


def test_stage_reports_rates_of_all_its_passes(smallest: Path) -> None:
    """Two data ranks in bfloat16 have 989 TFLOP/s each; on a CPU they divide its rate."""
    recipe = recipe_of(smallest, "model.dtype=bfloat16", "actor.parallel={data=2}")
    meter = StageMeter(recipe, h100)
    passes = Measured((measured("forward"), measured("forward", tokens=30, pairs=30, outputs=10, seconds=4.0)))
    found = meter.metrics("logprobs", "logprobs", passes)
    assert found["throughput/logprobs_tokens_per_s"] == 15
    flops = sum(map(meter.flops, passes.passes))
    assert found["throughput/logprobs_mfu"] == pytest.approx(flops / 6.0 / (2 * 989e12))
    on_cpu = StageMeter(recipe, lambda _: MatrixRate(3e12, is_of_all_ranks=True)).metrics(
        "logprobs", "logprobs", passes
    )
    assert on_cpu["throughput/logprobs_mfu"] == pytest.approx(flops / 6.0 / 3e12)
    assert meter.metrics("rollout", "rollouts", passes) == {"time/transfer_s": 0.0}, (
        "the canary's passes are not its work"
    )
    joined = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"ray_address": "a:1"})})
    unknown = StageMeter(joined, lambda _: MatrixRate(3e12, is_of_all_ranks=True)).metrics(
        "logprobs", "logprobs", passes
    )
    assert unknown == {"throughput/logprobs_tokens_per_s": 15}
    assert meter.metrics("logprobs", "logprobs", Measured()) == {}


def test_unknown_gpu_or_model_leaves_only_tokens_per_second(smallest: Path) -> None:
    unknown = load([smallest], ["model.path=not/known"], {}).recipe
    for meter in (StageMeter(recipe_of(smallest), lambda _: None), StageMeter(unknown, h100)):
        found = meter.metrics("critic_update", "update", Measured((measured(role="critic"),)))
        assert found == {"throughput/critic_update_tokens_per_s": 30}


def test_rate_of_a_gpu_is_found_by_a_word_of_its_name() -> None:
    assert published_rate("NVIDIA H100 80GB HBM3", "float32") == 67e12
    assert published_rate("NVIDIA GH200 480GB", "bfloat16") == 989e12
    assert published_rate("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert published_rate("NVIDIA GeForce RTX 4090", "bfloat16") is None


def test_rate_of_a_cpu_is_measured_once() -> None:
    rate = matrix_rate("float32")
    assert rate is not None
    assert 1e9 < rate.flops_s < 1e14
    assert rate.is_of_all_ranks
    assert matrix_rate("float32") is rate


def test_peak_and_wait_of_a_stage_are_those_of_its_slowest_rank(smallest: Path) -> None:
    """The driver moves models for 2 s, ranks for at most 0.5 s in the first pass and 1 s in the second."""
    measurements = Measurements()
    measurements.add_pass(measured("forward"), [ProcessUsage(2 * GIB, 0.5), ProcessUsage(3 * GIB, 0.25)])
    measurements.add_pass(measured("forward"), [ProcessUsage(GIB, 1.0), ProcessUsage(GIB // 2, 0.0)])
    measurements.add_pass(measured("train", seconds=0.0), [ProcessUsage(9 * GIB, 9.0)])  # of a replay
    during = replace(measurements.take(), engine_peak_bytes=7 * GIB)
    during = replace(during, moved_s=during.moved_s + 2.0)
    meter = StageMeter(recipe_of(smallest, "cluster.offload=['critic']"), lambda _: None)
    assert meter.metrics("logprobs", "logprobs", during) == {
        "throughput/logprobs_tokens_per_s": 30,
        "memory/logprobs_gib": 3.0,
        "time/logprobs_wait_s": 3.5,
    }
    assert meter.metrics("rollout.2", "rollouts", during) == {
        "time/transfer_s": 0.0,
        "memory/rollout_gib": 7.0,
        "time/rollout_wait_s": 3.5,
    }
    assert meter.metrics("eval", "evaluation", during) == {}
    stays = StageMeter(recipe_of(smallest), lambda _: None).metrics("values", "values", replace(during, passes=()))
    assert stays == {}, "nothing is offloaded, and no rank reported a peak"


def test_peak_of_engines_is_that_of_the_largest_process() -> None:
    measurements = Measurements()
    measurements.add_engine([ProcessUsage(4, 0.0), ProcessUsage(6, 0.0)])
    measurements.add_engine([ProcessUsage(5, 0.0)])
    assert measurements.take() == Measured(engine_peak_bytes=6)


def test_transfer_is_reported_once(smallest: Path) -> None:
    measurements = Measurements()
    for _ in range(2):
        with measurements.transfer():
            time.sleep(0.01)
    measurements.add_pass(measured())
    taken = measurements.take()
    assert taken.passes == (measured(),)
    ahead = ("rollout.ahead=1", "rollout.tokens_per_step=4", "ppo.rollout_correction.kind=tis")
    meter = StageMeter(recipe_of(smallest, *ahead), h100)
    assert meter.metrics("next_rollout", "partial_rollouts", taken) == {"time/transfer_s": taken.transfer_s}
    assert meter.metrics("rollout", "rollouts", taken) == {}, "it takes groups, and generates nothing"
    assert meter.metrics("eval", "evaluation", replace(taken, passes=())) == {}, "its stage is not a rollout"
    assert taken.transfer_s >= 0.02
    assert measurements.take() == Measured()


def test_loads_of_experts_are_added_over_ranks_and_passes(smallest: Path) -> None:
    """Layer 1 has loads 6, 0, 2, 0 of four experts: three times the mean. Layer 2 is on another pipeline rank."""
    measurements = Measurements()
    first, second = ProcessUsage(0, 0.0, {1: (2, 0, 1, 0)}), ProcessUsage(0, 0.0, {2: (1, 1, 1, 3)})
    measurements.add_pass(measured("train"), [first, first, second])
    measurements.add_pass(measured("train"), [ProcessUsage(0, 0.0, {1: (2, 0, 0, 0)}), second])
    during, meter = measurements.take(), StageMeter(recipe_of(smallest), lambda _: None)
    found = meter.metrics("actor_update", "update", during)
    assert found["policy/expert_load_max"] == found["policy/expert_load_max_at_1"] == 3.0
    assert found["policy/expert_load_max_at_2"] == 2.0
    assert found["policy/experts_unused_frac"] == 2 / 8
    assert "policy/expert_load_max" not in meter.metrics("critic_update", "update", during)
    dense = meter.metrics("actor_update", "update", replace(during, passes=(measured("train"),)))
    assert "policy/expert_load_max" not in dense


def test_balance_loss_is_a_mean_over_layers_and_minibatches(smallest: Path) -> None:
    """Two ranks have parts of two minibatches in a layer, with losses 1.5 and 1.7; a third has one more layer."""
    measurements = Measurements()
    parts = ((2.0, 1.25), (1.2, 0.75), (2.4, 2.0))
    measurements.add_pass(measured("train"), [ProcessUsage(0, 0.0, router_aux_loss=part) for part in parts])
    during, meter = measurements.take(), StageMeter(recipe_of(smallest), lambda _: None)
    assert meter.metrics("actor_update", "update", during)["policy/router_aux_loss"] == pytest.approx(1.4)
    without = replace(during, passes=(measured("train"),))
    assert "policy/router_aux_loss" not in meter.metrics("actor_update", "update", without)
