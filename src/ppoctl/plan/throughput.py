"""Tokens per second and model FLOPs utilisation (MFU) of the stages that compute with a trained model.

    MFU = FLOPs of the passes / seconds / (FLOP/s of a device x devices of the role)

FLOPs are those of `plan/flops.py` for the real lengths of the sequences: matrix products and attention of all layers,
and the output layer at the response tokens; the backward pass costs twice the forward pass. Recomputed activations
and elementwise operations are not counted, but their time is (PaLM, arXiv:2204.02311, appendix B). The rate of a GPU
is the published rate of dense products; the rate of a CPU is measured once, as the best of a few products.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from ppoctl.algorithms.kl_use import kl_use
from ppoctl.algorithms.role_model import model_of, shared_layers
from ppoctl.core import metric_registry
from ppoctl.core.machine import nvml
from ppoctl.core.machine.device import visible
from ppoctl.core.measured import MeasuredPass
from ppoctl.models.shape import ModelShape
from ppoctl.plan.flops import row_work
from ppoctl.plan.shared_sizes import shapes_of
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.schema import Recipe

PEAK_FLOPS = {
    "B200": {"bfloat16": 2250e12, "float32": 80e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "GH200": {"bfloat16": 989e12, "float32": 67e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
    "L40S": {"bfloat16": 362e12, "float32": 91.6e12},
}
"""Part of a GPU's name -> FLOP/s of dense products by dtype, from NVIDIA's data sheets (SXM). float32 is without
TF32, which ppoctl does not use."""
_SIZES, _REPEATS = (1024, 2048), 3
"""Sizes of the products that measure a CPU, and how often each runs: a quarter of a second in all."""


@dataclass
class StageMeter:
    """Metrics of the passes of a stage, for the models and devices of a recipe."""

    recipe: Recipe

    def metrics(self, stage: str, passes: Sequence[MeasuredPass]) -> dict[str, float]:
        """Return tokens per second and MFU of a stage; empty for a stage without such metrics."""
        rate, mfu = metric_registry.pass_metrics(stage)
        seconds = sum(measured.seconds for measured in passes)
        if metric_registry.find(mfu) is None or seconds <= 0:
            return {}
        found = {rate: sum(measured.tokens for measured in passes) / seconds}
        peaks = [self._peaks[measured.role] for measured in passes if self._shapes is not None]
        known = [peak * measured.seconds for peak, measured in zip(peaks, passes, strict=False) if peak is not None]
        if len(known) == len(passes):
            found[mfu] = sum(map(self.flops, passes)) / sum(known)
        return found

    def flops(self, measured: MeasuredPass) -> float:
        """Return the FLOPs of the passes: a sum over their tokens, pairs and outputs."""
        found = self._flops(measured, "update" if measured.kind == "train" else "forward")
        if measured.with_reference:
            shares = shared_layers(self.recipe) > 0 and kl_use(self.recipe).is_estimated
            found += self._flops(measured, "top" if shares else "forward")
        return found

    def _flops(self, measured: MeasuredPass, part: str) -> float:
        """Return the FLOPs of this part of `RowWork`, from those of sequences of three known sizes."""
        assert self._shapes is not None, "the caller has looked"
        role = measured.role
        one, two, output = (
            getattr(row_work(self.recipe, role, self._shapes[role], tokens, outputs), part)
            for tokens, outputs in ((1, 0), (2, 0), (0, 1))
        )
        pair = two - 2 * one  # a sequence of one token has one pair, of two tokens three
        return float((one - pair) * measured.tokens + pair * measured.pairs + output * measured.outputs)

    @cached_property
    def _shapes(self) -> Mapping[str, ModelShape] | None:
        return shapes_of(self.recipe)

    @cached_property
    def _peaks(self) -> dict[str, float | None]:
        """Role -> FLOP/s of all its devices; None: the GPU is not known."""
        gpus = visible(nvml.look(), os.environ)
        return {role: self._peak(role, gpus[0].name if gpus else None) for role in self.recipe.trained}

    def _peak(self, role: str, gpu: str | None) -> float | None:
        dtype = model_of(self.recipe, role).dtype
        if gpu is None:
            return cpu_rate(dtype)  # of all threads, which the ranks of the role divide
        rates = [rates[dtype] for name, rates in PEAK_FLOPS.items() if name in gpu.replace("-", " ").split()]
        return layouts(self.recipe)[role].world_size * rates[0] if rates else None


@cache
def cpu_rate(dtype: str) -> float:
    """Return the FLOP/s that matrix products of this dtype reach with the threads of this process."""
    import torch

    rates = []
    for size in _SIZES:
        one = torch.ones(size, size, dtype=getattr(torch, dtype))
        for _ in range(_REPEATS):
            began = time.perf_counter()
            torch.mm(one, one)
            rates.append(2 * size**3 / (time.perf_counter() - began))
    return max(rates)
