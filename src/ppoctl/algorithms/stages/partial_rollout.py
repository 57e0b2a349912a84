"""09-partial_rollout and 10-rollout of a recipe with `rollout.tokens_per_step`: generate at most this number of
tokens of each response in a step, and take the groups that have ended (Kimi k1.5, arXiv:2501.12599, section 2.6.2).

    step                 n                           n + 1
    group A     [a0 ended] [a1 ....]        ->  [a0] [a1 .. ended]   A trains in step n + 1
    group B     [b0 ended] [b1 ended]  B trains in step n
    group C                                     [c0 ....] [c1 ended]

A response continues with the weights of the next step after its own tokens, so each token has the log-prob under the
weights that generated it. A group trains in the step in which its last response ends.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch

from ppoctl.algorithms.stages.generation import RequestBatch, SampleGeneration
from ppoctl.algorithms.stages.rollout import RolloutStage
from ppoctl.core.batch.prompts import Prompts
from ppoctl.core.batch.records import TERMINATED, TRUNCATED, UNFINISHED, PartialRollouts, Rollouts, State
from ppoctl.core.batch.rollouts import grids_of
from ppoctl.core.batch.seeds import derive_seed
from ppoctl.core.batch.selection import select, take
from ppoctl.core.ports import Sample, SampleRequest, SamplingParams


@dataclass(frozen=True)
class _Response:
    """A response as far as it is generated."""

    prompt_tokens: tuple[int, ...]
    prompt_id: str
    index: int
    seed: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    stamps: tuple[str, ...] = ()
    """Stamp of each segment."""
    counts: tuple[int, ...] = ()
    """Number of tokens of each segment."""
    finish: int = UNFINISHED
    text: str = ""
    sends: int = 1

    @property
    def key(self) -> str:
        """Key of the next request. Groups of one prompt that began in different steps have different lengths."""
        return f"{self.prompt_id}#{self.index}+{len(self.tokens)}"

    def continued(self, sample: Sample, params: SamplingParams) -> "_Response":
        """Return the response with a further sample, which another step or another round of this step generated."""
        tokens, count, earlier = (*self.tokens, *sample.tokens), len(sample.tokens), self.counts
        stamps = self.stamps
        if stamps and stamps[-1] == sample.stamp:
            stamps, earlier, count = stamps[:-1], earlier[:-1], earlier[-1] + count
        is_full = len(tokens) == params.new_tokens(len(self.prompt_tokens))
        ended = TRUNCATED if is_full else UNFINISHED
        return replace(
            self,
            tokens=tokens,
            logprobs=(*self.logprobs, *sample.logprobs),
            stamps=(*stamps, sample.stamp),
            counts=(*earlier, count),
            finish=TERMINATED if sample.terminated else ended,
            text=sample.text,
            sends=max(self.sends, sample.sends),
        )


@dataclass(frozen=True)
class PartialRolloutStage(RolloutStage):
    """Stage that begins new groups, continues those that have not ended, and generates at most `tokens` tokens of
    each response. If fewer than `fewest` groups have ended then, it generates as many tokens again."""

    tokens: int = 1
    """Maximum number of tokens of a response in one step."""
    fewest: int = 1
    """Minimum number of groups that a step trains on."""

    def _is_finished(self, actor: State, prompts: Prompts) -> bool:  # noqa: ARG002
        return False  # a further round may follow

    def _generated(
        self,
        actor: State,
        prompts: Prompts,
        before: Rollouts | None,
        generation: SampleGeneration,
        at: Callable[[], State],
    ) -> PartialRollouts:
        responses = [*self._unfinished(before), *self._new(prompts)]
        identities = (actor.identity, prompts.identity, "" if before is None else before.identity)
        generation = replace(generation, is_committed_later=True)  # a further round may follow
        drawn, seconds, rounds = 0, 0.0, 0
        while sum(self._ended(responses)) < self.fewest:
            rounds += 1
            open_rows = [row for row, each in enumerate(responses) if each.finish == UNFINISHED]
            requests = {row: self._request(responses[row], prompts.step) for row in open_rows}
            key = self._sample_set(prompts.step, *identities, str(rounds))
            with generation.run([RequestBatch(self.params, [*requests.values()])], key, at) as generated:
                drawn, seconds = drawn + generated.tokens, seconds + generated.seconds
                for row, request in requests.items():
                    responses[row] = responses[row].continued(generated.samples[request.key], self.params)
        return replace(_record(responses), drawing=(drawn, seconds))

    def _new(self, prompts: Prompts) -> Iterator[_Response]:
        """Yield the responses that begin in this step, prompt-major."""
        for prompt in prompts.rows:
            for index in range(self.samples_per_prompt):
                # That of a response which one step generates.
                seed = derive_seed(self.seed, prompts.step, self.name.removeprefix("partial_"), prompt.id, index)
                yield _Response(prompt.token_ids, prompt.id, index, seed)

    def _unfinished(self, before: Rollouts | None) -> Iterator[_Response]:
        """Yield the responses of the groups that have not ended, in order."""
        if before is None:
            return
        for group in _groups(before, self.samples_per_prompt):
            if not _has_ended(before.finish[group].tolist()):
                yield from (_response(before, row) for row in group)

    def _ended(self, responses: Sequence[_Response]) -> Iterator[bool]:
        """Yield whether each group has ended."""
        size = self.samples_per_prompt
        for start in range(0, len(responses), size):
            yield _has_ended([each.finish for each in responses[start : start + size]])

    def _request(self, response: _Response, step: int) -> SampleRequest:
        done = len(response.tokens)
        left = self.params.new_tokens(len(response.prompt_tokens)) - done
        again = derive_seed(self.seed, step, self.name, response.prompt_id, response.index, done)
        return SampleRequest(
            key=response.key,
            prompt_tokens=(*response.prompt_tokens, *response.tokens),
            seed=again if done else response.seed,
            max_new_tokens=min(self.tokens, left),
            is_continued=done > 0,
            earlier_tokens=response.tokens,
        )


@dataclass(frozen=True)
class EndedGroupsStage:
    """Stage that takes the groups of which every response has ended, in order."""

    samples_per_prompt: int
    fingerprint: str
    name: str = "rollout"

    def run(self, partial: PartialRollouts) -> Rollouts:
        groups = _groups(partial, self.samples_per_prompt)
        rows = [row for group in groups if _has_ended(partial.finish[group].tolist()) for row in group]
        taken = take(select([partial], [(1, row) for row in rows], is_full=True, summary={}), [partial])
        width = int(taken.lengths.max())
        narrow = {name: getattr(taken, name)[:, :width] for name in ("tokens", "mask", "sampler_logprobs")}
        columns = {field.name: getattr(taken, field.name) for field in fields(Rollouts)}
        return Rollouts(**{**columns, **narrow, "drawing": None})


def _groups(rollouts: Rollouts, size: int) -> Iterator[list[int]]:
    """Yield the rows of each group."""
    for start in range(0, rollouts.num_seqs, size):
        yield list(range(start, start + size))


def _has_ended(finish: Sequence[int]) -> bool:
    return UNFINISHED not in finish


def _response(rollouts: Rollouts, row: int) -> _Response:
    """Return the response of a row."""
    length = int(rollouts.lengths[row])
    end = int(rollouts.prompt_lengths[: row + 1].sum())
    prompt = rollouts.prompt_tokens[end - int(rollouts.prompt_lengths[row]) : end]
    assert rollouts.segment_stamps is not None, "a partial rollout has segments"
    assert rollouts.segment_tokens is not None, "a partial rollout has segments"
    return _Response(
        prompt_tokens=tuple(prompt.tolist()),
        prompt_id=rollouts.prompt_ids[row],
        index=rollouts.sample_indices[row],
        seed=int(rollouts.seeds[row]),
        tokens=tuple(rollouts.tokens[row, :length].tolist()),
        logprobs=tuple(rollouts.sampler_logprobs[row, :length].tolist()),
        stamps=tuple(rollouts.segment_stamps[row]),
        counts=tuple(rollouts.segment_tokens[row]),
        finish=int(rollouts.finish[row]),
        text=rollouts.texts[row],
        sends=rollouts.sends[row],
    )


def _record(responses: Sequence[_Response]) -> PartialRollouts:
    lengths, tokens, logprobs = grids_of([(each.tokens, each.logprobs) for each in responses])
    return PartialRollouts(
        prompt_tokens=torch.tensor([token for each in responses for token in each.prompt_tokens], dtype=torch.int32),
        prompt_lengths=torch.tensor([len(each.prompt_tokens) for each in responses]),
        tokens=tokens,
        lengths=lengths,
        mask=torch.arange(tokens.shape[1])[None, :] < lengths[:, None],
        sampler_logprobs=logprobs,
        finish=torch.tensor([each.finish for each in responses]),
        seeds=torch.tensor([each.seed for each in responses]),
        prompt_ids=[each.prompt_id for each in responses],
        sample_indices=[each.index for each in responses],
        texts=[each.text for each in responses],
        stamps=[each.stamps[-1] for each in responses],
        sends=[each.sends for each in responses],
        segment_stamps=[list(each.stamps) for each in responses],
        segment_tokens=[list(each.counts) for each in responses],
    )
