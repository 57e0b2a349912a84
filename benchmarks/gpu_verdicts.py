"""Required contents of the lines of `gpu_first.py`: for each part, the errors in its report."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]
MOST_GAP = 0.02
"""Norm of a bfloat16 kernel's error divided by the norm of the float64 result; correct kernels are near 0.003."""
LEAST_MFU = 0.25
"""Fraction of the GPU's peak that an update must reach: docs/gpu.md estimates 0.36 of dense kernels."""
MOST_PLAN_GAP = 0.15
"""Fraction of the measured peak memory by which `plan` may be off."""
MOST_ASLEEP_GIB = 3.0
"""Memory that a sleeping engine may hold: its CUDA context and its graphs, which `plan` estimates at 1.6 GiB."""
LEAST_OF_BARE = 0.95
"""Tokens per second of one engine, as a fraction of those of vLLM's `LLM.generate`."""
MOST_PAIR_GAP = 1e-4
"""Relative gap of loss and gradient norm in float32 between two ranks and one; on CPUs it is near 1e-6."""
MOST_CHANGE_GAP = 0.01
"""Norm of the difference between an update's changes of the weights on two ranks and on one, divided by their norm;
on CPUs it is near 1e-5. AdamW divides gradients by their size, so rounding counts most where gradients are small."""
LEAST_FREED = 0.9
"""Fraction of the memory of a trainer or an engine that must be free after it is offloaded."""


def wrong(part: str, lines: Sequence[Line], *, on_gpu: bool) -> list[str]:
    """Return sentences about what is missing or wrong in the part's report; empty if it is correct."""
    found = [f"error: {line['error']}" for line in lines if "error" in line]
    if not lines:
        found.append("nothing was measured")
    return found + [text for line in lines for text in _CHECKS.get(part, _nothing)(line, on_gpu)]


def _nothing(line: Line, on_gpu: bool) -> list[str]:  # noqa: ARG001 - the shape of a check
    return []


def _is_right(line: Line, on_gpu: bool) -> list[str]:  # noqa: ARG001
    keys = ("right", "same_on_cpu", "same_after", "same_after_load")
    return [f"`{key}` is false: {dict(line)}" for key in keys if line.get(key) is False]


def _env(line: Line, on_gpu: bool) -> list[str]:
    found = []
    if line.get("varlen", "as is") != "as is":
        found.append(f"torch's variable-length attention is another one: {line['varlen']}")
    if on_gpu and line.get("matmul_tflops", 1000) < 400:
        found.append(f"a bfloat16 product reaches {line['matmul_tflops']} TFLOP/s only: is the GPU shared?")
    return found


def _gaps(line: Line, on_gpu: bool) -> list[str]:  # noqa: ARG001
    gaps = [line[key] for key in ("out", "gap") if key in line] + list(line.get("grads", ()))
    return [f"gap of {gap:.3g} to what was expected, allowed {MOST_GAP}" for gap in gaps if not gap <= MOST_GAP]


def _logprobs(line: Line, on_gpu: bool) -> list[str]:
    found = [f"log-probs are off by {line['gap']:.3g} nats, allowed 0.1"] if not line.get("gap", 0.0) <= 0.1 else []
    return found + _gaps({"grads": line.get("grads", ())}, on_gpu)


def _prints(line: Line, on_gpu: bool) -> list[str]:
    extra = line.get("extra_gib") or 0.0
    memory = [f"a checksum took {extra} GiB beside the tensor, allowed 0.07"] if extra > 0.07 else []
    return [*_is_right(line, on_gpu), *memory]


def _pinned(line: Line, on_gpu: bool) -> list[str]:
    slow = on_gpu and min(line.get("out_gb_s", 99), line.get("back_gb_s", 99)) < 10 and line.get("turn", 0) > 0
    large = line.get("host_bytes", 0) > 1.02 * line.get("bytes", 0) + 4096
    return [
        *_is_right(line, on_gpu),
        *([f"moving runs at {line['out_gb_s']} GB/s out, {line['back_gb_s']} back: is it pinned?"] if slow else []),
        *([f"{line['host_bytes']} bytes of host memory for {line['bytes']}"] if large else []),
    ]


def _update(line: Line, on_gpu: bool) -> list[str]:
    slow = on_gpu and line.get("mfu", 1.0) < LEAST_MFU
    return [
        *_is_right(line, on_gpu),
        *([f"model FLOPs utilisation {line['mfu']}, expected {LEAST_MFU}"] if slow else []),
        *_plan(line.get("plan_peak"), line.get("measured_peak")),
    ]


