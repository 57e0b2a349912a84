"""A first look at the trainer on one GPU, without vLLM, Ray or a network.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_first.py [PART ...] [--tiny]

Parts, all of them where none is named: env attention logprobs prints ipc pinned rank shard variants soak capped
experts. Each prints lines of JSON, and an error of one is a line of it too: the next part goes on. A part's last line
is its verdict: `ok`, or what is `wrong` (`gpu_verdicts.py`); with any wrong the exit code is 1. `--tiny` is a dry run
with tiny models, two minutes on a CPU: it shows that every part still finds what it measures.
"""

import argparse
import gc
import inspect
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from unittest.mock import patch

import torch
from gpu_verdicts import wrong

from ppoctl.ports import Asked

TINY = "--tiny" in sys.argv
CUDA = torch.cuda.is_available()
DEV = torch.device("cuda", 0) if CUDA else torch.device("cpu")
BF16 = torch.bfloat16
HOPPER_FLOPS = 989e12
"""FLOP/s of an H100 or H200 in bfloat16, dense (data sheet)."""
LINES = []
"""What was said so far."""


def say(part, **what):
    """Print one line of JSON."""
    LINES.append({"part": part} | what)
    print(json.dumps(LINES[-1], default=str), flush=True)


def sync():
    """Wait until the GPU has done what it was given."""
    if CUDA:
        torch.cuda.synchronize()


