"""Generation of a rollout next to vLLM alone: tokens/s, milliseconds per engine step, and what a step consists of.

    python benchmarks/rollout_speed.py [--sequences 512] [--tokens 128] [--repeat 3] [--sides bare ours ...]

Each side runs in a new process, in turn, `--repeat` times; the median counts. All sides generate `--tokens` tokens
for each of `--sequences` prompts with one random seed per request, at temperature 1, and return the log-prob of every
token. Before the measured rollout, each generates a complete one.

    bare       vLLM's `LLM.generate`, in this process
    bare-flat  the same, with `flat_logprobs`
    bare-mp    the same, with vLLM's own process for its core (VLLM_ENABLE_V1_MULTIPROCESSING)
    ours       ppoctl's engine in a child process, through the fleet, as a run does
    ours-N     N engines that share the device, each with a part of the sequences

The split of a step comes from `bare-split` and `ours-split`, whose timers make them slower. Exit 1 if `ours` is
slower than 0.95 of `bare`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cpu_time import cpu_model, cpu_seconds_with_children

LEAST = 0.95
"""Smallest allowed ratio of `ours` to `bare`."""
PROMPT_TOKENS = 60
SIDE_LIMIT_S = 300.0
SIDES = ("bare", "bare-flat", "ours", "ours-2", "ours-3")
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
PARTS = {
    "schedule": ("scheduler", "schedule"),
    "model": ("model_executor", "execute_model"),
    "sampling": ("model_executor", "sample_tokens"),
    "scheduler's outputs": ("scheduler", "update_from_output"),
}
"""Part of a step -> the object of vLLM's core and its method."""


def make_model(folder: Path) -> None:
    """Write a Qwen2 of one layer with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=1000, num_hidden_layers=1, max_position_embeddings=4096, **SHAPE)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def prompts_of(args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return prompts that share no beginning."""
    vocab_size = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return [
        tuple((7 * index + 13 * place) % (vocab_size - 2) + 1 for place in range(PROMPT_TOKENS))
        for index in range(args.sequences)
    ]


def bare(args: argparse.Namespace, *, flat: bool = False, separate: bool = False, split: bool = False) -> Any:
    """Return the function that generates one rollout with vLLM's `LLM.generate`, and the times of the parts."""
    from ppoctl.engines.vllm.arguments import engine_arguments
    from ppoctl.engines.vllm.vllm_environment import prepare_environment

    settings = settings_of(args)
    prepare_environment(settings)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(separate))
    from vllm import LLM, SamplingParams

    own = {"worker_extension_cls", "weight_transfer_config"}  # of our weight transfer
    llm = LLM(**{name: value for name, value in engine_arguments(settings).items() if name not in own})
    parts = _timed(llm.llm_engine) if split else {}
    made = partial(SamplingParams, temperature=1.0, max_tokens=args.tokens, ignore_eos=True, logprobs=0)

    def rollout(first: int) -> int:
        asked = [
            made(seed=first + index, detokenize=False, flat_logprobs=flat) for index, _ in enumerate(prompts_of(args))
        ]
        prompts = [{"prompt_token_ids": list(prompt)} for prompt in prompts_of(args)]
        done = llm.generate(prompts, asked, use_tqdm=False)
        read = [_logprobs(output.outputs[0], flat=flat) for output in done]
        return sum(map(len, read))

    return rollout, parts


def _logprobs(completion: Any, *, flat: bool) -> list[float]:
    """Return the log-probs as numbers, which every user of samples needs."""
    if flat:
        return list(completion.logprobs.logprobs)
    return [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]


def settings_of(args: argparse.Namespace, engines: int = 1) -> Any:
    """Return the settings of an engine of all sides."""
    from ppoctl.engines.vllm.vllm_settings import VllmSettings
    from ppoctl.recipe.schema import GeneratorTable

    table = GeneratorTable(
        max_concurrent_seqs=args.sequences, kv_cache_mib=args.kv_cache_mib, engines_per_gpu=engines
    )
    return VllmSettings(args.model, args.dtype, PROMPT_TOKENS + args.tokens, (), table)


def ours(args: argparse.Namespace, engines: int = 1) -> Any:
    """Return the function that generates one rollout with ppoctl's fleet of engines."""
    from ppoctl.core.ports import SamplingParams
    from ppoctl.engines.child.process import first_done
    from ppoctl.engines.vllm.engine import GenerationRequest
    from ppoctl.engines.vllm.fleet import Fleet
    from ppoctl.engines.vllm.own_process import OwnProcess
    from ppoctl.engines.weights.sync import EngineSide

    settings = settings_of(args, engines)
    handles = [OwnProcess(settings, args.threads, number) for number in range(engines)]
    for handle in handles:
        handle.folder = args.model
    fleet = Fleet(EngineSide(handles, first_done), WeightsOfFolder(), settings.seqs_per_engine, print)  # type: ignore[arg-type]
    state: Any = State()
    fleet.prepare(state)
    params = SamplingParams(temperature=1.0, max_new_tokens=args.tokens)

    def rollout(first: int) -> int:
        fleet.open(params)
        fleet.submit(
            [
                GenerationRequest(f"{first}/{index}", prompt, first + index)
                for index, prompt in enumerate(prompts_of(args))
            ]
        )
        tokens = 0
        while done := fleet.finished():
            tokens += sum(len(one.finished.logprobs) for one in done)
        return tokens

    return rollout, {}


