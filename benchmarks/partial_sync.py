"""Seconds and bytes of a weight transfer of which only the last layers changed, over those of a complete transfer.

    PYTHONPATH=src python benchmarks/partial_sync.py [--rounds 5] [--top-layers 2]

A model of 25M parameters (100 MB, float32) on an actor in this process, and a vLLM engine in a child process, as in a
job without Ray (`cluster.weights = "shared"`). A transfer includes its verification: all weights of the engine are
read back and compared, and both sides score the canary. Before a complete transfer, the engine sleeps, so that it
must get everything. Complete and partial transfers alternate. Prints the least seconds of each, their parts, and the
ratios."""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from machinery import RECIPE

from ppoctl.core.batch.records import State
from ppoctl.engines.megatron.factory import trainer_settings
from ppoctl.engines.megatron.trainer import MegatronActor, trainer_side
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.engines.weights.bucket import Bucket
from ppoctl.engines.weights.canary import Canary
from ppoctl.engines.weights.engine_calls import call_engines
from ppoctl.engines.weights.sync import Sync
from ppoctl.models.trainable import Trainable
from ppoctl.recipe.loading.load import load
from ppoctl.run.wire.placed_processes import place

SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}


def write_model(folder: Path) -> int:
    """Write a random model; return its number of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    source = RECIPE.parent / "quickstart/model"
    config = Qwen2Config.from_pretrained(source, **SHAPE, num_key_value_heads=2, vocab_size=4096)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


class Timed:
    """Seconds and bytes of the transfers of one kind."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.loading: list[float] = []
        self.bytes = 0

    def run(self, sync: Sync, actor: MegatronActor, engine: Any, number: int) -> None:
        """Transfer a state, and record the seconds until the engine has loaded the last bucket and in total."""
        state = State("actor", number, number, f"state {number}")
        side = trainer_side(actor, lambda _: actor)(state)
        named, sent = side.weights(), list[Bucket]()

        def buckets(parts: Any) -> Iterator[Bucket]:
            for bucket in named.buckets(parts):
                sent.append(bucket)
                yield bucket
            self.loading.append(time.perf_counter() - started)

        started = time.perf_counter()
        sync.prepare([engine], replace(side, weights=lambda: replace(named, buckets=buckets)), state)
        self.seconds.append(time.perf_counter() - started)
        self.bytes = sum(tensor.nbytes for bucket in sent for _, tensor in bucket.tensors())


def run(folder: Path, rounds: int, top_layers: int) -> dict[str, Timed]:
    changes = [
        f"model.path={folder / 'model'}",
        f"actor.train={{top_layers={top_layers}}}",
        "cluster={threads=1, weights='shared', weights_bucket_mib=8}",
    ]
    recipe = load([RECIPE], changes).recipe
    settings = {role: trainer_settings(recipe, role) for role in recipe.trained}
    assert settings["actor"].trainable == Trainable(top_layers)
    placed = place(recipe, settings)
    actor = MegatronActor(settings["actor"], placed.trained["actor"])
    side = placed.generator(VllmSettings(str(folder / "model"), "float32", 128, (1,), recipe.generator), print)
    [engine] = side.engines
    sync = Sync(trainer_side(actor, lambda _: actor), side, Canary.of("float32", 128, tolerance=None))
    found = {"complete": Timed(), "partial": Timed()}
    sleep: Callable[[], object] = lambda: call_engines([engine], "sleep")  # noqa: E731
    try:
        actor.start()
        for number in range(rounds + 1):  # the first round starts everything
            if number:
                sleep()
            found["complete"].run(sync, actor, engine, 2 * number)
            found["partial"].run(sync, actor, engine, 2 * number + 1)
        return found
    finally:
        engine.close()
        placed.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--top-layers", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = write_model(folder / "model")
        found = run(folder, arguments.rounds, arguments.top_layers)
    print(f"{parameters / 1e6:.1f}M parameters, float32; the last {arguments.top_layers} of 8 layers change")
    for kind, timed in found.items():
        print(
            f"{kind:<9} {timed.bytes / 1e6:6.1f} MB, {min(timed.seconds[1:]) * 1e3:6.0f} ms, of which "
            f"{min(timed.loading[1:]) * 1e3:6.0f} ms until the last bucket"
        )
    whole, part = found["complete"], found["partial"]
    ratios = [part.bytes / whole.bytes, *(min(of_part[1:]) / min(of_whole[1:]) for of_part, of_whole in (
        (part.seconds, whole.seconds), (part.loading, whole.loading)
    ))]  # fmt: skip
    print("partial / complete: bytes {:.2f}, seconds {:.2f}, until the last bucket {:.2f}".format(*ratios))
    return 0


if __name__ == "__main__":
    sys.exit(main())
