"""10-rollout: draw responses from the actor."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ppoctl.batch.records import TERMINATED, TRUNCATED, Prompts, Record, Rollouts, State
from ppoctl.batch.seeds import derive_seed
from ppoctl.clock import WORK
from ppoctl.ports import Gate, Generator, Models, Sample, SampleParts, SampleRequest, SamplingParams
from ppoctl.stages.drawing import one_turn

Progress = Callable[[int, int, int], None]
"""(finished samples, all samples, tokens drawn so far; recalled ones are not)."""


@dataclass(frozen=True)
class RolloutStage:
    """Draws `samples_per_prompt` responses per prompt; finished ones survive a crash of the stage."""

    models: Models
    generator: Generator
    parts: SampleParts
    params: SamplingParams
    samples_per_prompt: int
    seed: int
    fingerprint: str
    gate: Gate
    progress: Progress
    name: str = "rollout"

    def run(self, actor: State, prompts: Prompts) -> Rollouts:
        requests = sample_requests(prompts, samples=self.samples_per_prompt, seed=self.seed, stage=self.name)
        key = hashlib.sha256("\n".join((actor.identity, prompts.identity, self.fingerprint)).encode()).hexdigest()
        done = self.parts.recall(step=prompts.step, stage=self.name, fingerprint=key)
        missing = [request for request in requests if request.key not in done]
        with self.parts.keep(step=prompts.step, stage=self.name, fingerprint=key) as keep:
            drawing = self._draw(actor, missing, done, keep) if missing else None
        return replace(assemble(prompts, requests, done, samples=self.samples_per_prompt), drawing=drawing)

    def _draw(
        self,
        actor: State,
        missing: Sequence[SampleRequest],
        done: dict[str, Sample],
        keep: Callable[[Sample], None],
    ) -> tuple[int, float]:
        """Adds the missing samples to those that are done: their tokens, and the seconds of drawing."""
        total, tokens = len(done) + len(missing), 0
        self.generator.prepare(self.models.stamped(actor))
        self.progress(len(done), total, 0)
        started = WORK.now()
        with one_turn(self.generator, missing, self.params) as samples:
            for sample in samples:
                done[sample.key] = sample
                tokens += len(sample.tokens)
                keep(sample)
                self.progress(len(done), total, tokens)
                self.gate.between()
        return tokens, WORK.now() - started

    def result(self, record: Record) -> Rollouts:
        assert isinstance(record, Rollouts)
        return record


def sample_requests(prompts: Prompts, *, samples: int, seed: int, stage: str = "rollout") -> list[SampleRequest]:
    """One request per sample, prompt-major. Each has its own seed: equal prompts must not give equal samples, nor do
    two rounds of one step (`rollout.2`)."""
    return [
        SampleRequest(
            key=f"{prompt.id}#{index}",
            prompt_tokens=prompt.token_ids,
            seed=derive_seed(seed, prompts.step, stage, prompt.id, index),
        )
        for prompt in prompts.rows
        for index in range(samples)
    ]


def assemble(
    prompts: Prompts, requests: list[SampleRequest], done: Mapping[str, Sample], *, samples: int
) -> Rollouts:
    """The record, in request order whatever order the samples finished in."""
    drawn = [done[request.key] for request in requests]
    owners = [prompt for prompt in prompts.rows for _ in range(samples)]
    lengths = torch.tensor([len(sample.tokens) for sample in drawn])
    shape = (len(drawn), int(lengths.max()))
    tokens = torch.zeros(shape, dtype=torch.int64)
    logprobs = torch.zeros(shape, dtype=torch.float32)
    for row, sample in enumerate(drawn):
        tokens[row, : len(sample.tokens)] = torch.tensor(sample.tokens)
        logprobs[row, : len(sample.tokens)] = torch.tensor(sample.logprobs)
    return Rollouts(
        prompt_tokens=torch.tensor([token for owner in owners for token in owner.token_ids]),
        prompt_lengths=torch.tensor([len(owner.token_ids) for owner in owners]),
        tokens=tokens,
        lengths=lengths,
        mask=torch.arange(shape[1])[None, :] < lengths[:, None],
        sampler_logprobs=logprobs,
        finish=torch.tensor([TERMINATED if sample.terminated else TRUNCATED for sample in drawn]),
        seeds=torch.tensor([request.seed for request in requests]),
        prompt_ids=[owner.id for owner in owners],
        sample_indices=[index for _ in prompts.rows for index in range(samples)],
        texts=[sample.text for sample in drawn],
        answers=[owner.answer for owner in owners],
        stamps=[sample.stamp for sample in drawn],
        sends=[sample.sends for sample in drawn],
    )
