"""Sequence lengths as in real runs: GSM8K rows, and long-tailed lengths truncated at a window."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from ppoctl.models.cost import TokenCost

LLAMA_7B = TokenCost.of_decoder(parameters=6_607_077_376, num_layers=32, num_heads=32, head_dim=128)
GSM8K_WINDOW = 512
PIECES = re.compile(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]")
LOGNORMALS = ((6.0, 0.6, 4096), (6.0, 1.0, 4096), (6.5, 1.0, 32768), (7.0, 1.5, 32768))
"""Mean and standard deviation of the logarithm, window."""
PARETOS = ((1.1, 4096), (1.1, 32768), (1.1, 131072), (1.5, 8192), (1.5, 32768), (2.0, 32768))
"""Exponent of the tail, window; the shortest has 200 tokens."""


def gsm8k(data: Path) -> Int[Tensor, " L"]:
    """Return question and answer lengths of each row, in words, digits and signs: about the tokens of a current
    tokenizer."""
    rows = map(json.loads, (data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines())
    lengths = [len(PIECES.findall(row["question"] + row["answer"])) for row in rows]
    return torch.tensor(lengths).clamp(max=GSM8K_WINDOW)


def distributions(num_seqs: int, seed: int, data: Path) -> Iterator[tuple[str, int, Int[Tensor, " M"]]]:
    """Return (name, window, lengths of `num_seqs` sequences), equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    real = gsm8k(data)
    yield "gsm8k", GSM8K_WINDOW, real[torch.randint(len(real), (num_seqs,), generator=generator)]
    for mean, deviation, window in LOGNORMALS:
        sampled = torch.exp(mean + deviation * torch.randn(num_seqs, generator=generator, dtype=torch.float64))
        yield f"lognormal {mean} {deviation} to {window}", window, sampled.clamp(8, window).long()
    for exponent, window in PARETOS:
        uniform = torch.rand(num_seqs, generator=generator, dtype=torch.float64)
        sampled = 200 * (1 - uniform) ** (-1 / exponent)
        yield f"pareto {exponent} to {window}", window, sampled.clamp(max=window).long()
