"""Samples arrive as they finish; a stream may be left at any time."""

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_bench import Bench, prompts

from ppoctl.engines.vllm.engine import STEPS_PER_CALL, Engine
from ppoctl.engines.vllm.hosts import ThisProcess
from ppoctl.errors import PpoctlError
from ppoctl.ports import SamplingParams

pytestmark = pytest.mark.engines

DRAW = SamplingParams(temperature=1.0, max_new_tokens=24)


def test_first_samples_arrive_long_before_the_last(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[None] = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: passes.append(None) or step(engine))
    tied.draw(prompts(1), DRAW)  # be at the state already: the canary's pass is not counted
    passes.clear()
    # 20 requests on 8 seats: the last ones cannot start before the first ones ended.
    arrivals = [len(passes) for _ in tied.generator.generate(prompts(20), DRAW, at=tied.trainer.state)]
    assert len(arrivals) == 20
    assert arrivals[0] <= 24 + STEPS_PER_CALL
    assert arrivals[-1] >= 2 * 24


def test_closing_a_stream_drops_its_requests_and_the_next_is_complete(tied: Bench) -> None:
    whole = tied.draw(prompts(12), DRAW)
    stream = tied.generator.generate(prompts(12), DRAW, at=tied.trainer.state)
    first = next(stream)
    stream.close()
    assert first == whole[first.key]
    assert tied.draw(prompts(12), DRAW) == whole


def test_a_stream_left_by_an_exception_drops_its_requests(tied: Bench) -> None:
    whole = tied.draw(prompts(12), DRAW)

    def consume() -> None:
        for _ in tied.generator.generate(prompts(12), DRAW, at=tied.trainer.state):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    tied.trainer.move(0.0)  # a new state with the same numbers: loading needs an idle engine
    again = tied.draw(prompts(12), DRAW)
    assert {key: sample.tokens for key, sample in again.items()} == {k: sample.tokens for k, sample in whole.items()}


def test_two_streams_at_a_time_are_refused(tied: Bench) -> None:
    first = tied.generator.generate(prompts(12), DRAW, at=tied.trainer.state)
    next(first)
    with pytest.raises(PpoctlError, match="still open"):
        next(tied.generator.generate(prompts(2), DRAW, at=tied.trainer.state))
    assert len(list(first)) == 11


def test_closing_the_generator_under_an_open_stream_is_an_error_of_the_stream(
    tied: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = tied.generator.generate(prompts(12), DRAW, at=tied.trainer.state)
    next(stream)
    engine = tied.engine
    with monkeypatch.context() as closed:
        closed.setattr(ThisProcess, "close", lambda host: None)  # the session's engine stays
        tied.generator.close()
    with pytest.raises(PpoctlError, match=r"closed with 11 samples still to draw"):
        list(stream)
    engine.abort()


def test_no_requests_cost_nothing(tied: Bench) -> None:
    tied.trainer.move(0.01)
    tied.trainer.traffic.clear()
    assert tied.draw([], DRAW) == {}
    assert tied.trainer.traffic == []


def test_prompts_are_never_prefilled_in_parts(model_folder: Callable[[str], Path]) -> None:
    # 64 prompts of 280 tokens and more are 18,000 tokens, several engine steps of prefill. In parts, a prompt's
    # generator would draw once too often (or, on a CPU, fail).
    bench = Bench.start(model_folder("tied"), seats=64)
    requests = prompts(64, length=280)
    many = bench.draw(requests, DRAW)
    few = bench.draw(requests[:4], DRAW)
    bench.generator.close()
    assert [many[key].tokens for key in few] == [sample.tokens for sample in few.values()]
