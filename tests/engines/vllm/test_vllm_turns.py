"""Turns of a conversation as requests: limits of their own, requests that join a running batch, the prefix cache."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from fleet_bench import PARAMS, STATE, CountingHost, bench_of
from vllm_bench import END, WINDOW, Bench, prompts

from ppoctl.core.batch.episodes import ToolCall
from ppoctl.core.errors import DataError
from ppoctl.core.ports import Sample, SampleRequest, SamplingParams
from ppoctl.engines.vllm.engine import MOST_STEPS, GenerationOutput
from ppoctl.engines.vllm.generator import VllmStream
from ppoctl.engines.vllm.tool_calls import ParsedCalls, VllmToolCalls

pytestmark = pytest.mark.engines

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=40)
BLOCK = 128
"""Number of tokens of a block of the KV cache on a CPU: the prefix cache holds whole blocks."""


def test_request_has_its_own_limit_of_tokens(tied: Bench) -> None:
    requests = [replace(request, max_new_tokens=number) for number, request in enumerate(prompts(9))][1:]
    samples = tied.generate([*requests, replace(prompts(1)[0], key="free")], SAMPLING)
    whole = tied.generate(prompts(9), SAMPLING)
    for number, request in enumerate(requests, 1):
        assert samples[request.key].tokens == whole[request.key].tokens[:number]
    assert len(samples["free"].tokens) == len(whole["p0"].tokens) > 8
    assert {len(sample.tokens) for sample in samples.values()} > {1, 8}


def test_prompt_of_turn_must_fit_into_window_with_its_own_limit(tied: Bench) -> None:
    turn = replace(prompts(1, length=WINDOW - 6)[0], max_new_tokens=6)
    assert len(tied.generate([turn], SAMPLING)["p0"].tokens) <= 6
    with pytest.raises(DataError, match=rf"`p0` has 314 tokens; with 7 new tokens .* window of {WINDOW}"):
        tied.generate([replace(turn, max_new_tokens=7)], SAMPLING)


def test_minimum_applies_to_first_turn_only(tied: Bench) -> None:
    """The minimum is one of the response, so it ignores stop strings and end tokens in the first turn alone."""
    for stops in ((), ("a", "e", "o")):
        params = SamplingParams(2.0, 40, stop_token_ids=(45, 46, 47, 48), stop_strings=stops, min_new_tokens=12)
        free = tied.generate(prompts(16), replace(params, min_new_tokens=0))
        continued = [replace(request, is_continued=True) for request in prompts(16)]
        assert tied.generate(continued, params) == free
        assert min(len(sample.tokens) for sample in free.values()) < 12
    short = [replace(request, max_new_tokens=5) for request in prompts(16)]  # vLLM refuses a minimum above the limit
    samples = tied.generate(short, replace(SAMPLING, min_new_tokens=12))
    assert all(len(sample.tokens) == 5 and END not in sample.tokens for sample in samples.values())


def test_short_request_that_joins_long_ones_is_returned_first(tied: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment answers while long responses are generated: the next turn joins them at the engine's reply."""
    steps: list[None] = []
    from vllm.v1.engine.llm_engine import LLMEngine  # after the engine's environment was prepared

    step = LLMEngine.step
    monkeypatch.setattr(LLMEngine, "step", lambda engine: steps.append(None) or step(engine))
    params = SamplingParams(temperature=1.0, max_new_tokens=200, min_new_tokens=200)
    long, late = prompts(3), replace(prompts(4)[3], max_new_tokens=4, is_continued=True)
    alone = tied.generate([late], params)
    whole = tied.generate(long, params)
    before = len(steps)
    with closing(tied.open(long, params)) as stream:
        assert stream.poll() == []
        assert len(steps) - before == MOST_STEPS
        stream.submit([late])
        assert stream.poll() == [alone["p3"]]
        assert len(steps) - before <= 2 * MOST_STEPS
        rest = [sample for finished in iter(stream.finished, []) for sample in finished]
        assert stream.poll() == []
    assert {sample.key: sample for sample in rest} == whole