def seconds(run, repeats=5, warm=2):
    """The median of so many runs, after some that are not counted."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        run()
        sync()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def gap(found, expected):
    """Norm of the difference over the norm of what was expected."""
    return float((found.detach().double() - expected.detach().double()).norm() / expected.detach().double().norm())


def gib(number):
    """Bytes in GiB, two decimals."""
    return round(number / 2**30, 2)


def fix_varlen():
    """Give torch's variable-length attention the signature of torch 2.12, where it has an older one: its kernels take
    fewer key heads all the same. Returns what was done."""
    import torch.nn.attention.varlen as varlen

    names, old = inspect.signature(varlen.varlen_attn).parameters, varlen.varlen_attn
    if "enable_gqa" in names:
        return "as is"
    if "window_size" in names:
        varlen.varlen_attn = lambda *a, enable_gqa=False, **k: old(*a, **k)  # noqa: ARG005 - the newer signature
        return "without enable_gqa"
    varlen.varlen_attn = lambda *a, **_: old(*a, is_causal=True)
    return "is_causal only"


def env():
    """What this machine and its packages are, and how fast it multiplies and copies."""
    say("env", torch=torch.__version__, cuda=torch.version.cuda, python=sys.version.split()[0], cores=os.cpu_count())
    if CUDA:
        properties = torch.cuda.get_device_properties(0)
        say(
            "env",
            gpu=properties.name,
            gib=gib(properties.total_memory),
            sms=properties.multi_processor_count,
            free=gib(torch.cuda.mem_get_info()[0]),
            nccl=torch.cuda.nccl.version(),
            cudnn=torch.backends.cudnn.version(),
        )
        a, b = (torch.randn(8192, 8192, device=DEV, dtype=BF16) for _ in range(2))
        say("env", matmul_tflops=round(2 * 8192**3 / seconds(lambda: a @ b) / 1e12))
        x = torch.empty(2**31, dtype=torch.uint8, device=DEV)
        say("env", copy_tb_s=round(2 * x.numel() / seconds(lambda: x.clone()) / 1e12, 2))
    say(
        "env",
        varlen=fix_varlen(),
        grouped_mm=hasattr(torch.nn.functional, "grouped_mm"),
        addmm_out_dtype="dtype_out" in torch.ops.aten.addmm.overloads(),
    )
    import megatron.core

    say("env", megatron=megatron.core.__version__, te="transformer_engine" in sys.modules)
    import ppoctl.engines.megatron.rank  # noqa: F401

    say("env", ppoctl="imports")


def _packed(lengths, key_lengths=None):
    """Sequences of these lengths one behind another, as a microbatch has them; keys may be more than queries."""
    from ppoctl.engines.megatron.packed_input import PackedInput, _starts

    keys = tuple(key_lengths or lengths)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEV)
    return PackedInput(
        qkv_format="thd",
        cu_seqlens_q=_starts(lengths).to(DEV),
        cu_seqlens_kv=_starts(keys).to(DEV),
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(keys),
        tokens=nothing,
        positions=nothing,
        query_lengths=tuple(lengths),
        key_lengths=keys,
        read_at=nothing,
        targets=nothing,
    )


def _reference(q, k, v, packed):
    """Attention written out in float64, one sequence at a time."""
    from ppoctl.engines.megatron.attention import pieces, sees

    out = []
    for a, b, c in pieces(q.double(), k.double(), v.double(), packed):
        b, c = (x.repeat_interleave(a.shape[1] // x.shape[1], 1) for x in (b, c))
        scores = torch.einsum("shd,thd->hst", a, b) * a.shape[-1] ** -0.5
        scores = scores.masked_fill(~sees(len(a), len(b), a.device), -torch.inf)
        out.append(torch.einsum("hst,thd->shd", scores.softmax(-1), c))
    return torch.cat(out)


def attention():
    """The packed attention: gaps of outputs and gradients to float64, FLOP/s beside torch's dense kernels, and
    whether a backward repeats itself."""
    from ppoctl.engines.megatron.attention import _per_piece, _varlen

    fix_varlen()
    kernel = _varlen if CUDA else _per_piece
    cases = [
        (4, 2, 64, (37, 1, 130), None),
        (7, 1, 128, (300, 5), None),
        (28, 4, 128, (257,), None),
        (4, 2, 128, (64, 64), (64, 512)),
        (4, 4, 192, (129,), None),
        (8, 4, 256, (200, 33), None),
        (4, 2, 32, (99,), None),
    ]
    for heads, groups, dim, lengths, keys in cases:
        packed = _packed(lengths, keys)
        q = torch.randn(sum(lengths), heads, dim, device=DEV, dtype=BF16, requires_grad=True)
        fused = torch.randn(sum(keys or lengths), groups, 2 * dim, device=DEV, dtype=BF16, requires_grad=True)
        k, v = fused.split(dim, -1)  # as in the model: views of a fused projection
        out = kernel(q, k, v, packed, None)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, fused), grad)
        expected_out = _reference(q, k, v, packed)
        expected = torch.autograd.grad(expected_out, (q, fused), grad.double())
        say(
            "attention",
            shape=(heads, groups, dim),
            lengths=lengths,
            keys=keys,
            out=gap(out, expected_out),
            grads=[gap(a, b) for a, b in zip(found, expected, strict=True)],
        )
    for heads, groups in ((28, 4), (7, 1)):
        backward, both_s = _attention_speed(kernel, heads, groups)
    if CUDA:  # equal inputs, equal bits?
        grads = [backward() for _ in range(2)]
        say("attention", backward_repeats=[bool(torch.equal(x, y)) for x, y in zip(*grads, strict=True)])
        torch.use_deterministic_algorithms(True, warn_only=True)
        slow_s = seconds(backward)
        grads = [backward() for _ in range(2)]
        torch.use_deterministic_algorithms(False)
        say(
            "attention",
            deterministic=[bool(torch.equal(x, y)) for x, y in zip(*grads, strict=True)],
            slower=round(slow_s / both_s, 2),
        )


def _attention_speed(kernel, heads, groups):
    """Say the FLOP/s of one long sequence. Returns its forward and backward as a function, and their seconds."""
    n = 64 if TINY else 8192
    packed = _packed((n,))
    q, k, v = (torch.randn(n, h, 128, device=DEV, dtype=BF16, requires_grad=True) for h in (heads, groups, groups))
    grad = torch.randn_like(q)

    def backward():
        return torch.autograd.grad(kernel(q, k, v, packed, None), (q, k, v), grad)

    flops = 2 * 2 * heads * 128 * n * (n + 1) / 2
    forward_s, both_s = seconds(lambda: kernel(q, k, v, packed, None)), seconds(backward)
    line = {
        "varlen_fwd_tflops": flops / forward_s / 1e12,
        "varlen_bwd_tflops": 2.5 * flops / (both_s - forward_s) / 1e12,
    }
    if CUDA:
        line |= _dense_speed(q, k, v, grad, flops)
    rounded = {name: round(value, 1) if isinstance(value, float) else value for name, value in line.items()}
    say("attention", tokens=n, heads=heads, **rounded)
    return backward, both_s


def _dense_speed(q, k, v, grad, flops):
    """FLOP/s of torch's dense kernels on the same sequence, by backend, or why one does not run."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    a, b, c, g = (x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v, grad))

    def dense():
        return torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)

    line = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                forward_s = seconds(dense)
                both_s = seconds(lambda: torch.autograd.grad(dense(), (a, b, c), g))
            line[f"{name}_fwd_tflops"] = flops / forward_s / 1e12
            line[f"{name}_bwd_tflops"] = 2.5 * flops / (both_s - forward_s) / 1e12
        except RuntimeError as error:
            line[name] = str(error).splitlines()[0]
    return line