def _optimizer(line: Line, on_gpu: bool) -> list[str]:
    return [*_gaps(line, on_gpu), *_plan(line.get("plan_peak"), line.get("measured_peak"))]


def _plan(plan: float | None, measured: float | None) -> list[str]:
    """Check `plan` against the measured peak; return nothing without a measurement."""
    if plan is None or measured is None or abs(plan - measured) <= MOST_PLAN_GAP * measured:
        return []
    return [f"`plan` estimates a peak of {plan} GiB, measured are {measured}: {plan / measured - 1:+.0%}"]


def _transfer(line: Line, on_gpu: bool) -> list[str]:
    found = _is_right(line, on_gpu)
    expected = {"shared": "OpenDevice", "store": "OpenFile"}.get(line.get("way", "")) if on_gpu else None
    if expected is not None and line.get("read", [expected]) != [expected]:
        found.append(f"by the way `{line['way']}` the engine reads {line['read']}, expected `{expected}`")
    if on_gpu and line.get("freed_gib", 1e9) < LEAST_FREED * line.get("took_gib", 0.0):
        found.append(f"the {line['who']} took {line['took_gib']} GiB and freed {line['freed_gib']} when it left")
    return found


def _sleep(line: Line, on_gpu: bool) -> list[str]:
    if not on_gpu or line.get("asleep_gib") is None:
        return []
    held = line["before_gib"] - line["asleep_gib"]
    return [f"a sleeping engine holds {held:.1f} GiB, allowed {MOST_ASLEEP_GIB}"] if held > MOST_ASLEEP_GIB else []


def _mixture(line: Line, on_gpu: bool) -> list[str]:
    restarts = on_gpu and line.get("takes") is False
    found = ["vLLM's kernel changes experts, so engines restart at each transfer"] if restarts else []
    return [*_is_right(line, on_gpu), *found]


def _order(line: Line, on_gpu: bool) -> list[str]:
    found = [f"the run ended with code {line['code']}: {line['output']}"] if line.get("code") else []
    peak, plan = line.get("peak_gib"), line.get("plan_gib")
    if on_gpu and peak is not None and plan is not None and peak > (1 + MOST_PLAN_GAP) * plan:
        found.append(f"a run with an evaluation first takes {peak} GiB, `plan` estimates {plan} at most")
    return found


def _pair(line: Line, on_gpu: bool) -> list[str]:
    bounds = {"loss_gap": MOST_PAIR_GAP, "grad_norm_gap": MOST_PAIR_GAP, "change_gap": MOST_CHANGE_GAP}
    found = [
        f"an update in the layout `{line['layout']}` differs from that of one rank: `{key}` is {line[key]}, allowed "
        f"{most:g}"
        for key, most in bounds.items()
        if key in line and not line[key] <= most
    ]
    nccl, plan = line.get("nccl_gib"), line.get("plan_nccl_gib")
    if on_gpu and nccl is not None and nccl > plan:
        found.append(f"communicators take {nccl} GiB of a GPU, `plan` estimates {plan}")
    return [*_is_right(line, on_gpu), *found]


def _start(line: Line, on_gpu: bool) -> list[str]:
    no_graphs = on_gpu and line.get("graphs") is False
    return ["the engine has captured no CUDA graphs"] if no_graphs else []


def _rollout(line: Line, on_gpu: bool) -> list[str]:
    slow = on_gpu and line.get("side") == "ours" and line["of_bare"] < LEAST_OF_BARE
    return [f"one engine reaches {line['of_bare']} of vLLM's own speed, expected {LEAST_OF_BARE}"] if slow else []


def _soak(line: Line, on_gpu: bool) -> list[str]:  # noqa: ARG001
    found = [f"torch ran out of memory and tried again {line['retries']} times"] if line.get("retries") else []
    if line.get("reserved", 0) > 1.25 * line.get("peak", 1e9):
        found.append(f"{line['reserved']} GiB are reserved for a peak of {line['peak']}: fragments")
    return found


_CHECKS: dict[str, Callable[[Line, bool], list[str]]] = {
    "env": _env,
    "attention": _gaps,
    "logprobs": _logprobs,
    "prints": _prints,
    "ipc": _is_right,
    "transfer": _transfer,
    "pinned": _pinned,
    "rank": _update,
    "shard": _update,
    "lora": _update,
    "optimizer": _optimizer,
    "rollout": _rollout,
    "soak": _soak,
    "capped": _gaps,
    "experts": _gaps,
    "start": _start,
    "sleep": _sleep,
    "sync": _is_right,
    "mixture": _mixture,
    "order": _order,
    "pair": _pair,
}