def turns_after(samples: Mapping[str, Sample], requests: list[SampleRequest]) -> list[SampleRequest]:
    """Return the second turns of these requests, after an observation of 11 tokens."""
    return [
        SampleRequest(
            f"{request.key}b",
            request.prompt_tokens + samples[request.key].tokens + tuple(range(60, 71)),
            seed=500 + number,
            max_new_tokens=30,
            is_continued=True,
        )
        for number, request in enumerate(requests)
    ]


def test_second_turn_reads_cache_of_first_and_equals_turn_without_cache(
    tied: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run continues with an empty cache, and must sample the same tokens."""
    params = replace(SAMPLING, min_new_tokens=40)
    requests = prompts(12, length=BLOCK - 25)  # the first block ends within the first turn
    first = tied.generate(requests, params)
    turns = turns_after(first, requests)
    llm, cached = tied.engine._llm, dict[str, int]()
    step = llm.step

    def counted() -> Any:
        outputs = step()
        cached.update((output.request_id, output.num_cached_tokens) for output in outputs if output.finished)
        return outputs

    monkeypatch.setattr(llm, "step", counted)
    warm = tied.generate(turns, params)
    assert cached == dict.fromkeys((turn.key for turn in turns), BLOCK)
    assert llm.reset_prefix_cache()
    cached.clear()
    cold = {turn.key: tied.generate([turn], params)[turn.key] for turn in turns[:3]}  # a restarted run has fewer left
    assert cached == dict.fromkeys(cold, 0)
    for key, sample in cold.items():
        assert sample.tokens == warm[key].tokens
        assert sample.logprobs == pytest.approx(warm[key].logprobs, abs=1e-5)


def test_calls_of_turn_are_those_of_its_text_with_special_tokens(
    tied: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied.generate(prompts(1), SAMPLING)
    engine, tokenizer = tied.engine, tied.generator._text.tokenizer
    monkeypatch.setattr(engine, "_tool_calls", VllmToolCalls("hermes", tokenizer, "model"))

    def parsed(text: str) -> ParsedCalls:
        tokens = (*tokenizer(text)["input_ids"], END)
        return engine._parsed(GenerationOutput("a", tokens, (0.0,) * len(tokens), "stop", ()), SAMPLING).parsed

    call = '<tool_call>{"name": "f", "arguments": {"x": "<eos> a , b ."}}</tool_call>'
    assert parsed(f"Hm. {call}") == ParsedCalls((ToolCall("f", {"x": "<eos> a , b ."}),))
    assert parsed("Hm.") == ParsedCalls()
    assert parsed(call[:30]).malformed


def test_sample_has_calls_that_engine_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"d0": ParsedCalls((ToolCall("f", {"x": 3}),)), "d1": ParsedCalls(malformed="no name")}

    class ParsingHost(CountingHost):
        def _advance(self, requests: Any, params: SamplingParams) -> Any:
            return [replace(output, parsed=found[output.id]) for output in super()._advance(requests, params)]

    fleet = bench_of(ParsingHost(speed=1)).fleet
    fleet.prepare(STATE)
    fleet.open(PARAMS)

    class Letters:
        def text(self, tokens: object, params: SamplingParams) -> str:
            return f"{tokens} {params.max_new_tokens}"

    stream = VllmStream(fleet, Letters(), PARAMS, "stamp", window=20)  # type: ignore[arg-type]
    stream.submit([SampleRequest("d0", (1, 2), 0, max_new_tokens=3), SampleRequest("d1", (1, 2), 1)])
    samples = {sample.key: sample for finished in iter(stream.finished, []) for sample in finished}
    assert (samples["d0"].calls, samples["d0"].malformed, samples["d0"].text) == (found["d0"].calls, "", "(0,) 3")
    assert (samples["d1"].calls, samples["d1"].malformed, samples["d1"].text) == ((), "no name", "(1,) 8")