def _addmm(grad_weight, grad_logits, hidden):
    """What may stand in for `logprobs._accumulate`: one product that adds in float32 (torch >= 2.8, CUDA)."""
    if grad_weight.dtype == hidden.dtype or not CUDA:
        grad_weight.add_((grad_logits.t().float() @ hidden.float()).to(grad_weight.dtype))
    else:
        torch.addmm(grad_weight, grad_logits.t(), hidden, out_dtype=torch.float32, out=grad_weight)


def logprobs():
    """Log-probs of a large vocabulary by chunk size, with the weight's gradient added in bands or in one product."""
    from ppoctl.engines.megatron import logprobs as ours
    from ppoctl.ports import Asked

    n, hidden_size, vocab = (64, 32, 97) if TINY else (8192, 3584, 152064 // 4)
    hidden = torch.randn(n, hidden_size, device=DEV, dtype=BF16, requires_grad=True)
    weight = (torch.randn(vocab, hidden_size, device=DEV) * 0.02).to(BF16).requires_grad_()
    targets = torch.randint(0, vocab, (n,), device=DEV)
    grad = torch.randn(n, device=DEV)
    few = slice(0, 256)
    exact = (hidden[few].double() @ weight.double().t()).log_softmax(-1).gather(1, targets[few, None])[:, 0]
    for chunk in (1024, 4096, 8192):
        for name, accumulate in (("bands", ours._accumulate), ("addmm", _addmm)):
            weight.main_grad = torch.zeros(weight.shape, device=DEV)
            settings = ours.LogprobSettings(Asked(), chunk)

            def both(settings=settings):
                found, *_ = ours.token_logprobs(hidden, weight, targets, settings)
                torch.autograd.grad(found, hidden, grad)
                return found

            with patch.object(ours, "_accumulate", accumulate):
                both()
                once = weight.main_grad.clone()
                took = seconds(both, repeats=3, warm=0)
            say(
                "logprobs",
                chunk=chunk,
                how=name,
                ms=round(took * 1e3, 2),
                gap=float((both()[few] - exact).abs().max()),
                share_of_matmul_time=round(8 * n * vocab * hidden_size / took / 7.5e14, 2),
                main_grad_norm=float(once.norm()),
            )


def prints():
    """Checksums of tensors as large as a model's: time, memory beside the tensor, and the same on a CPU."""
    from ppoctl.weights.checksum import checksum_of

    shapes = [(64, 32)] * 3 if TINY else [(152064, 3584), (37888, 3584), (3584, 18944), (4608, 3584), (3584,)]
    for shape in shapes:
        tensor = torch.randn(shape, device=DEV, dtype=BF16)
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        took = seconds(lambda tensor=tensor: checksum_of(tensor))
        peak = gib(torch.cuda.max_memory_allocated() - before) if CUDA else None
        say(
            "prints",
            shape=shape,
            ms=round(took * 1e3, 3),
            gb_s=round(tensor.nbytes / took / 1e9, 1),
            extra_gib=peak,
            same_on_cpu=checksum_of(tensor[:64]) == checksum_of(tensor[:64].cpu()),
        )


def _reader(connection):
    """The other process: opens what it is shown, answers with sums and the seconds it took."""
    if CUDA:
        torch.cuda.init()
    while (shared := connection.recv()) is not None:
        try:
            start = time.perf_counter()
            found = shared.tensors()
            took = time.perf_counter() - start
            connection.send([(name, float(t.float().sum()), tuple(t.shape)) for name, t in found] + [took])
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            connection.send(f"{type(error).__name__}: {error}")


def ipc():
    """Memory of one process read by another on the same GPU, without and with expandable segments."""
    from ppoctl.weights.sharing import Staging

    for conf in ("expandable_segments:False", "expandable_segments:True"):
        if CUDA:
            torch.cuda.empty_cache()
            torch._C._accelerator_setAllocatorSettings(conf)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_reader, args=(theirs,), daemon=True)
        process.start()
        staging = Staging(DEV)
        size = 2**10 if TINY else 2**27
        for value in (1.0, 2.0, 3.0, 4.0):
            tensors = [
                ("a", torch.full((size,), value, dtype=BF16, device=DEV)),
                ("b", torch.tensor([value], device=DEV)),
            ]
            start = time.perf_counter()
            shared = staging.put(tensors)
            put = time.perf_counter() - start
            ours.send(shared)
            answer = ours.recv() if ours.poll(60) else "no answer in 60 s"
            right = isinstance(answer, list) and answer[0][1] == size * value and answer[1][1] == value
            say("ipc", conf=conf, right=right, put_ms=round(put * 1e3, 2), answer=answer if not right else answer[-1])
        del staging, shared
        if CUDA:
            torch.cuda.empty_cache()
            say("ipc", conf=conf, free_after=gib(torch.cuda.mem_get_info()[0]))
        ours.send(None)
        process.join(10)
    if CUDA:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def pinned():
    """What moving a trainer's tensors to the host and back costs in host memory and time, first and again."""
    from ppoctl.engines.megatron.offload import HostMemory

    sizes = [1000] * 3 if TINY else [152064 * 3584 * 2, *[37888 * 3584 * 2, 3584 * 18944 * 2, 33030144, 25690112] * 8]
    tensors = [torch.ones(size, dtype=torch.uint8, device=DEV) for size in sizes]
    host = HostMemory()
    for turn in range(3):
        sync()
        start = time.perf_counter()
        host.take("x", tensors)
        sync()
        out = time.perf_counter() - start
        start = time.perf_counter()
        host.bring_back("x")
        sync()
        back = time.perf_counter() - start
        say(
            "pinned",
            turn=turn,
            bytes=sum(sizes),
            host_bytes=host.bytes,
            out_gb_s=round(sum(sizes) / out / 1e9, 1),
            back_gb_s=round(sum(sizes) / back / 1e9, 1),
            right=all(bool(t.eq(1).all()) for t in tensors),
        )