class State:
    """The state of the weights in the model's folder."""

    identity = "folder"
    replay = 0
    stamp = "folder"


class WeightsOfFolder:
    """In the place of a transfer: engines have read the weights from the model's folder when they started."""

    def trainer_at(self, _: Any) -> None:
        return None

    def prepare(self, engines: Sequence[Any], _: Any, state: Any) -> Any:
        from ppoctl.engines.weights.engine_calls import call_engines
        from ppoctl.engines.weights.sync import Published

        call_engines(engines, "vocab_size")
        return Published(state, (), None, (), None, (), Path("unused"), lambda: None)  # type: ignore[arg-type]


def ours_split(args: argparse.Namespace) -> Any:
    """Return the function that generates one rollout with ppoctl's engine in this process, and the times of the
    parts."""
    from ppoctl.core.ports import SamplingParams
    from ppoctl.engines.vllm.engine import Engine, GenerationRequest

    engine = Engine(settings_of(args), folder=args.model)
    parts = _timed(engine._llm)
    params = SamplingParams(temperature=1.0, max_new_tokens=args.tokens)

    def rollout(first: int) -> int:
        waiting = [
            GenerationRequest(f"{first}/{index}", prompt, first + index)
            for index, prompt in enumerate(prompts_of(args))
        ]
        tokens = count = 0
        while count < args.sequences:
            done = engine.advance(waiting, params)
            waiting = []
            count += len(done)
            tokens += sum(len(output.logprobs) for output in done)
        return tokens

    return rollout, parts


def _timed(llm: Any) -> dict[str, list[float]]:
    """Put a timer around each part of vLLM's engine step; return the seconds of all calls by part."""
    core, found = llm.engine_core.engine_core, dict[str, list[float]]()
    owners = {part: (getattr(core, owner), method) for part, (owner, method) in PARTS.items()}
    owners |= {"outputs": (llm.output_processor, "process_outputs"), "step": (llm, "step")}
    for part, (owner, method) in owners.items():
        setattr(owner, method, _timer(getattr(owner, method), found.setdefault(part, [])))
    return found


def _timer(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            into.append(time.perf_counter() - began)

    return call


def side(args: argparse.Namespace) -> dict[str, Any]:
    """Generate two rollouts, and return the seconds of the second one."""
    name, _, more = args.side.partition("-")
    if more == "split":
        rollout, parts = ours_split(args) if name == "ours" else bare(args, split=True)
    elif name == "ours":
        rollout, parts = ours(args, int(more or 1))
    else:
        rollout, parts = bare(args, flat=more == "flat", separate=more == "mp")
    rollout(1_000_000)
    for seconds in parts.values():
        seconds.clear()
    began, cpu = time.perf_counter(), cpu_seconds_with_children()
    tokens = rollout(0)
    took = time.perf_counter() - began
    assert tokens == args.sequences * args.tokens, tokens
    split = {part: round(1000 * sum(seconds) / args.tokens, 2) for part, seconds in parts.items()}
    return {
        "tokens_s": tokens / took,
        "step_ms": 1000 * took / args.tokens,
        "cpu_s": cpu_seconds_with_children() - cpu,
        "split_ms": split,
    }


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, of the command line by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="*", default=["bare", "bare-flat", "ours", "ours-2"])
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", help="folder; absent: one layer with random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-mib", type=int, default=1024)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> int:
    """Run all sides in turn, and print one line per side."""
    args = options()
    if args.side:
        sys.stdout, kept = sys.stderr, sys.stdout
        print(json.dumps(side(args)), file=kept, flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_model(Path(folder))
            args.model = folder
        return _compare(args)


def _compare(args: argparse.Namespace) -> int:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in args.sides}
    for _ in range(args.repeat):
        for name in args.sides:
            found[name].append(in_a_process(args, name))
            print(f"  {name:<12}{found[name][-1]['tokens_s']:>10.0f} tokens/s", file=sys.stderr, flush=True)
    print(f"{cpu_model()}; {args.sequences} sequences of {args.tokens} tokens, {args.dtype}, {args.threads} threads")
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in ("tokens_s", "step_ms", "cpu_s")}
        for name, runs in found.items()
    }
    first = median[args.sides[0]]["tokens_s"]
    for name, of in median.items():
        split = ", ".join(f"{part} {ms}" for part, ms in found[name][-1]["split_ms"].items())
        print(
            f"{name:<12}{of['tokens_s']:>9.0f} tokens/s  {of['step_ms']:>6.1f} ms per step  {of['cpu_s']:>6.1f} CPU s"
            f"  {of['tokens_s'] / first:.2f}  {split}"
        )
    reached = median["ours"]["tokens_s"] / median["bare"]["tokens_s"] if {"ours", "bare"} <= median.keys() else 1.0
    return 0 if reached >= LEAST else 1


def in_a_process(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Run a side in a new process, and return what it measured."""
    numbers = ("sequences", "tokens", "threads", "model", "dtype", "kv_cache_mib")
    options = [text for key in numbers for text in (f"--{key.replace('_', '-')}", str(getattr(args, key)))]
    command = [sys.executable, __file__, "--side", name, *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SIDE_LIMIT_S)
    if ended.returncode:
        raise RuntimeError(f"{name} failed:\n{ended.stderr[-4000:]}")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
