"""Samples arrive as they finish; a stream may be closed at any time."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm_bench import Bench, prompts

from ppoctl.core.errors import PpoctlError
from ppoctl.core.measured import MEASUREMENTS
from ppoctl.core.ports import SamplingParams
from ppoctl.engines.vllm.engine import FEWEST_STEPS, Engine, GenerationOutput
from vllm_in_process import Here

pytestmark = pytest.mark.engines

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=24)


def test_first_samples_arrive_before_last(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[None] = []
    from vllm.v1.engine.llm_engine import LLMEngine  # after the engine's environment was prepared

    step = LLMEngine.step
    monkeypatch.setattr(LLMEngine, "step", lambda engine: passes.append(None) or step(engine))
    tied.generate(prompts(1), SAMPLING)  # be at the state already, so that the canary's pass is not counted
    passes.clear()
    # 20 requests, at most 8 at a time: the last ones cannot start before the first ones ended.
    stream, arrivals = tied.open(prompts(20), SAMPLING), []
    while samples := stream.finished():
        arrivals += [len(passes)] * len(samples)
    stream.close()
    assert len(arrivals) == 20
    assert arrivals[0] <= 24 + FEWEST_STEPS
    assert arrivals[-1] >= 2 * 24


def test_advance_returns_after_enough_samples_or_many_tokens(tied: Bench) -> None:
    calls: list[int] = []

    def counted(engine: Engine, *args: Any) -> list[GenerationOutput]:
        found = engine.advance(*args)
        calls.append(len(found))
        return found

    with tied.host.replacing("advance", counted):
        tied.generate(prompts(1), SamplingParams(temperature=1.0, max_new_tokens=40))
        assert calls == [1]  # and not once every 16 tokens
        calls.clear()
        tied.generate(prompts(20), SAMPLING)
    assert len(calls) >= 3  # 20 requests, 8 at a time: the first to finish are returned before the last begin
    assert sum(calls) == 20


def test_late_requests_give_same_samples_as_separate_requests(tied: Bench) -> None:
    whole = tied.generate(prompts(12), SAMPLING)
    with closing(tied.open(prompts(12)[:5], SAMPLING)) as stream:
        stream.submit(prompts(12)[5:])  # to an engine that is still processing the first ones
        samples = [sample for finished in iter(stream.finished, []) for sample in finished]
    assert {sample.key: sample for sample in samples} == whole


def test_closing_stream_drops_requests_and_next_is_complete(tied: Bench) -> None:
    whole = tied.generate(prompts(12), SAMPLING)
    stream = tied.open(prompts(12), SAMPLING)
    first, *_ = stream.finished()
    stream.close()
    assert first == whole[first.key]
    tied.trainer.move(0.0)  # a new state with equal weights: loading needs an idle engine
    again = tied.generate(prompts(12), SAMPLING)
    assert {key: sample.tokens for key, sample in again.items()} == {k: sample.tokens for k, sample in whole.items()}


def test_tokens_of_dropped_requests_are_reported(tied: Bench) -> None:
    """The first of four responses ends after two tokens, and the engine replies after its fewest steps, each of which
    generates a token of the three others."""
    first, *others = prompts(4)
    stream = tied.open([replace(first, max_new_tokens=2), *others], SAMPLING)
    assert [sample.key for sample in stream.finished()] == [first.key]
    MEASUREMENTS.take()
    stream.close()
    assert MEASUREMENTS.take().aborted_tokens == 3 * FEWEST_STEPS


def test_open_stream_blocks_second_stream_and_weight_sync(tied: Bench) -> None:
    with closing(tied.open(prompts(1), SAMPLING)) as stream:
        with pytest.raises(PpoctlError, match="still open"):
            tied.generator.open(SAMPLING)
        with pytest.raises(PpoctlError, match="still open"):
            tied.generator.prepare(tied.trainer.state)
        assert len(stream.finished()) == 1
        assert stream.finished() == []


def test_stream_raises_error_if_generator_is_closed(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = tied.open(prompts(12), SAMPLING)
    left = 12 - len(stream.finished())
    engine = tied.engine
    with monkeypatch.context() as closed:
        closed.setattr(Here, "close", lambda host: None)  # the session's engine remains open
        tied.generator.close()
    with pytest.raises(PpoctlError, match=rf"closed with {left} samples unfinished"):
        stream.finished()
    engine.abort()


def test_prompts_are_never_prefilled_in_chunks(model_folder: Callable[[str], Path]) -> None:
    # 64 prompts of 280 tokens and more are 18,000 tokens, several engine steps of prefill. With a partly processed
    # prompt, the prompt's random generator would sample once too often (or, on a CPU, fail).
    bench = Bench.start(model_folder("tied"), seats=64)
    requests = prompts(64, length=280)
    first = SamplingParams(temperature=1.0, max_new_tokens=4)  # where an additional sample would show
    many = bench.generate(requests, first)
    few = bench.generate(requests[:4], first)
    bench.generator.close()
    assert [many[key].tokens for key in few] == [sample.tokens for sample in few.values()]