MODELS = {
    "1.5b": {
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    # What a rank of tensor = 4 has of the 7B model: its time without messages.
    "shard": {
        "vocab_size": 38016,
        "hidden_size": 3584,
        "intermediate_size": 4736,
        "num_hidden_layers": 28,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
}
"""Configurations by the name that the lines have as `kind`."""
_folders = {}
"""Where those are that were made."""


def folder(kind):
    """A Hugging Face folder with random weights, made once in each run."""
    kind = "tiny" if TINY else kind
    if kind not in _folders:
        from transformers import LlamaConfig, LlamaForCausalLM

        path = Path(tempfile.mkdtemp(prefix=f"{kind}-"))
        with torch.device(DEV):
            model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=16384, **MODELS[kind])).to(BF16)
        model.save_pretrained(path)
        _folders[kind] = path
        del model
        if CUDA:
            torch.cuda.empty_cache()
    return _folders[kind]


def _sequences(kind, count, shortest, longest):
    """Sequences of so many tokens, a quarter of each prompt."""
    import roofline

    shortest, longest = (8, 24) if TINY else (shortest, longest)
    return roofline.made_up_sequences(count, shortest, longest, MODELS["tiny" if TINY else kind]["vocab_size"])


def _open(kind, role="actor", *, most=16384, chunk=1024, recompute="none"):
    """A rank of a model, started. `most` tokens are a microbatch, `chunk` of them have their logits at a time."""
    from ppoctl.engines.megatron.rank import MegatronRank, TrainerSettings
    from ppoctl.recipe.schema import ByTokens

    batching = ByTokens(max_tokens_per_microbatch=64 if TINY else most, logits_chunk_tokens=chunk)
    rank = MegatronRank(TrainerSettings(role, str(folder(kind)), BF16, batching, recompute=recompute))
    start = time.perf_counter()
    rank.start()
    sync()
    say("open", kind=kind, role=role, start_s=round(time.perf_counter() - start, 1))
    return rank


