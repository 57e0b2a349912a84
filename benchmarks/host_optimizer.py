"""CPU seconds of an update with the optimizer on the CPU, over one with the optimizer on the device.

    PYTHONPATH=src python benchmarks/host_optimizer.py [--rounds 7] [--threads 1]

Two actors of 10M parameters take updates in turn, once with 32 tokens, of which the optimizer step is a large part,
and once with 4,096. Prints the least seconds of all rounds and their ratio, for both dtypes. On a machine without a
GPU both kinds have their state in host memory, so the ratio shows what the copies between gradients, staging memory
and weights add, and not the time on a bus, nor the time of a step on a GPU.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from saves import RESPONSE, STEP, Objective, model_of_10m, sequences

from ppoctl.algorithms.role_table import ByTokens
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import Minibatch
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import ThisProcess
from ppoctl.engines.megatron.trainer import MegatronActor


def short() -> Sequences:
    """Return one sequence of 32 tokens."""
    tokens = torch.randint(1, 4096, (32,)).int()
    return Sequences(tokens[:8], torch.tensor([8]), tokens[None, 8:], torch.tensor([24]))


def actors_of(folder: Path, dtype: torch.dtype) -> dict[str, MegatronActor]:
    settings = TrainerSettings("actor", str(folder), dtype, ByTokens(max_tokens_per_microbatch=2048))
    found = {}
    for place in ("device", "cpu"):
        made = replace(settings, optimizer_on=place)
        found[place] = MegatronActor(made, ThisProcess(MegatronRank(made)))
        found[place].start()
    return found


def least_cpu_seconds(actors: dict[str, MegatronActor], data: Sequences, rounds: int) -> dict[str, float]:
    objective = Objective()
    batch = Minibatch(torch.arange(data.num_seqs), (data.num_seqs * RESPONSE,), STEP)
    found = dict.fromkeys(actors, float("inf"))
    for _ in range(rounds):
        for place, actor in actors.items():
            started = time.process_time()
            actor.update(data, [batch], objective)
            found[place] = min(found[place], time.process_time() - started)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = model_of_10m(Path(name))
        for dtype in (torch.float32, torch.bfloat16):
            actors = actors_of(folder, dtype)
            for data in (short(), sequences()):
                seconds = least_cpu_seconds(actors, data, arguments.rounds)
                tokens = int(data.prompt_lengths.sum() + data.lengths.sum())
                print(
                    f"{dtype}, {tokens:5,} tokens: device {seconds['device']:.3f} s, cpu {seconds['cpu']:.3f} s, "
                    f"ratio {seconds['cpu'] / seconds['device']:.2f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
