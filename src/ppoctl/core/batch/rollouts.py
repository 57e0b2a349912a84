"""Records of responses: those that a step trains on, those that several steps generate, and greedy ones. Letters and
conventions are those of `records`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from ppoctl.core import metric_registry
from ppoctl.core.batch.episode_metrics import episode_metrics
from ppoctl.core.batch.record import Record
from ppoctl.core.batch.requests import Sample
from ppoctl.core.batch.sequences import Sequences, require
from ppoctl.core.batch.update import step_of

TERMINATED = 0
"""The model ended the response itself (end-of-sequence token or stop string)."""
TRUNCATED = 1
"""The length limit ended the response."""
UNFINISHED = 2
"""The budget of a step ended the generation, and the next step continues the response."""


@dataclass(frozen=True)
class Rollouts(Record["Rollouts"]):
    """Prompts x samples responses in prompt-major order (sample 0..n-1 of prompt 0, then prompt 1, ...)."""

    kind: ClassVar[str] = "rollouts"
    measured: ClassVar[tuple[str, ...]] = ("sampler_logprobs", "sends")
    unsaved: ClassVar[tuple[str, ...]] = ("drawing", "idle_s", "is_of_later_step")

    prompt_tokens: Int[Tensor, " T"]
    """All prompts, concatenated; int32."""
    prompt_lengths: Int[Tensor, " B"]
    tokens: Int[Tensor, "B R"]
    """Response ids, including the end token; int32, 0 beyond `lengths`."""
    lengths: Int[Tensor, " B"]
    """Number of response positions with a token, masked out or not."""
    mask: Bool[Tensor, "B R"]
    """Tokens that the actor sampled. They are a subset of the present tokens: tool output is present but masked
    out."""
    sampler_logprobs: Float[Tensor, "B R"]
    """Log-probs under the distribution that was sampled from, as the generator (vLLM) returned them."""
    finish: Int[Tensor, " B"]
    """TERMINATED or TRUNCATED."""
    seeds: Int[Tensor, " B"]
    """Seed of the request for the first token."""
    prompt_ids: list[str]
    sample_indices: list[int]
    texts: list[str]
    """Decoded responses without special tokens: the input of the scorer."""
    stamps: list[str]
    """`State.stamp` of the actor that generated each sample, or its last token."""
    sends: list[int]
    """Number of times each request was sent to an engine: more than 1 if an engine died while generating."""
    episodes: list[dict[str, Any]] | None = None
    """`Episode.as_json` of each response; None: responses have one turn. A response has all tokens of its episode;
    the mask excludes the observations."""
    segment_stamps: list[list[str]] | None = None
    """`State.stamp` of the actor of each segment of a response, in order: the tokens that one step generated. None:
    each response has one segment."""
    segment_tokens: list[list[int]] | None = None
    """Number of tokens of each segment."""
    experts: UInt8[Tensor, "N E"] | None = None
    """Experts that the generator's routers chose for each input token, row by row (`Sequences.experts`); None: not
    stored."""
    drawing: tuple[int, float] | None = None
    """Number of response tokens generated in this process, and seconds of generation; None: the record was loaded."""
    idle_s: float | None = None
    """Seconds of generation in which all open episodes waited for environments; None: the record was loaded, or
    it has no episodes."""
    is_of_later_step: bool | None = None
    """Whether a later step trains on the responses, and reports their metrics; None: the record was loaded."""

    def __post_init__(self) -> None:
        require(not bool((self.mask & ~self.sequences.present).any()), "unmasked tokens are present")
        require(not bool(self.sampler_logprobs[~self.mask].any()), "masked-out log-probs are 0")
        for name in (
            "prompt_ids",
            "sample_indices",
            "texts",
            "stamps",
            "sends",
            "episodes",
            "segment_stamps",
            "segment_tokens",
        ):
            column = getattr(self, name)
            require(column is None or len(column) == self.num_seqs, f"{name} has one entry per sequence")
        if self.segment_tokens is not None:
            require([*map(sum, self.segment_tokens)] == self.lengths.tolist(), "segments have all tokens")

    @cached_property
    def sequences(self) -> Sequences:
        """Input of models. The property always returns the same object."""
        return Sequences(self.prompt_tokens, self.prompt_lengths, self.tokens, self.lengths)

    @cached_property
    def routed_sequences(self) -> Sequences:
        """Input of the actor: with the experts that the generator's routers chose, if they are stored."""
        return self.sequences if self.experts is None else replace(self.sequences, experts=self.experts.short())

    @property
    def input_lengths(self) -> Int[Tensor, " B"]:
        """Number of input tokens of each row."""
        return self.sequences.input_lengths

    @property
    def num_seqs(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def step(self) -> int:
        """PPO step that generated the rollouts, or the last of several: one more than the step of the actor, which
        the stamps contain."""
        return max(map(step_of, self.stamps[:1] if self.segment_stamps is None else self.stamps)) + 1

    @property
    def oldest_stamps(self) -> list[str]:
        """`State.stamp` of the actor that generated the first token of each sample."""
        return self.stamps if self.segment_stamps is None else [stamps[0] for stamps in self.segment_stamps]

    def metrics(self) -> dict[str, float]:
        if self.is_of_later_step:
            return {}
        lengths = self.lengths.float()
        return {
            metric_registry.ROLLOUT_RESPONSE_TOKENS_MEAN.name: float(lengths.mean()),
            metric_registry.ROLLOUT_RESPONSE_TOKENS_MAX.name: float(lengths.max()),
            metric_registry.ROLLOUT_TRUNCATED_FRAC.name: float((self.finish == TRUNCATED).float().mean()),
            metric_registry.ROLLOUT_RESENT_SEQS.name: float(sum(sends > 1 for sends in self.sends)),
            metric_registry.ROLLOUT_TOKENS.name: float(self.lengths.sum()),
            **(episode_metrics(self.episodes) if self.episodes else {}),
        }

    def timing_metrics(self) -> dict[str, float]:
        tokens, seconds = self.drawing or (0, 0.0)
        if not tokens or seconds <= 0:
            return {}
        metrics = {metric_registry.THROUGHPUT_GENERATED.name: tokens / seconds}
        metrics[metric_registry.TIME_GENERATION_S.name] = seconds
        if self.idle_s is not None:
            metrics[metric_registry.THROUGHPUT_ENGINE_IDLE_FRAC.name] = self.idle_s / seconds
        return metrics


@dataclass(frozen=True)
class PartialRollouts(Rollouts):
    """Groups of responses that are generated over several steps, the oldest groups first: those that have ended, and
    those with a response whose `finish` is UNFINISHED. They are never trained on: the groups that have ended become
    `Rollouts`."""

    kind: ClassVar[str] = "partial_rollouts"

    def metrics(self) -> dict[str, float]:
        return {metric_registry.ROLLOUT_UNFINISHED_SEQS.name: float((self.finish == UNFINISHED).sum())}


@dataclass(frozen=True)
class GreedyRollouts(Rollouts):
    """One greedy response to each prompt of a step. They are never trained on: their rewards are baselines."""

    kind: ClassVar[str] = "greedy_rollouts"

    def metrics(self) -> dict[str, float]:
        return {
            metric_registry.BASELINE_RESPONSE_TOKENS_MEAN.name: float(self.lengths.float().mean()),
            metric_registry.BASELINE_TRUNCATED_FRAC.name: float((self.finish == TRUNCATED).float().mean()),
            metric_registry.BASELINE_TOKENS.name: float(self.lengths.sum()),
        }

    def timing_metrics(self) -> dict[str, float]:
        return {}


def grids_of(
    responses: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> tuple[Int[Tensor, " B"], Int[Tensor, "B R"], Float[Tensor, "B R"]]:
    """Return lengths, token ids and log-probs of responses, which have ids and log-probs of their tokens."""
    lengths = torch.tensor([len(ids) for ids, _ in responses])
    shape = (len(responses), int(lengths.max()))
    tokens, logprobs = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.float32)
    for row, (ids, of_ids) in enumerate(responses):
        tokens[row, : len(ids)] = torch.tensor(ids)
        logprobs[row, : len(ids)] = torch.tensor(of_ids)
    return lengths, tokens, logprobs


def experts_of(samples: Sequence[tuple[int, Sample]]) -> UInt8[Tensor, "N E"] | None:
    """Return the experts of the input tokens of samples, each with the number of tokens of its prompt; None: they
    were not requested."""
    joined = bytearray(b"".join(sample.experts for _, sample in samples))
    tokens = sum(prompt + len(sample.tokens) - 1 for prompt, sample in samples)
    return torch.frombuffer(joined, dtype=torch.uint8).view(tokens, -1) if joined else None
