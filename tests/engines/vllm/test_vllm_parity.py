"""The generator's log-probs equal those of the trainer's model, independent of concurrent requests."""

import pytest
from vllm_bench import Bench, prompts

from ppoctl.core.ports import OutputRequest, SamplingParams

pytestmark = pytest.mark.engines

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=24)


def test_sampler_logprobs_match_trainer_after_each_update(bench: Bench) -> None:
    for _ in range(2):
        assert bench.worst_gap(prompts(6), SAMPLING) < 1e-3
        bench.trainer.move(0.05)
    assert bench.worst_gap(prompts(6), SAMPLING) < 1e-3


def test_sampler_logprobs_include_temperature(tied: Bench) -> None:
    assert tied.worst_gap(prompts(4), SamplingParams(temperature=0.6, max_new_tokens=16)) < 1e-3
    assert tied.worst_gap(prompts(4), SamplingParams(temperature=1.7, max_new_tokens=16)) < 1e-3


@pytest.mark.parametrize(
    "filters",
    [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.8, "top_k": 20, "min_p": 0.02}],
    ids=["top-p", "top-k", "min-p", "all"],
)
def test_sampler_logprobs_include_filters(tied: Bench, filters: dict[str, float]) -> None:
    params = SamplingParams(temperature=1.3, max_new_tokens=16, **filters)  # type: ignore[arg-type]
    assert tied.worst_gap(prompts(4), params) < 1e-3
    # Otherwise the filters would keep everything, and the comparison would be trivial.
    samples = tied.generate(prompts(1), params)["p0"]
    unfiltered = tied.trainer.logprobs(
        prompts(1)[0].prompt_tokens + samples.tokens, OutputRequest(params.temperature)
    )
    ours = unfiltered[len(prompts(1)[0].prompt_tokens) - 1 :]
    assert max(abs(a - b) for a, b in zip(ours, samples.logprobs, strict=True)) > 0.1


def test_greedy_sampling_takes_most_likely_trainer_token(tied: Bench) -> None:
    (request,) = prompts(1)
    sample = tied.generate([request], SamplingParams(temperature=0.0, max_new_tokens=10))["p0"]
    tokens = request.prompt_tokens
    for token in sample.tokens:
        assert token == tied.trainer.most_likely(tokens)
        tokens = (*tokens, token)


def test_tokens_depend_on_prompt_and_seed_alone(tied: Bench) -> None:
    requests = prompts(12)
    together = tied.generate(requests, SAMPLING)
    reversed_order = tied.generate(requests[::-1], SAMPLING)
    alone = {request.key: tied.generate([request], SAMPLING)[request.key] for request in requests[:3]}
    assert {key: sample.tokens for key, sample in reversed_order.items()} == {
        key: sample.tokens for key, sample in together.items()
    }
    assert all(alone[key].tokens == together[key].tokens for key in alone)


def test_different_seed_gives_different_response(tied: Bench) -> None:
    one = tied.generate(prompts(4), SAMPLING)
    other = tied.generate(prompts(4, first_seed=900), SAMPLING)
    assert all(one[key].tokens != other[key].tokens for key in one)


def test_samples_have_stamp_of_their_state(tied: Bench) -> None:
    state = tied.trainer.move(0.01)
    assert {sample.stamp for sample in tied.generate(prompts(2), SAMPLING).values()} == {state.stamp}
