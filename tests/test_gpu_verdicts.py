"""The checks of the first test on a GPU: the result for good lines, and for each kind of bad line."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from gpu_verdicts import wrong

GOOD: dict[str, list[dict[str, Any]]] = {
    "env": [{"matmul_tflops": 720}, {"varlen": "as is"}],
    "attention": [{"out": 0.003, "grads": [0.004, 0.005]}, {"backward_repeats": [False]}],
    "logprobs": [{"gap": 0.04}],
    "prints": [{"same_on_cpu": True, "extra_gib": 0.03}, {"same_on_cpu": True, "extra_gib": None}],
    "ipc": [{"right": True}, {"free_after": 70.1}],
    "pinned": [{"turn": 1, "right": True, "out_gb_s": 45.0, "back_gb_s": 50.0, "bytes": 10**9, "host_bytes": 10**9}],
    "rank": [{"mfu": 0.36}, {"same_after": True}, {"same_after_load": True}],
    "transfer": [
        {"way": "shared", "read": ["OpenDevice"], "right": True},
        {"way": "store", "read": ["OpenFile"], "right": True},
        {"way": "store", "who": "trainer", "took_gib": 28.0, "freed_gib": 27.8},
    ],
    "start": [{"start_s": 40.0, "blocks": 9000}, {"backend": "FLASH_ATTN"}, {"graphs": True}],
    "rollout": [
        {"side": "bare", "of_bare": 1.0},
        {"side": "ours", "of_bare": 0.97},
        {"side": "bare-mp", "of_bare": 0.5},
    ],
    "mixture": [{"takes": True}, {"gap_max": 0.001, "right": True}],
    "sleep": [{"before_gib": 78.0, "awake_gib": 70.0, "asleep_gib": 76.0}],
    "sync": [{"dtype": "float32", "right": True}],
    "order": [{"code": 0, "peak_gib": 55.0, "plan_gib": 56.0}],
    "pair": [
        {"layout": "tensor 2", "loss_gap": 4e-8, "grad_norm_gap": 1e-6, "change_gap": 1e-5},
        {"layout": "tensor 2", "nccl_gib": 0.9, "plan_nccl_gib": 1.25},
        {"layout": "tensor 2", "joined_s": 0.5, "groups": {"tp": 0.001}, "right": True},
        {"engine": "tensor 2", "responses": 8, "right": True},
    ],
    "soak": [{"reserved": 60.0, "peak": 55.0, "retries": 0}],
    "variants": [{"variant": "base"}],
}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("env", {"matmul_tflops": 90}, "90 TFLOP/s only"),
    ("env", {"varlen": "is_causal only"}, "another one: is_causal only"),
    ("attention", {"out": 0.003, "grads": [0.004, 0.3]}, "gap of 0.3"),
    ("attention", {"out": float("nan")}, "gap of nan"),
    ("rollout", {"side": "ours", "of_bare": 0.9}, "one engine reaches 0.9 of vLLM's own speed"),
    ("logprobs", {"gap": 0.5}, "off by 0.5 nats"),
    ("prints", {"same_on_cpu": False}, "`same_on_cpu` is false"),
    ("prints", {"same_on_cpu": True, "extra_gib": 2.7}, "2.7 GiB beside the tensor"),
    ("ipc", {"right": False, "answer": "Operation not permitted"}, "Operation not permitted"),
    ("pinned", {"turn": 1, "out_gb_s": 4.0, "back_gb_s": 50.0}, "4.0 GB/s out"),
    ("pinned", {"turn": 0, "bytes": 10**9, "host_bytes": 2**31}, "2147483648 bytes of host memory"),
    ("rank", {"mfu": 0.1}, "utilisation 0.1"),
    ("rank", {"same_after_load": False}, "`same_after_load` is false"),
    ("rank", {"plan_peak": 40.0, "measured_peak": 50.0}, "a peak of 40.0 GiB, measured are 50.0: -20%"),
    ("rank", {"plan_peak": 60.0, "measured_peak": 50.0}, "+20%"),
    ("transfer", {"way": "shared", "read": ["OpenFile"]}, "expected `OpenDevice`"),
    ("transfer", {"way": "store", "read": ["OpenDevice"]}, "expected `OpenFile`"),
    ("transfer", {"way": "store", "right": False}, "`right` is false"),
    ("transfer", {"who": "trainer", "took_gib": 28.0, "freed_gib": 20.0}, "took 28.0 GiB and freed 20.0"),
    ("start", {"graphs": False}, "captured no CUDA graphs"),
    ("sleep", {"before_gib": 78.0, "asleep_gib": 60.0}, "holds 18.0 GiB"),
    ("mixture", {"takes": False}, "engines restart at each transfer"),
    ("mixture", {"gap_max": 0.5, "right": False}, "`right` is false"),
    ("sync", {"right": False}, "`right` is false"),
    ("order", {"peak_gib": 77.0, "plan_gib": 56.0}, "takes 77.0 GiB, `plan` estimates 56.0"),
    ("order", {"code": 4, "output": "no room"}, "ended with code 4: no room"),
    ("pair", {"ranks": "hold the same weights", "right": False}, "`right` is false"),
    ("pair", {"layout": "data 2", "loss_gap": 0.5}, "`loss_gap` is 0.5, allowed 0.0001"),
    ("pair", {"layout": "data 2", "grad_norm_gap": float("nan")}, "`grad_norm_gap` is nan"),
    ("pair", {"layout": "data 2", "change_gap": 0.4}, "layout `data 2` differs from that of one rank: `change_gap`"),
    ("pair", {"nccl_gib": 2.1, "plan_nccl_gib": 1.25}, "take 2.1 GiB of a GPU, `plan` estimates 1.25"),
    ("soak", {"reserved": 80.0, "peak": 55.0}, "fragments"),
    ("soak", {"retries": 3}, "tried again 3 times"),
    ("variants", {"variant": "all", "error": "RuntimeError: no such kernel"}, "no such kernel"),
]


@pytest.mark.parametrize("part", GOOD)
def test_good_measurements_have_no_fault(part):
    assert wrong(part, GOOD[part], on_gpu=True) == []


@pytest.mark.parametrize(("part", "line", "words"), BAD)
def test_bad_measurement_is_named(part, line, words):
    (problem,) = wrong(part, [*GOOD[part], line], on_gpu=True)
    assert words in problem


def test_part_without_measurements_is_not_ok():
    assert wrong("shard", [], on_gpu=True) == ["nothing was measured"]


def test_plan_within_its_tolerance_is_accepted():
    assert wrong("rank", [{"plan_peak": 57.0, "measured_peak": 50.0}], on_gpu=True) == []
    assert wrong("rank", [{"plan_peak": 43.0, "measured_peak": 50.0}], on_gpu=True) == []
    assert wrong("rank", [{"plan_peak": 43.0, "measured_peak": None}], on_gpu=False) == []


def test_memory_is_not_checked_on_a_cpu():
    lines = [{"way": "shared", "read": ["OpenFile"]}, {"who": "engine", "took_gib": 1.0, "freed_gib": None}]
    assert wrong("transfer", lines, on_gpu=False) == []
    assert wrong("pair", [{"nccl_gib": 2.1, "plan_nccl_gib": 1.25}], on_gpu=False) == []
    assert wrong("sleep", [{"before_gib": None, "asleep_gib": None}], on_gpu=False) == []


def test_speed_is_not_checked_on_a_cpu():
    assert wrong("rank", [{"mfu": 0.0}], on_gpu=False) == []
