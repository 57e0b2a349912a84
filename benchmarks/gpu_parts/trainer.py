"""Complete updates: their speed, their memory next to `plan`'s estimate, and variants of them."""

import tempfile
import time
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch

from gpu_parts.kernels import addmm_in_float32, packed_alternatives
from gpu_parts.lines import JOB, notify
from gpu_parts.measure import CUDA, HOPPER_FLOPS, TINY, fix_varlen, free_gib, gib, record_history, seconds, sync
from gpu_parts.models import (
    close_rank,
    folder,
    minibatch_of,
    objective_of,
    open_rank,
    sequences_of,
    update_flops,
)
from ppoctl.engines.weights.sending import PARTS
from ppoctl.models.model import Model


def timed_update(part, kind, rank, sequences, **extra):
    """Report the seconds, FLOP/s and memory of an update. Return the seconds and the peak in GiB (None without a
    GPU)."""
    objective, minibatch = objective_of(sequences), minibatch_of(sequences)
    rank.update(sequences, [minibatch], objective)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    took = seconds(lambda: rank.update(sequences, [minibatch], objective), repeats=3, warm=1)
    tokens = int((sequences.prompt_lengths + sequences.lengths - 1).sum())
    peak = {}
    if CUDA:
        peak["peak_gib"] = gib(torch.cuda.max_memory_allocated())
        peak["reserved_gib"] = gib(torch.cuda.max_memory_reserved())
    notify(
        part,
        kind=kind,
        tokens=tokens,
        s=round(took, 3),
        tokens_s=round(tokens / took),
        tflops=round(update_flops(kind, sequences) / took / 1e12, 1),
        mfu=round(update_flops(kind, sequences) / took / HOPPER_FLOPS, 3),
        **peak,
        **extra,
    )
    return took, peak.get("peak_gib")


def rank():
    """Report a complete update, its memory next to `plan`'s estimate, its kernels, offloading, saving and loading."""
    fix_varlen()
    record_history()
    from ppoctl.core.ports import OutputRequest
    from ppoctl.core.recipe_table import ParallelTable
    from ppoctl.models.shape_reader import read_shape
    from ppoctl.plan.memory.shard import MicrobatchShape, Precision
    from ppoctl.plan.memory.trainer_memory import Training, ranks_of

    one = open_rank("1.5b")
    sequences = sequences_of("1.5b", 16, 8192, 8192)
    _, peak = timed_update("rank", "1.5b", one, sequences)
    tokens = 16382 if not TINY else 48
    batch = MicrobatchShape(tokens, tokens * 3 // 4, 1024, 8191)
    plan = ranks_of(
        Training(Model(read_shape(folder("1.5b")), "token"), ParallelTable(), Precision(2, "gpu"), batch, batch, 8)
    )[0]
    notify(
        "rank",
        plan_resident=gib(plan.resident),
        plan_update=gib(plan.update),
        plan_peak=gib(plan.peak),
        measured_peak=peak,
    )
    forward = seconds(lambda: one.forward(sequences, OutputRequest(entropy=True)), repeats=2, warm=1)
    notify("rank", forward_s=round(forward, 3))
    if CUDA:
        _profiled(one)
    before = {name: t.detach().cpu() for name, t in chain.from_iterable(one.weights(PARTS))}
    for turn in range(2):
        free = free_gib() or 0
        sync()
        start = time.perf_counter()
        one.offload()
        sync()
        out = time.perf_counter() - start
        gone = free_gib() or 0
        start = time.perf_counter()
        one._reload("weights", "training")
        sync()
        back = time.perf_counter() - start
        notify(
            "rank",
            leave_s=round(out, 2),
            back_s=round(back, 2),
            freed_gib=round(gone - free, 2),
            free_gib=gone,
            turn=turn,
            host_gib=gib(one._host.bytes),
        )
    notify(
        "rank",
        same_after=all(
            torch.equal(t.detach().cpu(), before[name]) for name, t in chain.from_iterable(one.weights(PARTS))
        ),
    )
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        one.begin_save(Path(name), True)
        copied = time.perf_counter() - start
        one.finish_save()
        notify("rank", save_copied_s=round(copied, 2), save_s=round(time.perf_counter() - start, 2))
        one.update(sequences, [minibatch_of(sequences)], objective_of(sequences))
        one.load(Path(name))
        notify(
            "rank",
            same_after_load=all(
                torch.equal(t.detach().cpu(), before[name]) for name, t in chain.from_iterable(one.weights(PARTS))
            ),
        )
    close_rank(one)


def _profiled(rank):
    """Write the kernels of an update that take longest to a file."""
    from torch.profiler import ProfilerActivity, profile

    few = sequences_of("1.5b", 4, 8192, 8192)
    rank.update(few, [minibatch_of(few)], objective_of(few))
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as kernels:
        rank.update(few, [minibatch_of(few)], objective_of(few))
        sync()
    table = kernels.key_averages().table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=70)
    (Path(JOB.out) / "profile.txt").write_text(table, encoding="utf-8")


