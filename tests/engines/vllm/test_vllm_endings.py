"""Ends of responses, and requests that are refused before generation."""

import dataclasses

import pytest
from vllm_bench import END, FOLDER_EOS, WINDOW, Bench, prompts

from ppoctl.core.errors import DataError, RecipeError
from ppoctl.core.ports import OutputRequest, SamplingParams

pytestmark = pytest.mark.engines


def test_only_end_token_ends_response_and_is_not_in_text(tied: Bench) -> None:
    samples = tied.generate(prompts(32), SamplingParams(temperature=2.0, max_new_tokens=48))
    ended = [sample for sample in samples.values() if sample.terminated]
    assert 0 < len(ended) < 32
    for sample in ended:
        assert sample.tokens[-1] == END
        assert END not in sample.tokens[:-1]
        assert len(sample.logprobs) == len(sample.tokens)
        assert sample.text == tied.generator._text.tokenizer.decode(sample.tokens[:-1], skip_special_tokens=True)
    for sample in samples.values():
        if not sample.terminated:
            assert len(sample.tokens) == len(sample.logprobs) == 48
            assert END not in sample.tokens
    assert any(FOLDER_EOS in sample.tokens for sample in samples.values())
    assert not any("<eos>" in sample.text for sample in samples.values())


def test_stop_string_ends_response_and_is_cut_from_text(tied: Bench) -> None:
    params = SamplingParams(temperature=1.5, max_new_tokens=40)
    free = tied.generate(prompts(10), params)
    text = free["p0"].text
    stop = next(text[i : i + 2] for i in range(5, len(text)) if text[i : i + 2].isascii())
    stopped = tied.generate(prompts(10), dataclasses.replace(params, stop_strings=(stop, "never drawn")))
    assert stopped["p0"].terminated
    for key, sample in stopped.items():
        whole = free[key]
        assert sample.tokens == whole.tokens[: len(sample.tokens)]
        assert sample.logprobs == pytest.approx(whole.logprobs[: len(sample.tokens)], abs=1e-4)
        if stop in whole.text:
            assert sample.terminated
            assert sample.text == whole.text[: whole.text.index(stop)]
            # One byte per token here: the tokens end with the one that completes the stop string.
            assert len(sample.tokens) < len(whole.tokens)
            before_last = tied.generator._text.text(sample.tokens[:-1], params)
            assert stop not in before_last
        else:
            assert sample == whole


def test_special_token_is_in_text_and_ends_response_as_stop_string(tied: Bench) -> None:
    """`<bos>` is special; it neither ends a response of this bench nor is it padding."""
    params = SamplingParams(temperature=2.0, max_new_tokens=48)
    kept = tied.generate(prompts(16), params)
    dropped = tied.generate(prompts(16), dataclasses.replace(params, special_tokens="drop"))
    stopped = tied.generate(prompts(16), dataclasses.replace(params, stop_strings=("<bos>",)))
    having = {key for key, sample in kept.items() if "<bos>" in sample.text}
    assert 0 < len(having) < 16
    for key, sample in kept.items():
        assert dropped[key].tokens == sample.tokens
        assert dropped[key].text == sample.text.replace("<bos>", "")
        assert stopped[key].text == sample.text.partition("<bos>")[0]
        assert stopped[key].terminated or key not in having


def test_min_new_tokens_masks_end_tokens_and_ignores_stop_strings(tied: Bench) -> None:
    """Neither ids nor stop strings end a response early; log-probs belong to the distribution without end tokens."""
    params = SamplingParams(temperature=2.0, max_new_tokens=40, stop_token_ids=(FOLDER_EOS, 45, 46, 47, 48))
    for stop_strings in ((), ("a", "e", "o")):
        plain = dataclasses.replace(params, stop_strings=stop_strings)
        with_minimum = dataclasses.replace(plain, min_new_tokens=12)
        free, samples = (tied.generate(prompts(16), each) for each in (plain, with_minimum))
        assert min(len(sample.tokens) for sample in free.values()) < 12
        assert min(len(sample.tokens) for sample in samples.values()) >= 12
        ends = {END, *params.stop_token_ids}
        assert not ends & {token for sample in samples.values() for token in sample.tokens[:12]}
        for sample in samples.values():
            assert not ends & {*sample.tokens[:-1]}
            assert sample.terminated == (len(sample.tokens) < 40 or sample.tokens[-1] in ends) or stop_strings
            text = tied.generator._text.text(sample.tokens[:12], SamplingParams(1.0, 1))
            assert sample.text.startswith(text[:-1])
        assert tied.worst_gap(prompts(16), with_minimum) < 1e-3
        whole = dataclasses.replace(with_minimum, min_new_tokens=0)
        assert any(
            abs(a - b) > 1e-3
            for request in prompts(16)
            for a, b in zip(
                tied.trainer.logprobs(
                    request.prompt_tokens + samples[request.key].tokens, OutputRequest(whole.temperature)
                )[len(request.prompt_tokens) - 1 :],
                samples[request.key].logprobs,
                strict=True,
            )
        )


