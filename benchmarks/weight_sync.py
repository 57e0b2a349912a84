"""Seconds to bring an engine in another process to a state, by kind of transfer.

    PYTHONPATH=src python benchmarks/weight_sync.py [--rounds 5]

A model of 14M parameters on an actor of two tensor ranks and an engine, each a process of a Ray on this machine.
Seconds from the call of the trainer until the engine has loaded everything (without the verification), the least of
several alternating rounds, in buckets of 8 MiB:

- passing: the engine reads memory of the sending rank, which is then reused, so nothing is published;
- shared: memory that the rank keeps for engines that die (`cluster.weights = "shared"`);
- store: a rank puts buckets into the object store, where they last while the driver refers to them
  (`cluster.weights = "store"`);
- driver: as store, but the driver takes each bucket out, checksums it, packs it and puts it in again, as earlier
  versions did;
- broadcast: over a gloo process group, and nothing is published;
- published: as broadcast, with a lasting copy (`cluster.weights = "broadcast"`);
- restored: a published state into the engine, without the trainer.

Prints them as multiples of the first.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray
from machinery import RECIPE

from ppoctl.core.batch.records import State
from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.engines.megatron.trainer import MegatronActor, trainer_side
from ppoctl.engines.ray.ray_worker import InStore
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.engines.weights.bucket import Bucket, bucket_of, flatten
from ppoctl.engines.weights.canary import Canary
from ppoctl.engines.weights.engine_calls import call_engines
from ppoctl.engines.weights.sending import PARTS, SenderRanks
from ppoctl.engines.weights.sync import BroadcastWay, Sync, hand_over
from ppoctl.recipe.loading.load import load
from ppoctl.run.wire.placed_processes import Placed, place

STATE = State("actor", 0, 0, "benchmark")


SHAPE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
WAY = BroadcastWay(lambda: "127.0.0.1", timeout_s=300.0, engine_ranks=1)


def write_model(folder: Path) -> int:
    """Write a random model; return its number of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    source = RECIPE.parent / "quickstart/model"
    config = Qwen2Config.from_pretrained(source, **SHAPE, num_key_value_heads=2, vocab_size=4096)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def through_the_driver(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    for bucket in buckets:
        tensors = [(name, tensor.clone()) for name, tensor in bucket.tensors()]
        yield bucket_of(tensors, InStore(ray.put(flatten(tensors))))


def timed(engine: Any, work: Callable[[], object]) -> float:
    """Return the seconds of the transfer alone."""
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    call_engines([engine], "end_weights")
    return seconds


def run(folder: Path, rounds: int) -> dict[str, float]:
    changes = [
        f"model.path={folder / 'model'}",
        "actor.parallel={tensor=2}",
        "critic.parallel={}",
        "cluster={threads=1, placement='apart', weights='shared', weights_bucket_mib=8}",
    ]
    recipe = load([RECIPE], changes).recipe
    of_actor, of_critic = (trainer_settings(recipe, role) for role in ("actor", "critic"))
    placed: Placed = place(recipe, of_actor, of_critic)
    actor = MegatronActor(of_actor, placed.actor)
    settings = VllmSettings(str(folder / "model"), "float32", 128, (1,), recipe.generator)
    hosts = placed.generator(settings, print)
    engine = hosts.engines[0]
    sync = Sync(trainer_side(actor, lambda _: actor), hosts, Canary.of("float32", 128, tolerance=None))
    try:
        actor.start()
        weights = actor.weights(STATE)
        source: Any = placed.actor.weights()
        [groups] = source.pipeline_ranks
        passing = SenderRanks(sharing=frozenset(groups[0][:1]))
        published: list[Bucket] = []

        def broadcast_and_keep() -> None:
            sync.broadcast([engine], weights, WAY)
            published[:] = weights.to_keep(PARTS)

        ways: dict[str, Callable[[], object]] = {
            "passing": lambda: hand_over([engine], source._handed_out(groups, passing)),
            "shared": lambda: hand_over([engine], weights.buckets(PARTS)),
            "store": lambda: hand_over([engine], source.buckets()),
            "driver": lambda: hand_over([engine], through_the_driver(source.buckets())),
            "broadcast": lambda: sync.broadcast([engine], weights, WAY),
            "published": broadcast_and_keep,
            "restored": lambda: hand_over([engine], published),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):  # the first round starts everything
            for name, work in ways.items():
                found[name].append(timed(engine, work))
        return {name: min(seconds[1:]) for name, seconds in found.items()}
    finally:
        placed.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = write_model(folder / "model")
        found = run(folder, rounds)
    print(f"{parameters / 1e6:.1f}M parameters, float32")
    for way, seconds in found.items():
        print(f"{way:<10} {seconds * 1e3:6.0f} ms  {seconds / found['passing']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