def _flops(kind, sequences):
    """What an update of these sequences has to compute: a forward, and twice that backward; of the head only what
    responses need."""
    c = MODELS["tiny" if TINY else kind]
    inputs = (sequences.prompt_lengths + sequences.lengths - 1).double()
    per_token = 2 * (
        c["hidden_size"] * (c["num_attention_heads"] * 2 + 2 * c["num_key_value_heads"]) * c["head_dim"]
        + 3 * c["hidden_size"] * c["intermediate_size"]
    )
    pairs = float((inputs * (inputs + 1) / 2).sum())
    layers = c["num_hidden_layers"] * (
        per_token * float(inputs.sum()) + 4 * c["num_attention_heads"] * c["head_dim"] * pairs
    )
    return 3 * (layers + 2 * c["hidden_size"] * c["vocab_size"] * float(sequences.lengths.sum()))


def _objective(sequences):
    """The cheapest loss there is."""
    import roofline

    return roofline.Objective(sequences.present, Asked())


def _minibatch(sequences):
    """All rows as one optimizer step."""
    import roofline

    from ppoctl.ports import Minibatch

    return Minibatch(torch.arange(sequences.num_seqs), (int(sequences.present.sum()),), roofline.STEP)


def _timed_update(part, kind, rank, sequences, **extra):
    """Say the seconds, FLOP/s and memory of an update."""
    objective, minibatch = _objective(sequences), _minibatch(sequences)
    rank.update(sequences, [minibatch], objective)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    took = seconds(lambda: rank.update(sequences, [minibatch], objective), repeats=3, warm=1)
    tokens = int((sequences.prompt_lengths + sequences.lengths - 1).sum())
    peak = {}
    if CUDA:
        peak["peak_gib"] = gib(torch.cuda.max_memory_allocated())
        peak["reserved_gib"] = gib(torch.cuda.max_memory_reserved())
    say(
        part,
        kind=kind,
        tokens=tokens,
        s=round(took, 3),
        tokens_s=round(tokens / took),
        tflops=round(_flops(kind, sequences) / took / 1e12, 1),
        mfu=round(_flops(kind, sequences) / took / HOPPER_FLOPS, 3),
        **peak,
        **extra,
    )


def _close(rank):
    """Let go of a rank's memory."""
    rank._stages.clear()
    rank._optimizer = None
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def rank():
    """A whole update, its memory beside what `plan` says, its kernels, moving out, saving and loading."""
    fix_varlen()
    from ppoctl.model.reading import read_shape
    from ppoctl.plan.memory.part import Microbatch, Precision
    from ppoctl.plan.memory.trainer import Training, ranks_of
    from ppoctl.ports import Asked
    from ppoctl.recipe.schema import ParallelTable

    one = _open("1.5b")
    sequences = _sequences("1.5b", 16, 8192, 8192)
    _timed_update("rank", "1.5b", one, sequences)
    tokens = 16382 if not TINY else 48
    batch = Microbatch(tokens, tokens * 3 // 4, 1024, 8191)
    said = ranks_of(
        Training("actor", read_shape(folder("1.5b")), ParallelTable(), Precision(2, "gpu"), batch, batch, 8)
    )[0]
    say("rank", plan_resident=gib(said.resident), plan_update=gib(said.update), plan_peak=gib(said.peak))
    forward = seconds(lambda: one.forward(sequences, Asked(entropy=True)), repeats=2, warm=1)
    say("rank", forward_s=round(forward, 3))
    if CUDA:
        _profiled(one)
    before = {name: t.detach().cpu() for name, t in one.weights()}
    for turn in range(2):
        free = torch.cuda.mem_get_info()[0] if CUDA else 0
        sync()
        start = time.perf_counter()
        one.leave()
        sync()
        out = time.perf_counter() - start
        gone = torch.cuda.mem_get_info()[0] if CUDA else 0
        start = time.perf_counter()
        one._have("weights", "training")
        sync()
        back = time.perf_counter() - start
        say(
            "rank",
            leave_s=round(out, 2),
            back_s=round(back, 2),
            freed_gib=gib(gone - free),
            free_gib=gib(gone),
            turn=turn,
            host_gib=gib(one._host.bytes),
        )
    say("rank", same_after=all(torch.equal(t.detach().cpu(), before[name]) for name, t in one.weights()))
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        one.begin_save(Path(name), True)
        copied = time.perf_counter() - start
        one.finish_save()
        say("rank", save_copied_s=round(copied, 2), save_s=round(time.perf_counter() - start, 2))
        one.update(sequences, [_minibatch(sequences)], _objective(sequences))
        one.load(Path(name))
        say("rank", same_after_load=all(torch.equal(t.detach().cpu(), before[name]) for name, t in one.weights()))
    _close(one)


def _profiled(rank):
    """Print the kernels of an update that take longest."""
    from torch.profiler import ProfilerActivity, profile

    few = _sequences("1.5b", 4, 8192, 8192)
    rank.update(few, [_minibatch(few)], _objective(few))
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as kernels:
        rank.update(few, [_minibatch(few)], _objective(few))
        sync()
    print(kernels.key_averages().table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=70))