def shard():
    """Report an update of one rank's shard of a 7B model on four tensor ranks, without communication."""
    fix_varlen()
    one = open_rank("shard", most=10240)
    timed_update("shard", "shard", one, sequences_of("shard", 8, 10239, 10239))
    close_rank(one)


class _Apex:
    """The functions of Apex that Megatron-Core calls for gradients accumulated inside the matrix product."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs, grads, main_grad):
        addmm_in_float32(main_grad, grads, inputs)


def _variants():
    """Yield name, context and settings of each variant of an update."""
    from megatron.core.tensor_parallel import layers

    from ppoctl.engines.megatron import megatron_model
    from ppoctl.engines.megatron.logit_blocks import LogprobSettings

    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = _Apex, True
    original = megatron_model.transformer_config

    def in_product(*arguments):
        config = original(*arguments)
        config.gradient_accumulation_fusion = True
        return config

    def plain_head(*arguments, fused):  # noqa: ARG001 - replaced
        return LogprobSettings(*arguments)

    fused, chunk = {"kernels": "fused"}, {"chunk": 4096}
    with_wgrad = patch.object(megatron_model, "transformer_config", in_product)
    yield "base", nullcontext(), {}
    yield "fused", nullcontext(), fused
    yield "fused, chunk 4096", nullcontext(), {**fused, **chunk}
    yield "fused SwiGLU alone", patch.object(megatron_model, "LogprobSettings", plain_head), fused
    yield "chunk 4096", nullcontext(), chunk
    for name, context in packed_alternatives() if CUDA else ():
        yield f"attention {name}", context, {}
    yield "wgrad in product", with_wgrad, {}
    yield "selective", nullcontext(), {"recompute": "selective"}
    yield "full", nullcontext(), {"recompute": "full"}


LEAST_GAIN = 1.03
"""How many times as fast an update must be with a variant that is worth using."""
MOST_LOSS_GAP, MOST_NORM_GAP = 1e-3, 0.02
"""Relative gaps of loss and gradient norm that rounding to bfloat16 can cause."""


def _verdict(base, variant):
    """Return whether a variant computes the same and is faster than the base: (loss, gradient norm, seconds)."""
    gaps = [abs(a - b) / max(abs(a), 1e-9) for a, b in zip(base, variant, strict=True)]
    if gaps[0] > MOST_LOSS_GAP or gaps[1] > MOST_NORM_GAP:
        return f"wrong: loss differs by {gaps[0]:.2g}, gradient norm by {gaps[1]:.2g}"
    return "use it" if base[2] / variant[2] >= LEAST_GAIN else "keep the base"


def variants():
    """Report updates of one model with one change at a time, equal rows and seed."""
    fix_varlen()
    sequences = sequences_of("1.5b", 8, 8192, 8192)
    longest, base = 0.0, None
    for name, context, how in _variants():
        if JOB.seconds_left() < 1.3 * longest:
            notify("variants", variant=name, left_out=f"{JOB.seconds_left():.0f} s are left, one takes {longest:.0f}")
            continue
        began, one = time.perf_counter(), None
        try:
            with context:
                one = open_rank("1.5b", most=8192, **how)  # room for logits in chunks of 4,096 tokens
                loss = one.update(sequences, [minibatch_of(sequences)], objective_of(sequences))[0]
                took = timed_update("variants", "1.5b", one, sequences, variant=name)[0]
            found = (loss.loss, loss.grad_norm, took)
            base = base or found
            verdict = _verdict(base, found)
            notify("variants", variant=name, loss=loss.loss, grad_norm=loss.grad_norm, verdict=verdict)
        except Exception as error:  # noqa: BLE001 - a variant that this torch cannot do is a line of the table
            notify("variants", variant=name, missing=f"{type(error).__name__}: {str(error)[:300]}")
        if one is not None:
            close_rank(one)
        longest = max(longest, time.perf_counter() - began)


def soak():
    """Run updates with random lengths; report whether torch's reserved but unused memory grows."""
    fix_varlen()
    record_history()
    one = open_rank("1.5b")
    longest = 0.0
    for turn in range(2 if TINY else 12):
        if JOB.seconds_left() < 1.3 * longest:
            notify("soak", turn=turn, left_out=f"{JOB.seconds_left():.0f} s are left, one takes {longest:.0f}")
            break
        torch.manual_seed(turn)
        sequences = sequences_of("1.5b", 24, 300 + 97 * turn, 8192)
        start = time.perf_counter()
        one.update(sequences, [minibatch_of(sequences)], objective_of(sequences))
        sync()
        longest = max(longest, time.perf_counter() - start)
        line = {"s": round(time.perf_counter() - start, 2)}
        if CUDA:
            stats = torch.cuda.memory_stats()
            line |= {
                "peak": gib(stats["allocated_bytes.all.peak"]),
                "reserved": gib(stats["reserved_bytes.all.current"]),
                "retries": stats["num_alloc_retries"],
            }
        notify("soak", turn=turn, **line)
    close_rank(one)
