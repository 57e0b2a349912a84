"""Memory and time of chunked log-probs (forward and backward), compared with the plain formula.

    PYTHONPATH=src python benchmarks/logits_chunk.py [--tokens 4096] [--vocabulary 152064] [--hidden 896] [--plain]

Each case runs in a separate process and reports the peak above inputs, weight and gradient buffer: on CPU the sampled
resident set; on GPU the allocator's peak.
"""

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch import Tensor


def peak_above_start(run: object, device: torch.device) -> float:
    """Return the peak MiB that `run` needed."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - start) / 2**20
    done, peak = threading.Event(), [0]

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident_bytes())
            time.sleep(0.002)

    start = resident_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    run()
    done.set()
    watcher.join()
    return (peak[0] - start) / 2**20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0]


def one_case(args: argparse.Namespace) -> None:
    from ppoctl.core.ports import OutputRequest
    from ppoctl.engines.megatron.logit_blocks import LogprobSettings
    from ppoctl.engines.megatron.output_logprobs import FrozenOutputs, token_logprobs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocabulary, args.hidden, device=device) * 0.02).to(dtype).requires_grad_()
    weight.main_grad = torch.zeros(args.vocabulary, args.hidden, device=device).add_(1)
    targets = torch.randint(0, args.vocabulary, (args.tokens,), device=device)

    frozen = FrozenOutputs(hidden.detach() * 0.9, weight.detach() * 1.1) if args.full_kl else None
    request = OutputRequest(top_p=args.top_p, entropy=args.entropy, full_kl=args.full_kl)

    def run() -> None:
        if args.chunk == 0:
            plain(hidden, weight, targets).sum().backward()
            return
        found = token_logprobs(hidden, weight, targets, LogprobSettings(request, args.chunk), None, frozen)
        sum(one.sum() for one in found if one is not None).backward()

    # Warm up on a few tokens: libraries allocate their own buffers once.
    few = None if frozen is None else frozen._replace(hidden=frozen.hidden[:8])
    token_logprobs(hidden[:8], weight, targets[:8], LogprobSettings(request, 8), None, few).outputs.sum().backward()
    started, started_cpu = time.perf_counter(), time.process_time()
    peak = peak_above_start(run, device)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    chunk_mib = (args.chunk or args.tokens) * args.vocabulary * hidden.element_size() / 2**20
    name = f"chunks of {args.chunk}" if args.chunk else "plain"
    timing = f"{seconds:6.2f} s ({cpu_seconds:.2f} CPU s)"
    print(f"{name:>16}: {timing}, peak {peak:7.0f} MiB, one chunk of logits {chunk_mib:6.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--entropy", action="store_true", help="also the entropy and its gradient")
    parser.add_argument("--full-kl", action="store_true", help="also KL from a reference and its gradient")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the likeliest ids with this share alone")
    parser.add_argument("--plain", action="store_true", help="also the plain formula (needs many GiB)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--chunk", type=int, help="one case, in this process; 0 is the plain formula")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.chunk is not None:
        one_case(args)
        return
    sizes = f"{args.tokens} tokens, vocabulary {args.vocabulary}, hidden {args.hidden}, {args.dtype}"
    print(f"{sizes}, forward + backward", flush=True)
    for chunk in ([0] if args.plain else []) + [256, 1024]:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--chunk", str(chunk)], check=True)


if __name__ == "__main__":
    main()
