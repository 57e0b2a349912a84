"""Kernels of the trainer in isolation: attention, log-probs of a large vocabulary, grouped matrix products of
experts."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from gpu_verdicts import MOST_GAP

from gpu_parts.lines import notify
from gpu_parts.measure import BF16, CUDA, DEV, TINY, fix_varlen, gap, gib, seconds

LEAST_GAIN = 1.2
"""How many times as fast another attention must be to be worth a package."""


def _packed(lengths, key_lengths=None):
    """Return packed sequences of these lengths, as in a microbatch; keys may be more than queries."""
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
        at=nothing,
    )


def _reference(q, k, v, packed, window=None):
    """Compute attention in float64 with plain formulas, one sequence at a time."""
    from ppoctl.engines.megatron.attention import pieces, sees

    out = []
    for a, b, c in pieces(q.double(), k.double(), v.double(), packed):
        b, c = (x.repeat_interleave(a.shape[1] // x.shape[1], 1) for x in (b, c))
        scores = torch.einsum("shd,thd->hst", a, b) * a.shape[-1] ** -0.5
        scores = scores.masked_fill(~sees(len(a), len(b), a.device, window), -torch.inf)
        out.append(torch.einsum("hst,thd->shd", scores.softmax(-1), c))
    return torch.cat(out)


def attention():
    """Report the packed attention: gaps of outputs and gradients from float64, FLOP/s next to torch's dense kernels,
    and whether a repeated backward is equal."""
    from ppoctl.engines.megatron.attention import _per_piece, _varlen

    fix_varlen()
    kernel = _varlen if CUDA else _per_piece
    cases = [
        (4, 2, 64, (37, 1, 130), None, None),
        (7, 1, 128, (300, 5), None, None),
        (28, 4, 128, (257,), None, None),
        (4, 2, 128, (64, 64), (64, 512), None),
        (4, 4, 192, (129,), None, None),
        (8, 4, 256, (200, 33), None, None),
        (4, 2, 32, (99,), None, None),
        (4, 1, 256, (200, 33), None, 32),
        (4, 1, 256, (64, 64), (64, 512), 100),
    ]
    for heads, groups, dim, lengths, keys, window in cases:
        packed = _packed(lengths, keys)
        q = torch.randn(sum(lengths), heads, dim, device=DEV, dtype=BF16, requires_grad=True)
        fused = torch.randn(sum(keys or lengths), groups, 2 * dim, device=DEV, dtype=BF16, requires_grad=True)
        k, v = fused.split(dim, -1)  # as in the model: views of a fused projection
        out = kernel(q, k, v, packed, None, window)
        grad = torch.randn_like(out)
        found = torch.autograd.grad(out, (q, fused), grad)
        expected_out = _reference(q, k, v, packed, window)
        expected = torch.autograd.grad(expected_out, (q, fused), grad.double())
        notify(
            "attention",
            shape=(heads, groups, dim),
            lengths=lengths,
            keys=keys,
            window=window,
            out=gap(out, expected_out),
            grads=[gap(a, b) for a, b in zip(found, expected, strict=True)],
        )
    _alternatives(kernel)
    for heads, groups in ((28, 4), (7, 1)):
        backward, both_s = _attention_speed(kernel, heads, groups)
    if CUDA:  # equal inputs, equal bits?
        grads = [backward() for _ in range(2)]
        notify("attention", backward_repeats=[bool(torch.equal(x, y)) for x, y in zip(*grads, strict=True)])
        torch.use_deterministic_algorithms(True, warn_only=True)
        slow_s = seconds(backward)
        grads = [backward() for _ in range(2)]
        torch.use_deterministic_algorithms(False)
        notify(
            "attention",
            deterministic=[bool(torch.equal(x, y)) for x, y in zip(*grads, strict=True)],
            slower=round(slow_s / both_s, 2),
        )


def _attention_speed(kernel, heads, groups):
    """Report the FLOP/s of one long sequence. Return its forward and backward as a function, and their seconds."""
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
    notify("attention", tokens=n, heads=heads, **rounded)
    return backward, both_s


def _dense_speed(q, k, v, grad, flops):
    """Report the FLOP/s of torch's dense kernels on the same sequence, by backend, or why one does not run."""
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


def packed_alternatives():
    """Yield the name and a context of each other attention over packed sequences, which then replaces ours: the
    kernels that torch can call instead of FlashAttention 2, and cuDNN's."""
    from torch.nn import attention

    @contextmanager
    def active(name):
        attention.activate_flash_attention_impl(name)
        try:
            yield
        finally:
            attention.restore_flash_attention_impl()

    for name in ("FA3", "FA4"):  # FA4: pip install --no-deps flash-attn-4==4.0.0b18 torch-c-dlpack-ext
        yield name, active(name)
    yield "cuDNN", patch("torch.nn.attention.varlen.varlen_attn", _cudnn)


def _cudnn(q, k, v, *packing, scale, **_):
    """Compute causal attention by cuDNN, which aligns the first query with the first key. `packing`: boundaries and
    largest lengths of queries and keys."""
    return torch.ops.aten._cudnn_attention_forward(q, k, v, None, *packing, True, 0.0, True, False, scale=scale)[0]