def test_stop_token_ends_response_and_is_not_in_text(tied: Bench) -> None:
    params = SamplingParams(temperature=1.5, max_new_tokens=40)
    free = tied.generate(prompts(6), params)
    stop = free["p0"].tokens[5]
    for key, sample in tied.generate(prompts(6), dataclasses.replace(params, stop_token_ids=(stop,))).items():
        place = free[key].tokens.index(stop) if stop in free[key].tokens else None
        if place is None:
            assert sample == free[key]
            continue
        assert (sample.terminated, sample.tokens) == (True, free[key].tokens[: place + 1])
        assert sample.text == tied.generator._text.text(sample.tokens[:-1], params)
    with pytest.raises(RecipeError, match=r"`rollout.stop_token_ids` contains id 99999"):
        tied.generate(prompts(1), dataclasses.replace(params, stop_token_ids=(99999,)))


def test_long_prompt_shortens_response_to_rest_of_window(tied: Bench) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=20, min_new_tokens=8, max_window_tokens=40)
    requests = [dataclasses.replace(prompts(1, length=length)[0], key=f"{length}") for length in (12, 25, 32)]
    found = {key: len(sample.tokens) for key, sample in tied.generate(requests, params).items()}
    assert found["32"] == 8
    assert found["25"] <= 15
    assert found["12"] <= 20


def test_stop_strings_do_not_persist_between_calls(tied: Bench) -> None:
    params = SamplingParams(temperature=1.0, max_new_tokens=20)
    before = tied.generate(prompts(4), params)
    tied.generate(prompts(4), dataclasses.replace(params, stop_strings=("a", "e")))
    assert tied.generate(prompts(4), params) == before


def test_prompt_beyond_window_is_rejected_before_generation(tied: Bench) -> None:
    requests = [*prompts(2), dataclasses.replace(prompts(1, length=300)[0], key="the long one")]
    with pytest.raises(DataError, match=rf"`the long one` has 300 tokens; with 32 new tokens .* window of {WINDOW}"):
        tied.generate(requests, SamplingParams(temperature=1.0, max_new_tokens=32))


def test_prompt_that_exactly_fits_window_gets_full_response(tied: Bench) -> None:
    requests = prompts(1, length=WINDOW - 8)
    sample = tied.generate(requests, SamplingParams(temperature=1.0, max_new_tokens=8))["p0"]
    assert len(sample.tokens) == 8
    assert not sample.terminated


def test_empty_prompt_is_rejected(tied: Bench) -> None:
    request = dataclasses.replace(prompts(1)[0], prompt_tokens=())
    with pytest.raises(DataError, match="`p0` has 0 tokens"):
        tied.generate([request], SamplingParams(temperature=1.0, max_new_tokens=8))


def test_token_id_outside_vocabulary_is_rejected_by_key(tied: Bench) -> None:
    request = dataclasses.replace(prompts(1)[0], prompt_tokens=(5, 99999))
    with pytest.raises(DataError, match="`p0`"):
        tied.generate([request], SamplingParams(temperature=1.0, max_new_tokens=8))
    assert len(tied.generate(prompts(2), SamplingParams(temperature=1.0, max_new_tokens=8))) == 2


def test_duplicate_request_keys_are_rejected(tied: Bench) -> None:
    with pytest.raises(ValueError, match="key `p0`"):
        tied.generate(prompts(1) * 2, SamplingParams(temperature=1.0, max_new_tokens=8))


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_unsupported_temperature_is_rejected(tied: Bench, temperature: float) -> None:
    with pytest.raises(RecipeError, match=f"`{temperature}`"):
        tied.generate(prompts(1), SamplingParams(temperature=temperature, max_new_tokens=8))
