"""Partial rollouts on a generator whose responses are known: which tokens a step generates, with which weights, and
which groups have ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from fakes.components import FakeStream
from fakes.job import Stops
from ppoctl.algorithms.stages.generation import SampleGeneration
from ppoctl.algorithms.stages.partial_rollout import EndedGroupsStage, PartialRolloutStage
from ppoctl.algorithms.stages.rollout import sample_requests
from ppoctl.core.batch.prompts import Prompt, Prompts
from ppoctl.core.batch.records import TERMINATED, TRUNCATED, UNFINISHED, PartialRollouts, Rollouts, State, decode
from ppoctl.core.ports import Sample, SampleRequest, SamplingParams
from stages import stub_models
from stages.test_rollout_to_evaluation import Some, unwatched

MOST, PER_STEP, END = 7, 3, 1
LENGTHS = {"a#0": 2, "a#1": 3, "b#0": 9, "b#1": 1, "c#0": 3, "c#1": 5, "d#0": 2, "d#1": 4, "e#0": 1,
           "e#1": 2}  # fmt: skip
"""Number of tokens until the end token. A response of `b` is truncated after 7 tokens."""


def actor(step: int) -> State:
    return State("actor", step, step, f"of step {step}")


@dataclass
class Scripted:
    """Generator of responses of known lengths: token n of a response of step s is 10 n + s, the log-prob its
    negative."""

    at: State | None = None
    requests: list[SampleRequest] = field(default_factory=list)

    def prepare(self, state: State) -> None:
        self.at = state

    def open(self, params: SamplingParams) -> FakeStream:
        return FakeStream(lambda request: self.generate(request, params))

    def generate(self, request: SampleRequest, params: SamplingParams) -> Sample:
        assert self.at is not None
        self.requests.append(request)
        done = len(request.earlier_tokens)
        assert request.prompt_tokens[len(request.prompt_tokens) - done :] == request.earlier_tokens
        assert request.is_continued == (done > 0)
        length = LENGTHS[request.key.partition("+")[0]]
        count = min(length - done, request.max_new_tokens or params.max_new_tokens)
        numbers = range(done + 1, done + count + 1)
        tokens = tuple(END if number == length else 10 * number + self.at.step for number in numbers)
        whole = (*request.earlier_tokens, *tokens)
        return Sample(
            request.key, tokens, tuple(-float(token) for token in tokens), done + count == length,
            " ".join(map(str, whole)), self.at.stamp,
        )  # fmt: skip

    def close(self) -> None:
        pass


def stage(generator: Scripted, **changes: Any) -> PartialRolloutStage:
    settings: dict[str, Any] = {
        "models": stub_models.Models(),
        "generation": SampleGeneration(cast(Any, generator), cast(Any, Some(())), Stops(), unwatched),
        "params": SamplingParams(1.0, MOST),
        "samples_per_prompt": 2,
        "seed": 3,
        "fingerprint": "keys",
        "name": "partial_rollout",
        "tokens": PER_STEP,
    }
    return PartialRolloutStage(**{**settings, **changes})


def prompts(step: int, names: str) -> Prompts:
    return Prompts(step, tuple(Prompt(name, (5,) * (1 + "abcde".index(name)), "", "even") for name in names))


def in_steps(generator: Scripted, batches: Sequence[str], **changes: Any) -> list[PartialRollouts]:
    """Return the record of each step, which reads that of the step before as it is on disk."""
    found: list[PartialRollouts] = []
    for step, names in enumerate(batches, start=1):
        before = decode(found[-1].encoded) if found else None
        assert before is None or isinstance(before, PartialRollouts)
        found.append(stage(generator, **changes).run(actor(step - 1), prompts(step, names), before))  # type: ignore[arg-type]
    return found


def test_responses_continue_with_the_weights_of_the_next_step_until_their_group_ends() -> None:
    generator = Scripted()
    one, two, three = in_steps(generator, ["ab", "ce", "d"])
    stamps = [actor(step).stamp for step in range(3)]
    assert one.prompt_ids == ["a", "a", "b", "b"]
    assert one.tokens.tolist() == [[10, END, 0], [10, 20, END], [10, 20, 30], [END, 0, 0]]
    assert one.finish.tolist() == [TERMINATED, TERMINATED, UNFINISHED, TERMINATED]
    # Group a has ended. The ended response of b waits for the other one.
    assert two.prompt_ids == ["b", "b", "c", "c", "e", "e"]
    assert two.tokens.tolist() == [
        [10, 20, 30, 41, 51, 61], [END, 0, 0, 0, 0, 0], [11, 21, END, 0, 0, 0], [11, 21, 31, 0, 0, 0],
        [END, 0, 0, 0, 0, 0], [11, END, 0, 0, 0, 0],
    ]  # fmt: skip
    assert two.sampler_logprobs.equal(-two.tokens.float())
    assert two.segment_stamps == [stamps[:2], stamps[:1], *[stamps[1:2]] * 4]
    assert two.segment_tokens == [[3, 3], [1], [3], [3], [1], [2]]
    assert two.stamps == [stamps[1], stamps[0], *[stamps[1]] * 4]
    assert two.oldest_stamps == [stamps[0], stamps[0], *[stamps[1]] * 4]
    # The limit of 7 tokens truncates b; its last segment has one token.
    assert three.prompt_ids == ["b", "b", "c", "c", "d", "d"]
    assert three.finish.tolist() == [TRUNCATED, TERMINATED, TERMINATED, TERMINATED, TERMINATED, UNFINISHED]
    assert three.segment_tokens is not None
    assert three.segment_tokens[0] == [3, 3, 1]
    assert three.tokens[0].tolist() == [10, 20, 30, 41, 51, 61, 72]
    assert three.texts[3] == "11 21 31 42 1"
    assert [record.metrics() for record in (one, two, three)] == [
        {"rollout/unfinished_seqs": float(count)} for count in (1, 2, 1)
    ]
    asked = [(request.key, request.max_new_tokens) for request in generator.requests[-4:]]
    assert asked == [("d#1+0", 3), ("d#0+0", 3), ("c#1+3", 3), ("b#0+6", 1)]


def test_ended_groups_are_trained_on_once_with_the_narrowest_grid() -> None:
    of_steps = [EndedGroupsStage(2, "keys").run(each) for each in in_steps(Scripted(), ["ab", "ce", "d"])]
    assert [each.prompt_ids for each in of_steps[::2]] == [["a", "a"], ["b", "b", "c", "c"]]
    one, _, three = of_steps
    assert {type(each) for each in of_steps} == {Rollouts}
    assert one.tokens.tolist() == [[10, END, 0], [10, 20, END]]
    assert three.tokens.shape == (4, 7)
    assert three.mask.sum(1).tolist() == three.lengths.tolist() == [7, 1, 3, 5]
    assert three.prompt_lengths.tolist() == [2, 2, 3, 3]
    assert three.prompt_tokens.tolist() == [5] * 10
    assert three.segment_tokens == [[3, 3, 1], [1], [3], [3, 2]]


def test_step_in_which_no_group_ends_generates_as_many_tokens_again() -> None:
    generator = Scripted()
    [only] = in_steps(generator, ["bc"])
    # After 3 tokens, b and c have one open response each; after 6, c has ended and b has not.
    assert only.lengths.tolist() == [6, 1, 3, 5]
    assert only.finish.tolist() == [UNFINISHED, TERMINATED, TERMINATED, TERMINATED]
    # Both rounds have the same weights, so they are one segment.
    assert only.segment_tokens == [[6], [1], [3], [5]]
    assert [request.key for request in generator.requests[4:]] == ["c#1+3", "b#0+3"]


def test_first_tokens_are_those_of_a_whole_response_and_later_seeds_differ() -> None:
    generator = Scripted()
    in_steps(generator, ["ab", "c"])
    by_key = {request.key: request.seed for request in generator.requests}
    assert len(set(by_key.values())) == len(by_key)
    whole = {request.key: request.seed for request in sample_requests(prompts(1, "ab"), samples=2, seed=3)}
    assert {key: by_key[f"{key}+0"] for key in whole} == whole
    again = Scripted()
    in_steps(again, ["ab", "c"], seed=4)
    assert not {request.seed for request in again.requests} & {*by_key.values()}


@pytest.mark.parametrize("changed", ["segment_tokens", "segment_stamps"])
def test_segments_fit_the_responses(changed: str) -> None:
    [record] = in_steps(Scripted(), ["ab"])
    values: dict[str, Any] = {"segment_tokens": [[2], [3], [3], [2]], "segment_stamps": [["actor@0:x"]]}
    with pytest.raises(ValueError, match=r"segments have all tokens|has one entry per sequence"):
        replace(record, **{changed: values[changed]})
    assert torch.equal(record.lengths, torch.tensor([2, 3, 3, 1]))


def test_kept_samples_of_a_partial_rollout_have_its_actor_prompts_earlier_responses_and_round() -> None:
    keys: list[Any] = []

    class Keys(Some):
        def load(self, key: Any) -> Any:
            keys.append(key)
            return super().load(key)

    generator = Scripted()
    generation = SampleGeneration(cast(Any, generator), cast(Any, Keys(())), Stops(), unwatched)
    of_other_lengths, of_these = in_steps(Scripted(), ["ab"], tokens=2)[0], in_steps(Scripted(), ["ab"])[0]
    for at, names, before in (
        (0, "bc", None), (1, "bc", None), (0, "c", None), (0, "bc", of_these), (0, "bc", of_other_lengths),
    ):  # fmt: skip
        stage(generator, generation=generation).run(actor(at), prompts(2, names), before)  # type: ignore[arg-type]
    assert len({key.fingerprint for key in keys}) == len(keys) >= 6


def test_step_waits_for_the_fewest_groups_that_it_trains_on() -> None:
    """After 3 tokens, a has ended; after 6 also c, and after 7 (truncated) b."""
    lengths = {fewest: in_steps(Scripted(), ["abc"], fewest=fewest)[0].lengths.tolist() for fewest in (1, 2, 3)}
    assert lengths == {1: [2, 3, 3, 1, 3, 3], 2: [2, 3, 6, 1, 3, 5], 3: [2, 3, 7, 1, 3, 5]}