def _alternatives(kernel):
    """Report gaps and speed of other kernels. One is worth using if it is right, and faster by a fifth."""
    n = 64 if TINY else 8192
    sizes = {"right": ((300, 5), 28, 4), "fast": ((n // 2, n // 2), 28, 4)}
    ours = None
    for name, context in [("ours", nullcontext()), *(packed_alternatives() if CUDA else ())]:
        try:
            with context:
                made = {use: _gaps_and_seconds(kernel, *size, check=use == "right") for use, size in sizes.items()}
        except Exception as error:  # noqa: BLE001 - a kernel that is not installed is a line of the table
            notify("attention", kernel=name, missing=f"{type(error).__name__}: {str(error)[:200]}")
            continue
        gaps, took = made["right"][0], made["fast"][1]
        ours = took if name == "ours" else ours
        faster = ours / took if ours is not None else 1.0
        is_right = max(gaps) <= MOST_GAP
        verdict = "wrong" if not is_right else "use it" if faster >= LEAST_GAIN else "keep ours"
        notify("attention", kernel=name, gaps=gaps, ms=round(took * 1e3, 2), faster=round(faster, 2), verdict=verdict)


def _gaps_and_seconds(kernel, lengths, heads, groups, *, check):
    """Return gaps of output and gradients from float64 (empty without `check`), and the seconds of both passes."""
    packed, total = _packed(lengths), sum(lengths)
    q, k, v = (
        torch.randn(total, h, 128, device=DEV, dtype=BF16, requires_grad=True) for h in (heads, groups, groups)
    )
    grad = torch.randn_like(q)

    def both():
        out = kernel(q, k, v, packed, None)
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    if not check:
        return (), seconds(both)
    expected = _reference(q, k, v, packed)
    exact = (expected, *torch.autograd.grad(expected, (q, k, v), grad.double()))
    return [gap(a, b) for a, b in zip(both(), exact, strict=True)], 0.0


def addmm_in_float32(grad_weight, grads, inputs):
    """Add grads^T @ inputs to a float32 gradient in one product (torch >= 2.8, CUDA)."""
    if grad_weight.dtype == inputs.dtype or not CUDA:
        grad_weight.add_((grads.t().float() @ inputs.float()).to(grad_weight.dtype))
    else:
        torch.addmm(grad_weight, grads.t(), inputs, out_dtype=torch.float32, out=grad_weight)


def logprobs():
    """Report log-probs of a large vocabulary by chunk size, with plain and fused arithmetic."""
    from ppoctl.core.ports import OutputRequest
    from ppoctl.engines.megatron.logit_blocks import LogprobSettings
    from ppoctl.engines.megatron.output_logprobs import token_logprobs

    n, hidden_size, vocab = (64, 32, 97) if TINY else (8192, 3584, 152064 // 4)
    hidden = torch.randn(n, hidden_size, device=DEV, dtype=BF16, requires_grad=True)
    weight = (torch.randn(vocab, hidden_size, device=DEV) * 0.02).to(BF16).requires_grad_()
    targets = torch.randint(0, vocab, (n,), device=DEV)
    grad = torch.randn(n, device=DEV)
    few = slice(0, 256)
    exact = (hidden[few].double() @ weight.double().t()).log_softmax(-1).gather(1, targets[few, None])[:, 0]
    plain = None
    for chunk in (1024, 4096, 8192):
        for how in ("plain", "fused"):
            weight.main_grad = torch.zeros(weight.shape, device=DEV)
            settings = LogprobSettings(OutputRequest(entropy=True), chunk, fused=how == "fused")

            def both(settings=settings):
                found = token_logprobs(hidden, weight, targets, settings)
                (of_hidden,) = torch.autograd.grad(grad @ found.outputs + 0.01 * found.entropy.sum(), hidden)
                return found.outputs, of_hidden

            both()
            once = weight.main_grad.clone()
            found, of_hidden = both()
            plain = of_hidden if how == "plain" else plain
            took = seconds(both, repeats=3, warm=0)
            notify(
                "logprobs",
                chunk=chunk,
                how=how,
                ms=round(took * 1e3, 2),
                gap=float((found[few] - exact).abs().max()),
                share_of_matmul_time=round(8 * n * vocab * hidden_size / took / 7.5e14, 2),
                grads=[gap(of_hidden, plain)],
                main_grad_norm=float(once.norm()),
            )


def capped():
    """Report Gemma's attention with a cap and a window: plain formulas, and FlexAttention."""
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
    notify(
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
    notify(
        "capped",
        how="flex",
        ms=round(took * 1e3, 1),
        gap=gap(found, out),
        peak_gib=gib(torch.cuda.max_memory_allocated()),
    )


def experts():
    """Report the products of experts: one expert after the other, and torch's grouped products."""
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
        notify(
            "experts", how=name, ms=round(took * 1e3, 2), tflops=round(flops / took / 1e12, 1), gap=gap(run(), loop())
        )
