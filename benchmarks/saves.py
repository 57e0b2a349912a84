"""Seconds that training waits for a saved state: synchronous and background saves.

    PYTHONPATH=src python benchmarks/saves.py [--rounds 5] [--threads 1] [--target 2]

One actor of 10M parameters, bfloat16 with float32 main weights and moments (140 MB on disk). Each round times an
update alone, a save and an update, and a background save and an update, in this order. Prints the fastest of all
rounds (other users of the machine can only add time): how long each save blocks training, and what each adds to an
update in total, including the slower update during the writing and the wait for the rest at its end. Exit 1 if a
synchronous save blocks training for less than `--target` times as long.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from ppoctl.algorithms.role_table import ByTokens
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import Minibatch, OptimizerStep, OutputRequest, TokenOutputs, Totals
from ppoctl.engines.megatron.rank import MegatronRank
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.engines.megatron.ranks import ThisProcess
from ppoctl.engines.megatron.trainer import MegatronActor

STEP = OptimizerStep(lr=1e-6, weight_decay=0.0, grad_clip=1.0, beta1=0.9, beta2=0.95, eps=1e-8)
SEQUENCES, PROMPT, RESPONSE = 16, 32, 224


@dataclass
class Objective:
    """A sum over all tokens: the cheapest possible loss."""

    request: OutputRequest = field(default_factory=OutputRequest)

    def totals(self, rows: Tensor) -> Totals:
        return (len(rows) * RESPONSE,)

    def __call__(self, rows: Tensor, outputs: TokenOutputs, totals: Totals) -> Tensor:
        return (outputs.primary * (rows[:, None] >= 0)).sum() / totals[0]


def model_of_10m(folder: Path) -> Path:
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=320,
        intermediate_size=1024,
        num_hidden_layers=7,
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def sequences() -> Sequences:
    return Sequences(
        prompt_tokens=torch.randint(1, 4096, (SEQUENCES * PROMPT,)).int(),
        prompt_lengths=torch.full((SEQUENCES,), PROMPT),
        tokens=torch.randint(1, 4096, (SEQUENCES, RESPONSE)).int(),
        lengths=torch.full((SEQUENCES,), RESPONSE),
    )


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def save_and_update(actor: MegatronActor, update: Callable[[], object], folder: Path, *, in_background: bool) -> None:
    """Run until the update is done and the state is on disk."""
    folder.mkdir()
    saving = actor.save(folder, in_background=in_background)
    if not in_background:
        saving.finish()
    update()
    if in_background:
        saving.finish()


def measure(folder: Path, rounds: int) -> tuple[float, float, float, float]:
    """Return the least seconds of an update alone, of copying a state, and of what either save adds to an update."""
    batching = ByTokens(max_tokens_per_microbatch=2048)
    settings = TrainerSettings("actor", str(model_of_10m(folder / "model")), torch.bfloat16, batching)
    actor = MegatronActor(settings, ThisProcess(MegatronRank(settings)))
    actor.start()
    data, objective = sequences(), Objective()
    rows = torch.arange(SEQUENCES)
    batch = Minibatch(rows, objective.totals(rows), STEP)

    def update() -> object:
        return actor.update(data, [batch], objective)

    def save(*, in_background: bool) -> None:
        save_and_update(actor, update, folder / "state", in_background=in_background)
        shutil.rmtree(folder / "state")

    found: dict[str, list[float]] = {"alone": [], "copied": [], "waiting": [], "behind": []}
    for _ in range(rounds):
        found["alone"].append(timed(update))
        found["waiting"].append(timed(lambda: save(in_background=False)))
        found["behind"].append(timed(lambda: save(in_background=True)))
        (folder / "state").mkdir()
        started = time.perf_counter()
        saving = actor.save(folder / "state", in_background=True)
        found["copied"].append(time.perf_counter() - started)
        saving.finish()
        shutil.rmtree(folder / "state")
    alone, copied, waiting, background = (min(found[name]) for name in ("alone", "copied", "waiting", "behind"))
    return alone, copied, waiting - alone, background - alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--target", type=float, default=2.0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        alone, copied, waiting, background = measure(Path(name), arguments.rounds)
    print(f"update alone {alone:.2f} s")
    print(f"a save that training waits for holds it {waiting:.2f} s")
    print(f"a save behind training holds it {copied:.2f} s, {waiting / copied:.1f} times less")
    print(f"and adds {background:.2f} s in all")
    return 0 if waiting / copied >= arguments.target else 1


if __name__ == "__main__":
    sys.exit(main())
