"""10-rollout: generate responses with the actor."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ppoctl.algorithms.stages.generation import OnSample, RequestBatch, SampleGeneration, ignore_sample
from ppoctl.algorithms.stages.overlapped_scoring import OverlappedScorer
from ppoctl.core.batch.episodes import EpisodeSettings
from ppoctl.core.batch.prompts import Prompt, Prompts
from ppoctl.core.batch.records import TERMINATED, TRUNCATED, Rollouts, State
from ppoctl.core.batch.rollouts import experts_of, grids_of
from ppoctl.core.batch.seeds import derive_seed
from ppoctl.core.ports import Gate, Models, OnProgress, Sample, SampleRequest, SampleSetKey, SamplingParams


@dataclass(frozen=True)
class RolloutStage:
    """Stage that generates `samples_per_prompt` responses per prompt. Finished samples survive a crash of the
    stage."""

    models: Models
    generation: SampleGeneration
    params: SamplingParams
    samples_per_prompt: int
    seed: int
    fingerprint: str
    episodes: EpisodeSettings | None = None
    """Environment and limits of the responses; None: a response has one turn."""
    on_sample: Callable[[Prompt, Sample], None] | None = None
    """Called with each finished response, unless the stage runs beside others; None: not called."""
    next_scores: OverlappedScorer | None = None
    """Scorer of the responses of a stage that runs beside others; None: the reward stage scores them."""
    name: str = "rollout"
    is_of_later_step: bool = False
    """Whether the next step trains on the responses."""

    def run(self, actor: State, prompts: Prompts, before: Rollouts | None = None) -> Rollouts:
        """Generate. Only `PartialRolloutStage` has the record `before`."""
        return self._generated(actor, prompts, before, self.generation, lambda: self.models.stamped(actor))

    def begin(
        self, actor: State, prompts: Prompts, before: Rollouts | None = None
    ) -> Callable[[Gate, OnProgress], Rollouts]:
        """Load the weights into the engines. Return a function that generates, which does not use the trainer and may
        therefore run in another thread while the trainer trains. The function asks its own gate whether to stop."""
        stamped = actor
        if not self._is_finished(actor, prompts):
            stamped = self.models.stamped(actor)
            self.generation.generator.prepare(stamped)

        stage = replace(self, on_sample=None if self.next_scores is None else self.next_scores.start_of_next)

        def generate(gate: Gate, progress: OnProgress) -> Rollouts:
            # The main thread stops its own clock when it loads a model.
            of_thread = {"gate": gate, "progress": progress, "clock": time.monotonic, "is_committed_later": True}
            generation = replace(self.generation, **of_thread)  # type: ignore[arg-type]
            return stage._generated(actor, prompts, before, generation, lambda: stamped)

        return generate

    def dropped(self) -> None:
        """Cancel the scores of the responses, which are not needed."""
        if self.next_scores is not None:
            self.next_scores.cancel_next()

    def _is_finished(self, actor: State, prompts: Prompts) -> bool:
        """Whether an earlier attempt finished every sample, so that the engines need no weights."""
        requests, sample_set = self._requests(actor, prompts)
        return len(self.generation.parts.load(sample_set)) == len(requests)

    def _generated(
        self,
        actor: State,
        prompts: Prompts,
        before: Rollouts | None,  # noqa: ARG002 - see `run`
        generation: SampleGeneration,
        at: Callable[[], State],
    ) -> Rollouts:
        requests, sample_set = self._requests(actor, prompts)
        on_sample = self._sample_callback(prompts, requests)
        batches = [RequestBatch(self.params, requests, episodes=self.episodes)]
        with generation.run(batches, sample_set, at, on_sample) as generated:
            record = assemble(
                prompts, requests, generated.samples, samples=self.samples_per_prompt, stamp=actor.stamp
            )
            idle_s = None if self.episodes is None else generated.idle_s
            drawing = generated.tokens, generated.seconds
            return replace(record, drawing=drawing, idle_s=idle_s, is_of_later_step=self.is_of_later_step)

    def _requests(self, actor: State, prompts: Prompts) -> tuple[list[SampleRequest], SampleSetKey]:
        """Return the requests of the stage, and the identity of their samples."""
        requests = sample_requests(prompts, samples=self.samples_per_prompt, seed=self.seed, stage=self.name)
        return requests, self._sample_set(prompts.step, actor.identity, prompts.identity)

    def _sample_set(self, step: int, *identities: str) -> SampleSetKey:
        key = hashlib.sha256("\n".join((*identities, self.fingerprint)).encode()).hexdigest()
        return SampleSetKey(step, self.name, key)

    def _sample_callback(self, prompts: Prompts, requests: Sequence[SampleRequest]) -> OnSample:
        if (on_sample := self.on_sample) is None:
            return ignore_sample
        owners = (prompt for prompt in prompts.rows for _ in range(self.samples_per_prompt))
        prompt_of = {request.key: owner for request, owner in zip(requests, owners, strict=True)}
        return lambda sample: on_sample(prompt_of[sample.key], sample)


@dataclass(frozen=True)
class TakenOrGeneratedStage:
    """Stage that takes the responses that the step before generated, if there are any, and otherwise generates."""

    generates: RolloutStage

    @property
    def name(self) -> str:
        return self.generates.name

    @property
    def fingerprint(self) -> str:
        return self.generates.fingerprint

    def run(self, actor: State, prompts: Prompts, before: Rollouts | None) -> Rollouts:
        return self.generates.run(actor, prompts) if before is None else before


def sample_requests(prompts: Prompts, *, samples: int, seed: int, stage: str = "rollout") -> list[SampleRequest]:
    """Return one request per sample, prompt-major.

    Each request has its own seed: equal prompts and two rounds of a step (`rollout.2`) must not give equal samples.
    """
    return requests_of(prompts, samples, (seed, prompts.step, stage))


def requests_of(prompts: Prompts, samples: int, seed: Sequence[object], prefix: str = "") -> list[SampleRequest]:
    """Return one request per sample, prompt-major, with a seed derived from `seed`, the prompt and the sample
    number."""
    return [
        SampleRequest(
            key=f"{prefix}{prompt.id}#{index}",
            prompt_tokens=prompt.token_ids,
            seed=derive_seed(*seed, prompt.id, index),
            prompt=prompt,
        )
        for prompt in prompts.rows
        for index in range(samples)
    ]


def assemble(
    prompts: Prompts, requests: list[SampleRequest], done: Mapping[str, Sample], *, samples: int, stamp: str = ""
) -> Rollouts:
    """Return the record in request order, independent of the order in which samples finished. `stamp` is that of an
    episode without a turn, for which the actor generated nothing."""
    in_order = [done[request.key] for request in requests]
    owners = [prompt for prompt in prompts.rows for _ in range(samples)]
    prompt_ids = [sample.prompt_tokens or owner.token_ids for sample, owner in zip(in_order, owners, strict=True)]
    lengths, tokens, logprobs = grids_of([(sample.tokens, sample.logprobs) for sample in in_order])
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, sample in enumerate(in_order):
        for start, end in [(0, len(sample.tokens))] if sample.episode is None else sample.episode.spans():
            mask[row, start:end] = True
    episodes = [sample.episode.as_json() for sample in in_order if sample.episode is not None]
    return Rollouts(
        prompt_tokens=torch.tensor([token for ids in prompt_ids for token in ids], dtype=torch.int32),
        prompt_lengths=torch.tensor([len(ids) for ids in prompt_ids]),
        tokens=tokens,
        lengths=lengths,
        mask=mask,
        sampler_logprobs=logprobs,
        finish=torch.tensor([TERMINATED if sample.terminated else TRUNCATED for sample in in_order]),
        seeds=torch.tensor([request.seed for request in requests]),
        prompt_ids=[owner.id for owner in owners],
        sample_indices=[index for _ in prompts.rows for index in range(samples)],
        texts=[sample.text for sample in in_order],
        stamps=[stamp if _has_no_turn(sample) else sample.stamp for sample in in_order],
        sends=[sample.sends for sample in in_order],
        episodes=episodes or None,
        experts=experts_of([(len(ids), sample) for ids, sample in zip(prompt_ids, in_order, strict=True)]),
    )


def _has_no_turn(sample: Sample) -> bool:
    return sample.episode is not None and not sample.episode.turns