def shard():
    """An update of what a rank of four tensor ranks has of a 7B model, without messages."""
    fix_varlen()
    one = _open("shard", most=10240)
    _timed_update("shard", "shard", one, _sequences("shard", 8, 10239, 10239))
    _close(one)


class _Apex:
    """What Megatron-Core asks of Apex for gradients that add up inside the product."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs, grads, main_grad):
        _addmm(main_grad, grads, inputs)


def variants():
    """Updates of one model with one change at a time, same rows, same seed."""
    fix_varlen()
    from megatron.core.tensor_parallel import layers

    from ppoctl.engines.megatron import logprobs as ours
    from ppoctl.engines.megatron import model

    original = model.transformer_config

    def config(**changes):
        def made(*arguments):
            found = original(*arguments)
            for name, value in changes.items():
                setattr(found, name, value)
            return found

        return patch.object(model, "transformer_config", made)

    sequences = _sequences("1.5b", 8, 8192, 8192)
    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = _Apex, True
    cases = [
        ("base", {}, {}, False),
        ("swiglu fused", {"bias_activation_fusion": True}, {}, False),
        ("wgrad in product", {"gradient_accumulation_fusion": True}, {}, False),
        ("chunk 8192", {}, {"chunk": 8192}, False),
        ("head addmm", {}, {"chunk": 8192}, True),
        ("all", {"bias_activation_fusion": True, "gradient_accumulation_fusion": True}, {"chunk": 8192}, True),
        ("selective", {}, {"recompute": "selective"}, False),
        ("full", {}, {"recompute": "full"}, False),
    ]
    for name, changes, how, head in cases:
        try:
            with config(**changes), patch.object(ours, "_accumulate", _addmm if head else ours._accumulate):
                one = _open("1.5b", **how)
                loss = one.update(sequences, [_minibatch(sequences)], _objective(sequences))[0]
                _timed_update(
                    "variants",
                    "1.5b",
                    one,
                    sequences,
                    variant=name,
                    loss=round(loss.loss, 6),
                    grad_norm=round(loss.grad_norm, 6),
                )
                _close(one)
        except Exception as error:  # noqa: BLE001 - a variant that this torch cannot do is a line of the table
            say("variants", variant=name, error=f"{type(error).__name__}: {str(error)[:300]}")


def soak():
    """Updates of lengths as they come: whether what torch keeps beyond what is used grows."""
    fix_varlen()
    one = _open("1.5b")
    for turn in range(2 if TINY else 12):
        torch.manual_seed(turn)
        sequences = _sequences("1.5b", 24, 300 + 97 * turn, 8192)
        start = time.perf_counter()
        one.update(sequences, [_minibatch(sequences)], _objective(sequences))
        sync()
        line = {"s": round(time.perf_counter() - start, 2)}
        if CUDA:
            stats = torch.cuda.memory_stats()
            line |= {
                "peak": gib(stats["allocated_bytes.all.peak"]),
                "reserved": gib(stats["reserved_bytes.all.current"]),
                "retries": stats["num_alloc_retries"],
            }
        say("soak", turn=turn, **line)
    _close(one)


def capped():
    """Gemma's attention with a cap and a window: written out, and by FlexAttention."""
    from ppoctl.engines.megatron.capped_attention import CappedAttention

    n, heads, groups, dim, cap, window = (64, 4, 2, 32, 50.0, 16) if TINY else (4096, 8, 4, 256, 50.0, 2048)
    ours = CappedAttention.__new__(CappedAttention)
    torch.nn.Module.__init__(ours)
    ours.softmax_scale, ours.softcap, ours.window = dim**-0.5, cap, window
    q, k, v = (torch.randn(n, h, dim, device=DEV, dtype=BF16, requires_grad=True) for h in (heads, groups, groups))
    packed = _packed((n,))
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    out = ours.attend_pieces(q, k, v, packed)
    g = torch.randn_like(out)
    took = seconds(lambda: torch.autograd.grad(ours.attend_pieces(q, k, v, packed), (q, k, v), g), repeats=2, warm=1)
    say(
        "capped",
        how="written out",
        ms=round(took * 1e3, 1),
        peak_gib=gib(torch.cuda.max_memory_allocated()) if CUDA else None,
    )
    if not CUDA:
        return
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda _b, _h, i, j: (j <= i) & (i - j < window), None, None, n, n, device=DEV)
    flex = torch.compile(flex_attention)

    def run():
        a, b, c = (x.transpose(0, 1)[None] for x in (q, k, v))
        return flex(a, b, c, score_mod=lambda s, *_: cap * torch.tanh(s / cap), block_mask=mask, enable_gqa=True)[
            0
        ].transpose(0, 1)

    found = run()
    torch.cuda.reset_peak_memory_stats()
    took = seconds(lambda: torch.autograd.grad(run(), (q, k, v), g), repeats=3, warm=1)
    say(
        "capped",
        how="flex",
        ms=round(took * 1e3, 1),
        gap=gap(found, out),
        peak_gib=gib(torch.cuda.max_memory_allocated()),
    )


