"""How evenly `ppoctl.engines.megatron.balance` splits rows over 64 data-parallel ranks, and how long the split takes.

    python benchmarks/balance.py [--seqs 2048 16384] [--ranks 64]

For each distribution of lengths and each way to split: the slowest rank's work divided by the larger of the mean load
and the longest sequence (1 is the lower bound), and the best seconds of three runs. Work is that of a 7B decoder,
including attention. Real GSM8K rows are measured if PPOCTL_DATA names a folder with gsm8k/train.jsonl.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ppoctl.engines.megatron.balance import balance, sequence_costs
from ppoctl.engines.megatron.packing import by_tokens
from ppoctl.models.cost import TokenCost

LLAMA_7B = TokenCost.of_decoder(parameters=6_607_077_376, num_layers=32, num_heads=32, head_dim=128)
LOGNORMALS = ((6.0, 0.6, 4096), (6.0, 1.0, 4096), (6.5, 1.0, 32768), (7.0, 1.5, 32768))
PARETOS = ((1.1, 4096), (1.1, 32768), (1.5, 8192), (1.5, 32768), (2.0, 32768))
PIECES = re.compile(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]")
NUM_ROUNDS = 3


def distributions(num_seqs: int) -> Iterator[tuple[str, int, Tensor]]:
    """Yield (name, window, lengths)."""
    generator = torch.Generator().manual_seed(0)
    if folder := os.environ.get("PPOCTL_DATA"):
        lines = (Path(folder) / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        lengths = torch.tensor(
            [len(PIECES.findall(row["question"] + row["answer"])) for row in map(json.loads, lines)]
        )
        yield "gsm8k", 512, lengths.clamp(max=512)[torch.randint(len(lengths), (num_seqs,), generator=generator)]
    for mean, deviation, window in LOGNORMALS:
        sampled = torch.exp(mean + deviation * torch.randn(num_seqs, generator=generator, dtype=torch.float64))
        yield f"lognormal {mean} {deviation} to {window}", window, sampled.clamp(8, window).long()
    for exponent, window in PARETOS:
        sampled = 200 * (1 - torch.rand(num_seqs, generator=generator, dtype=torch.float64)) ** (-1 / exponent)
        yield f"pareto {exponent} to {window}", window, sampled.clamp(max=window).long()


def contiguous(costs: Tensor, ranks: int) -> list[Tensor]:
    return list(torch.arange(len(costs)).tensor_split(ranks))


def round_robin(costs: Tensor, ranks: int) -> list[Tensor]:
    return [torch.arange(rank, len(costs), ranks) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description="How even data-parallel ranks are.")
    parser.add_argument("--seqs", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--ranks", type=int, default=64)
    arguments = parser.parse_args()
    splits: dict[str, Callable[[Tensor, int], list[Tensor]]] = {
        "contiguous": contiguous,
        "round robin": round_robin,
        "balance": balance,
    }
    print(f"{'slowest of ' + str(arguments.ranks) + ' ranks':<36}" + "".join(f"{name:>20}" for name in splits))
    for num_seqs in arguments.seqs:
        for name, window, tokens in distributions(num_seqs):
            costs = sequence_costs(tokens, LLAMA_7B)
            bound = max(float(costs.sum()) / arguments.ranks, float(costs.max()))
            line = f"{num_seqs:>6} {name:<29}"
            for split in splits.values():
                best_s = float("inf")
                for _ in range(NUM_ROUNDS):
                    start_s = time.perf_counter()
                    shares = split(costs, arguments.ranks)
                    best_s = min(best_s, time.perf_counter() - start_s)
                line += f"{max(float(costs[share].sum()) for share in shares) / bound:>11.4f} {best_s:>6.3f} s"
            bins, cap = len(by_tokens(torch.arange(num_seqs), tokens, 2 * window)), 2 * window
            print(f"{line}   {bins} microbatches of {cap} tokens, {-(int(tokens.sum()) // -cap)} needed")


if __name__ == "__main__":
    main()
