"""The fraction of the machine's matmul rate that the updates of actor and critic reach.

    PYTHONPATH=src python benchmarks/roofline.py [--dtype bfloat16] [--threads 2] [--target 0.5] [--cpu-time]

Counts the multiplications and additions of matrix products and attention that an update needs: forward once, backward
twice that; the causal half of attention; the language model's head only at the positions read. Does not count
embedding look-ups, recomputed logits, elementwise operations and the optimizer; their time counts, so they lower the
fraction. The reference is the best matmul rate of the same run. Exit 1 below `--target`, or if a fraction exceeds 1,
which would be a counting error.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from ppoctl.algorithms.role_table import ByTokens
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import Minibatch, OptimizerStep, OutputRequest, TokenOutputs, Totals
from ppoctl.engines.megatron.factory import DTYPES
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import ThisProcess
from ppoctl.engines.megatron.trainer import MegatronActor, MegatronCritic, MegatronTrainer

STEP = OptimizerStep(lr=1e-6, weight_decay=0.0, grad_clip=1.0, beta1=0.9, beta2=0.95, eps=1e-8)
LENGTHS = {"short": (24, 40, 400), "long": (24, 200, 1000)}
"""Number of sequences, and minimum and maximum of their tokens."""


clock: Callable[[], float] = time.perf_counter


@dataclass
class Objective:
    """A sum over all present tokens: the cheapest possible loss."""

    mask: Tensor
    request: OutputRequest

    def totals(self, rows: Tensor) -> Totals:
        return (int(self.mask[rows].sum()),)

    def __call__(self, rows: Tensor, outputs: TokenOutputs, totals: Totals) -> Tensor:
        total = (outputs.primary * self.mask[rows]).sum()
        return (total if outputs.entropy is None else total + outputs.entropy.sum()) / totals[0]


def model_of_50m(folder: Path, vocabulary: int) -> Qwen2Config:
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=640,
        intermediate_size=2560,
        num_hidden_layers=8,
        num_attention_heads=10,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return config


def made_up_sequences(count: int, shortest: int, longest: int, vocabulary: int) -> Sequences:
    """Return sequences of which a quarter is prompt."""
    generator = torch.Generator().manual_seed(0)
    totals = torch.randint(shortest, longest + 1, (count,), generator=generator)
    prompts = totals // 4
    lengths = totals - prompts
    present = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    return Sequences(
        prompt_tokens=torch.randint(0, vocabulary, (int(prompts.sum()),), generator=generator).int(),
        prompt_lengths=prompts,
        tokens=(torch.randint(0, vocabulary, tuple(present.shape), generator=generator) * present).int(),
        lengths=lengths,
    )


def update_flops(config: Qwen2Config, sequences: Sequences, head_width: int) -> int:
    """Return the FLOPs of one forward and backward over all rows, with an output layer of `head_width` numbers."""
    hidden, ffn = config.hidden_size, config.intermediate_size
    head_dim = hidden // config.num_attention_heads
    qkv = hidden * (config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
    per_token = 2 * (qkv + hidden * hidden + 3 * hidden * ffn)
    inputs = sequences.prompt_lengths + sequences.lengths - 1
    # Token i attends to i + 1 tokens, once for the scores and once for the values.
    attention = 2 * 2 * hidden * int((inputs * (inputs + 1) // 2).sum())
    layers = config.num_hidden_layers * (per_token * int(inputs.sum()) + attention)
    head = 2 * hidden * head_width * int(sequences.lengths.sum())
    return 3 * (layers + head)


def best_time_s(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        synchronize()
        started = clock()
        run()
        synchronize()
        times.append(clock() - started)
    return min(times)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the best FLOP/s over a few sizes."""
    sizes = (1024, 2048, 3072) if device.type == "cpu" else (4096, 8192)
    rates = []
    for size in sizes:
        one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        torch.mm(one, other)
        rates.append(2 * size**3 / best_time_s(lambda a=one, b=other: torch.mm(a, b), 8))
    return max(rates)


@dataclass(frozen=True)
class Case:
    """One kind of update on one set of sequences."""

    name: str
    trainer: MegatronTrainer
    head_width: int
    needs_entropy: bool


def cases(folder: Path, config: Qwen2Config, args: argparse.Namespace, device: torch.device) -> list[Case]:
    def started(role: str, made: type[MegatronTrainer]) -> MegatronTrainer:
        batching = ByTokens(max_tokens_per_microbatch=args.max_tokens)
        settings = TrainerSettings(role, str(folder), DTYPES[args.dtype], batching, device=str(device))
        trainer = made(settings, ThisProcess(MegatronRank(settings)))
        trainer.start()
        return trainer

    actor, critic = started("actor", MegatronActor), started("critic", MegatronCritic)
    return [
        Case("actor", actor, config.vocab_size, needs_entropy=False),
        Case("actor+entropy", actor, config.vocab_size, needs_entropy=True),
        Case("critic", critic, 1, needs_entropy=False),
    ]


def measured_fraction(
    case: Case, kind: str, config: Qwen2Config, args: argparse.Namespace, device: torch.device
) -> float:
    """Print a line; return the fraction of the best matmul rate before and after."""
    sequences = made_up_sequences(*LENGTHS[kind], config.vocab_size)
    objective = Objective(sequences.present, OutputRequest(entropy=case.needs_entropy))
    rows = torch.arange(sequences.num_seqs)
    batch = [Minibatch(rows, objective.totals(rows), STEP)]
    dtype = getattr(torch, args.dtype)
    case.trainer.update(sequences, batch, objective)  # memory is touched for the first time
    peak = matmul_rate(dtype, device)
    seconds = best_time_s(lambda: case.trainer.update(sequences, batch, objective), args.repeats)
    peak = max(peak, matmul_rate(dtype, device))
    tokens = int((sequences.prompt_lengths + sequences.lengths - 1).sum())
    rate = update_flops(config, sequences, case.head_width) / seconds
    print(
        f"{case.name:>14} {kind:>6}: {tokens:6d} tokens, {seconds:7.3f} s, {tokens / seconds:9.0f} tokens/s, "
        f"{rate / 1e9:8.1f} of {peak / 1e9:8.1f} GFLOP/s, share {rate / peak:.3f}",
        flush=True,
    )
    return rate / peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--max-tokens", type=int, default=4096, help="per microbatch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.5, help="smallest share of the matmul rate")
    parser.add_argument("--cpu-time", action="store_true", help="CPU seconds of one thread, on a machine others use")
    args = parser.parse_args()
    if args.cpu_time:
        global clock
        clock, args.threads = time.process_time, 1
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as name:
        config = model_of_50m(Path(name), args.vocabulary)
        shares = [
            measured_fraction(case, kind, config, args, device)
            for case in cases(Path(name), config, args, device)
            for kind in LENGTHS
        ]
    if not all(args.target <= share <= 1.0 for share in shares):
        sys.exit(f"a share is outside {args.target} to 1")


if __name__ == "__main__":
    main()