def experts():
    """Products of experts: one expert after the other, and torch's grouped products."""
    n, hidden, inner, count, top = (64, 16, 16, 4, 2) if TINY else (10240, 2048, 768, 128, 8)
    x = torch.randn(n * top, hidden, device=DEV, dtype=BF16)
    one = torch.randn(count, 2 * inner, hidden, device=DEV, dtype=BF16) * 0.02
    two = torch.randn(count, hidden, inner, device=DEV, dtype=BF16) * 0.02
    counts = torch.bincount(torch.randint(0, count, (n * top,)), minlength=count)
    offsets = counts.cumsum(0).to(torch.int32).to(DEV)
    act = torch.nn.functional.silu

    def loop():
        out = []
        for e, tokens in enumerate(x.split(counts.tolist())):
            a, b = (tokens @ one[e].t()).chunk(2, -1)
            out.append((act(a) * b) @ two[e].t())
        return torch.cat(out)

    def grouped():
        a, b = torch.nn.functional.grouped_mm(x, one.transpose(-2, -1), offs=offsets).chunk(2, -1)
        return torch.nn.functional.grouped_mm(act(a) * b, two.transpose(-2, -1), offs=offsets)

    flops = 2 * n * top * hidden * inner * 3
    for name, run in (("loop", loop), ("grouped", grouped)):
        took = seconds(run)
        say(
            "experts", how=name, ms=round(took * 1e3, 2), tflops=round(flops / took / 1e12, 1), gap=gap(run(), loop())
        )


PARTS = {
    part.__name__: part
    for part in (
        env, attention, logprobs, prints, ipc, pinned, rank, shard, variants, soak, capped, experts,
    )
}  # fmt: skip


def main():
    """Run the parts that were named, or all."""
    parser = argparse.ArgumentParser(description="A first look at the trainer on one GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--tiny", action="store_true", help="a dry run, which a CPU can do")
    names = parser.parse_args().parts
    if unknown := set(names) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are: {' '.join(PARTS)}")
    for name in names or PARTS:
        began = time.perf_counter()
        try:
            PARTS[name]()
        except Exception as error:  # noqa: BLE001 - the other parts go on
            say(name, error=f"{type(error).__name__}: {str(error)[:400]}")
            traceback.print_exc()
        found = wrong(name, [line for line in LINES if line["part"] == name], on_gpu=CUDA and not TINY)
        say(name, done_s=round(time.perf_counter() - began, 1), verdict="not ok" if found else "ok", wrong=found)
    return 1 if any(line.get("wrong") for line in LINES) else 0


if __name__ == "__main__":
    sys.exit(main())
