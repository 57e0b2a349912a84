"""Memory of a complete run whose evaluation comes before its first step, next to `plan`'s estimate."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from gpu_parts.lines import JOB, notify
from gpu_parts.measure import CUDA, DEV, TINY, gib
from gpu_parts.models import QUICKSTART, folder
from ppoctl.core.machine import nvml

RECIPE = QUICKSTART.parents[1] / "quickstart.toml"
EVERY_S = 0.02
"""Seconds between two polls of the GPU's memory."""
CLI = (sys.executable, "-c", "from ppoctl.cli.app import main; main()")


def order() -> None:
    """Train one step of the 1.5B model with colocated roles, the evaluation first. Report the peak memory of the GPU
    over all processes, and the largest that `plan` estimates for a stage."""
    changes = {
        "name": "order",
        "steps": 1,
        "model.path": folder("1.5b"),
        "model.dtype": "bfloat16",
        "rollout.prompts_per_step": 8,
        "ppo.minibatch_seqs": 16,
        "eval.at_start": "true",
        "eval.passes": "greedy",
        "cluster.offload": '["actor", "critic", "generator"]',
        "cluster.weights_bucket_mib": 64 if TINY else 512,
        "checkpoint.every_steps": 1,
        "expect": "{}",
    }
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    plan_gib, stage = _plan(sets)
    used = _Used()
    began = time.perf_counter()
    with used:
        runs = Path(JOB.models) / "runs"
        ended = _run("train", str(RECIPE), *sets, "--runs", str(runs))
    notify(
        "order",
        code=ended.returncode,
        output=(ended.stdout + ended.stderr)[-600:] if ended.returncode else "",
        peak_gib=used.peak_gib,
        plan_gib=plan_gib,
        stage=stage,
        s=round(time.perf_counter() - began, 1),
    )


def _plan(sets: list[str]) -> tuple[float, str]:
    """Return the largest GPU memory that `plan` estimates, and the stage that takes it."""
    size = torch.cuda.get_device_properties(DEV).total_memory / 2**30 if CUDA else 80
    ended = _run("plan", str(RECIPE), *sets, "--gpu-gib", f"{size:.1f}", "--json")
    places = json.loads(ended.stdout)["memory"]["places"]
    fullest = max((place["fullest"] for place in places), key=lambda stage: stage["bytes"])
    return gib(fullest["bytes"]), fullest["stage"]


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*CLI, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


class _Used:
    """Peak memory of the first GPU within the context, beyond the memory used before."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._most = self._before = 0

    def __enter__(self) -> "_Used":
        self._before = self._now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def peak_gib(self) -> float | None:
        return gib(self._most - self._before) if CUDA else None

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        loads = nvml.loads()
        return (loads[0].used_bytes or 0) if loads else 0
