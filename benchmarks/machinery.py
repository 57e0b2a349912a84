"""The cost of a step besides the engines' own work, and the cost of new weights for the generator.

    PYTHONPATH=src python benchmarks/machinery.py [--steps 3] [--threads 2]

The quickstart's recipe with a model of 10M parameters. Three ratios of one run, each the least over the steps (other
users of the machine can only add time):

- machinery: the fraction of a step that is in no engine (actor, critic, generator, scorer), target 5 %;
- commits: the fraction of a step in which stages are written and published, target 2 %;
- sync: seconds of sending weights from the trainer and loading them, divided by those of a plain copy of the same
  tensors, target 3 (half of it and more is the packing of vLLM's CPU kernels, which cannot be shortened here); and
  next to it the verification (checksums on both sides, packed weights read back, canary).

Exit 1 if a target is missed.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from ppoctl.algorithms.stages import reward as reward_module
from ppoctl.engines.weights import sync as sync_module
from ppoctl.engines.weights.bucket import Bucket, tensors_of
from ppoctl.recipe.loading.load import load
from ppoctl.run import new_run, session
from ppoctl.store import artifact
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths

RECIPE = Path(__file__).parents[1] / "recipes/quickstart.toml"
SHAPE = {"hidden_size": 320, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 5}


@dataclass
class Clock:
    """Seconds by name; a nested block is counted once, in the outer one."""

    seconds: dict[str, float] = field(default_factory=dict)
    inside: bool = False

    @contextmanager
    def of(self, name: str, *, nested: bool = False) -> Iterator[None]:
        if self.inside and not nested:
            yield
            return
        before, self.inside = self.inside, True
        started = time.perf_counter()
        try:
            yield
        finally:
            self.inside = before
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def wrap(self, owner: Any, attribute: str, name: str, *, nested: bool = False) -> None:
        inner = getattr(owner, attribute)

        def timed(*arguments: Any, **settings: Any) -> Any:
            with self.of(name, nested=nested):
                return inner(*arguments, **settings)

        setattr(owner, attribute, timed)


class TimedGenerator:
    """Counts the time in which samples are generated, but not that in which they are handled."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self.inner = inner
        self.clock = clock

    def prepare(self, state: Any) -> None:
        with self.clock.of("engines"):
            self.inner.prepare(state)

    def open(self, params: Any) -> Any:
        stream = self.inner.open(params)
        for method in ("submit", "finished"):
            self.clock.wrap(stream, method, "engines")
        return stream

    def close(self) -> None:
        self.inner.close()


@dataclass
class Steps:
    """An observer: duration of each step, and the clock's part of it."""

    clock: Clock
    started: float = 0.0
    rows: list[dict[str, float]] = field(default_factory=list)

    def on_stage(self, step: int, stage: str) -> None:  # noqa: ARG002 - an observer's signature
        if stage == "rollout":
            self.started = time.perf_counter()
            self.clock.seconds.clear()

    def on_moment(self, step: int, stage: str, moment: str) -> None:
        pass

    def on_progress(self, done: int, total: int, tokens: int) -> None:
        pass

    def on_committed(self, line: Any) -> None:
        if line["stage"] == "actor_update":
            self.rows.append({**self.clock.seconds, "step": time.perf_counter() - self.started})


def write_model(folder: Path) -> int:
    """Write a larger random version of the quickstart's model; return its number of parameters."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    source = RECIPE.parent / "quickstart/model"
    config = Qwen2Config.from_pretrained(source, **SHAPE, num_key_value_heads=1, vocab_size=4096)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def plain_copy(buckets: Iterable[Bucket]) -> float:
    """Return the least seconds of cloning the sent tensors."""
    tensors = [tensor for _, tensor in tensors_of(buckets)]
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        copies = [tensor.clone() for tensor in tensors]
        best = min(best, time.perf_counter() - started)
        del copies
    return best


def run(folder: Path, steps: int, threads: int) -> tuple[list[dict[str, float]], float]:
    changes = [f"model.path={folder / 'model'}", f"steps={steps}", "name=machinery", "tracking={kind='none'}"]
    recipe = load([RECIPE], [*changes, f"cluster={{threads={threads}}}"]).recipe
    clock = Clock()
    steps_seen = Steps(clock)
    components, digests = session.prepare(recipe, datetime.now())
    for trainer in components.trainers.values():
        for method in ("start", "update", "logprobs", "reference_logprobs", "values"):
            if hasattr(trainer, method):
                clock.wrap(trainer, method, "engines")
    clock.wrap(reward_module, "score_all", "engines")
    clock.wrap(artifact, "commit", "commits", nested=True)
    clock.wrap(sync_module, "hand_over", "sync", nested=True)
    clock_asked(clock)
    clock.wrap(sync_module, "require_equal", "proof", nested=True)
    clock.wrap(sync_module.Sync, "_checked", "proof", nested=True)
    make = components.generator
    timed = replace(
        components, generator=lambda actor_at, notify, logs: TimedGenerator(make(actor_at, notify, logs), clock)
    )
    paths = RunPaths(folder / "run")
    new_run.create(paths, recipe, digests, command="train")
    copies: list[float] = []
    clock_hand_over(copies)
    session.attempt_run(
        session.OpenedRun(paths, {1: recipe}, timed, plan_resume(RecordedRun(paths)), observers=(steps_seen,))
    )
    return steps_seen.rows, min(copies)


def clock_asked(clock: Clock) -> None:
    """Time the engine process's reading back of its weights."""
    inner = sync_module.call_engines

    def timed(engines: Any, method: str, *arguments: Any) -> Any:
        with clock.of("read back" if method == "end_weights" else "asked", nested=True):
            return inner(engines, method, *arguments)

    sync_module.call_engines = timed


def clock_hand_over(copies: list[float]) -> None:
    """Time a plain copy of the contents of each transfer, right before it."""
    inner = sync_module.hand_over

    def timed(engines: Any, buckets: Iterable[Bucket]) -> Any:
        sent = list(buckets)  # on a CPU all of them are lasting
        copies.append(plain_copy(sent))
        return inner(engines, sent)

    sync_module.hand_over = timed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = write_model(folder / "model")
        rows, copy = run(folder, options.steps, options.threads)
    print(f"{parameters / 1e6:.1f}M parameters, {options.threads} threads, copy of all weights {copy * 1e3:.1f} ms")
    for row in rows:
        print({name: round(seconds, 4) for name, seconds in row.items()})
    later = rows[1:]  # the first step starts the engines
    machinery = min((row["step"] - row["engines"]) / row["step"] for row in later)
    commits = min(row["commits"] / row["step"] for row in later)
    sync = min(row["sync"] for row in later) / copy
    proof = min(row["proof"] + row["read back"] for row in later) / copy
    print(f"machinery {machinery:.1%} of a step (target 5 %), commits {commits:.1%} (target 2 %)")
    print(f"weights into the engine {sync:.1f} times a plain copy (target 3)")
    print(f"the proof {proof:.1f} times")
    return 0 if machinery <= 0.05 and commits <= 0.02 and sync <= 3 else 1


if __name__ == "__main__":
    sys.exit(main())
