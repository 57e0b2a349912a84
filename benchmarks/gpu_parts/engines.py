"""vLLM as a run starts it: its start, its generation speed, and the memory that it frees in sleep."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import rollout_speed
import torch

from gpu_parts.lines import JOB, notify
from gpu_parts.measure import CUDA, TINY, free_gib
from gpu_parts.models import QUICKSTART, folder
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.vllm import arguments
from ppoctl.engines.vllm.engine import Engine, GenerationRequest
from ppoctl.engines.vllm.log import write_log
from ppoctl.engines.vllm.vllm_settings import VllmSettings
from ppoctl.recipe.schema import GeneratorTable

WINDOW = 256
"""Tokens of prompt and response of the quickstart's model in these parts."""
END = 1
"""Its end token."""
TOLD = re.compile(r"backend|KV cache size|[Gg]raph|Available KV|Model loading took|model runner|imported", re.ASCII)
"""Lines of vLLM's log that are reported."""


def settings_of(dtype: str = "bfloat16", *, sleeps: bool = False, compiled: bool | None = None) -> VllmSettings:
    """Return settings of an engine that takes a tenth of a GPU."""
    table = GeneratorTable(gpu_memory_frac=0.1, kv_cache_mib=64, max_concurrent_seqs=256, compile=compiled)
    return VllmSettings(str(QUICKSTART), dtype, WINDOW, (END,), table, sleeps, Path(JOB.out))  # type: ignore[arg-type]


@contextmanager
def engine_of(settings: VllmSettings, *, folder: Path | None = None) -> Iterator[tuple[Engine, float]]:
    """Return an engine in this process, and the seconds that its start took. Without a folder of weights, it cannot
    generate."""
    write_log(settings, JOB.part)
    began = time.perf_counter()
    engine = Engine(settings, folder=None if folder is None else str(folder))
    try:
        yield engine, round(time.perf_counter() - began, 1)
    finally:
        engine.close()


LEAST_SAVED_S = 2.0
"""Seconds by which a start must be shorter without graphs of mixed steps to be worth their absence."""
MOST_SLOWER = 1.02
"""How many times as long the generation may then take, with twice as many sequences as are decoded together."""


def start() -> None:
    """Report the seconds of a start, and vLLM's log lines about attention, cache and graphs. On a GPU also without
    graphs of steps that contain prompts: vLLM captures each size for these steps and for steps that only decode."""
    modes = (None, "FULL_DECODE_ONLY") if CUDA else (None,)
    (_, ours_s, ours_took), *others = [(mode, *_start(mode)) for mode in modes]
    for mode, start_s, took in others:
        pays = ours_s - start_s >= LEAST_SAVED_S and took <= MOST_SLOWER * ours_took
        notify("start", mode=mode, verdict="use it" if pays else "keep both kinds of graphs")


def _start(mode: str | None) -> tuple[float, float]:
    """Report a start with this mode of graphs (None: vLLM's default). Return the seconds of the start, and those of a
    generation in which new prompts join until the middle."""
    settings = settings_of()
    with _graphs(mode), engine_of(settings, folder=QUICKSTART) as (engine, start_s):
        config = engine._llm.vllm_config
        blocks, size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        eager = bool(config.model_config.enforce_eager)
        _generate(engine, 8, 8)
        _, took = _generate(engine, 16 if TINY else 512, 8 if TINY else 128)
        numbers = {"start_s": start_s, "blocks": blocks, "block_tokens": size, "took": round(took, 2)}
        notify("start", mode=mode, eager=eager, **numbers)
    if mode is None:
        _report_log()
    return start_s, took


@contextmanager
def _graphs(mode: str | None) -> Iterator[None]:
    original = arguments._gpu_arguments
    changed = {} if mode is None else {"compilation_config": {"cudagraph_mode": mode}}
    with patch.object(arguments, "_gpu_arguments", lambda settings: {**original(settings), **changed}):
        yield


def _report_log() -> None:
    log = Path(JOB.out) / f"vllm-{JOB.part}.log"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    kept_lines = [line for line in text.splitlines() if TOLD.search(line)]
    for line in kept_lines:
        notify("start", log=line[:300])
    backend = re.search(r"Using (\w+)(?: attention)? backend", text)
    notify("start", backend=backend[1] if backend else None)
    if CUDA:
        notify("start", graphs=any("graph" in line.lower() and "captur" in line.lower() for line in kept_lines))


def generate() -> None:
    """Report tokens per second and milliseconds per step of the engine, by number of sequences decoded together, with
    and without CUDA graphs (by default a CPU has none)."""
    new_tokens = 8 if TINY else 128
    for compiled in (None, False) if CUDA else (None,):
        with engine_of(settings_of(compiled=compiled), folder=QUICKSTART) as (engine, seconds):
            notify("generate", start_s=seconds, eager=compiled is False)
            for seqs in (1, 8) if TINY else (1, 32, 256):
                _generate(engine, seqs, new_tokens)  # kernels and graphs of this size
                steps, took = _generate(engine, seqs, new_tokens)
                notify(
                    "generate",
                    seqs=seqs,
                    eager=compiled is False,
                    tokens_s=round(seqs * new_tokens / took),
                    ms_per_step=round(took / steps * 1e3, 2),
                )


def _generate(engine: Engine, seqs: int, new_tokens: int) -> tuple[int, float]:
    """Return steps and seconds until this many responses of equal length have ended."""
    params = SamplingParams(temperature=1.0, max_new_tokens=new_tokens, min_new_tokens=new_tokens)
    for number in range(seqs):
        prompt = tuple(2 + (number + place) % 500 for place in range(16))
        engine._add(GenerationRequest(f"draw {number}", prompt, number), params)
    steps = done = 0
    began = time.perf_counter()
    while done < seqs:
        done += len(engine.step())
        steps += 1
    return steps, time.perf_counter() - began


def sleep() -> None:
    """Report free memory of the GPU before an engine starts, awake, asleep, and awake again with weights."""
    if CUDA:
        torch.cuda.init()
    before = free_gib()
    with engine_of(settings_of(sleeps=True)) as (engine, _):
        awake, began = free_gib(), time.perf_counter()
        engine.sleep()
        asleep, slept = free_gib(), time.perf_counter()
        engine.begin_weights()
        woken = time.perf_counter()
        notify(
            "sleep",
            before_gib=before,
            awake_gib=awake,
            asleep_gib=asleep,
            awake_again_gib=free_gib(),
            sleep_s=round(slept - began, 3),
            wake_s=round(woken - slept, 3),
        )


def rollout() -> None:
    """Report the speed of a rollout through ppoctl's engines, one or several on the GPU, next to vLLM alone."""
    sides, sequences, tokens = (["bare", "ours-2"], 8, 8) if TINY else (list(rollout_speed.SIDES), 512, 256)
    model = str(QUICKSTART if TINY else folder("1.5b"))
    numbers = ["--sequences", str(sequences), "--tokens", str(tokens)]
    args = rollout_speed.options([*numbers, "--model", model, "--dtype", "bfloat16" if CUDA else "float32"])
    bare = 0.0
    for side in sides:
        found = rollout_speed.in_a_process(args, side)
        bare = bare or found["tokens_s"]
        speed = {"tokens_s": round(found["tokens_s"]), "step_ms": round(found["step_ms"], 1)}
        notify("rollout", side=side, **speed, of_bare=round(found["tokens_s"] / bare, 2))
