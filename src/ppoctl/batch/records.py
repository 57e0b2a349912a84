"""The records that flow between stages: frozen, self-checking, and identified by their content.

B sequences, R response positions (of the longest response), T prompt tokens of all sequences together.
Per-token quantities live on the response grid `[B, R]`, left-justified: column r is the r-th response token and the
state just before it. `mask` is bool and True means *counts*; float values under the mask are exactly 0.

Token in, token out: the ids that were sampled are the ids that are trained on. Decoded responses are kept beside them
for scorers and people, and nothing is ever tokenised again; texts and ground truths of prompts are in `Prompts`.
"""

import json
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ppoctl import metric_registry
from ppoctl.batch import codec
from ppoctl.batch.carry import Carry as Carry
from ppoctl.batch.sequences import Sequences, require

TERMINATED = 0
"""The model ended the response itself (end-of-sequence token or a stop string)."""
TRUNCATED = 1
"""The response hit the length limit."""

REWARD_OK = 0
REWARD_TIMEOUT = 1
REWARD_ERROR = 2

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Record(Generic[Result]):
    """Base of all records: tensors plus JSON-able metadata, encoded as one safetensors file."""

    kind: ClassVar[str]
    measured: ClassVar[tuple[str, ...]] = ()
    """Fields that are a measurement of the same thing, equal to rounding when taken again. No part of identity."""
    unsaved: ClassVar[tuple[str, ...]] = ()
    """Fields that only this process knows: they are neither written nor part of identity."""
    dropped: ClassVar[tuple[str, ...]] = ()
    """Fields that records of before have and nobody reads."""

    @cached_property
    def encoded(self) -> bytes:
        """The canonical bytes of this record; equal content gives equal bytes."""
        return self._encode(without=())

    @cached_property
    def identity(self) -> str:
        """Content digest (hex), the name by which other stages' manifests refer to this record."""
        return codec.digest(self._encode(without=self.measured))

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs: without the encoding kept here, which is as large again."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _encode(self, *, without: tuple[str, ...]) -> bytes:
        left_out = (*without, *self.unsaved)
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        # A field that came later and has its default is not told: records of before keep their names.
        usual = {f.name: f.default for f in fields(self)}
        meta = {name: value for name, value in values.items() if name not in tensors and value != usual[name]}
        return codec.encode(self.kind, tensors, meta)

    @property
    def result(self) -> Result:
        """What a story gets to hold of it: itself, or what it leads to."""
        return cast(Result, self)

    def metrics(self) -> dict[str, float]:
        """What a person wants to see of this record: metric name -> number; its `summary`, where it has one.
        Journaled when it is committed."""
        summary: dict[str, float] = getattr(self, "summary", {})
        return dict(sorted(summary.items()))

    def timing_metrics(self) -> dict[str, float]:
        """Figures of how it was made, which a clock decides: metric name -> number. Never part of the record."""
        return {}

    def readable_files(self) -> dict[str, bytes]:
        """Further files of the artifact, for people: file name -> content."""
        return {}


@dataclass(frozen=True)
class Rollouts(Record["Rollouts"]):
    """B = prompts x samples responses, prompt-major order (sample 0..n-1 of prompt 0, then prompt 1, ...)."""

    kind: ClassVar[str] = "rollouts"
    measured: ClassVar[tuple[str, ...]] = ("sampler_logprobs", "sends")
    unsaved: ClassVar[tuple[str, ...]] = ("drawing",)

    prompt_tokens: Int[Tensor, " T"]
    """All prompts, concatenated; int32."""
    prompt_lengths: Int[Tensor, " B"]
    tokens: Int[Tensor, "B R"]
    """Response ids, the end token included; int32, 0 beyond `lengths`."""
    lengths: Int[Tensor, " B"]
    """Response positions present, counted or not."""
    mask: Bool[Tensor, "B R"]
    """Tokens the actor chose. A subset of the present ones: tool output is present and not counted."""
    sampler_logprobs: Float[Tensor, "B R"]
    """log-probs under the distribution that was sampled from, as the generator reports them."""
    finish: Int[Tensor, " B"]
    """TERMINATED or TRUNCATED."""
    seeds: Int[Tensor, " B"]
    prompt_ids: list[str]
    sample_indices: list[int]
    texts: list[str]
    """Decoded responses, special tokens skipped: what the scorer reads."""
    stamps: list[str]
    """The actor state each sample was made with, as `State.stamp`."""
    sends: list[int]
    """How often each sample was asked for: more than once where an engine died over it."""
    drawing: tuple[int, float] | None = None
    """Response tokens that were drawn for it here, and the seconds of drawing; None: it was recalled."""

    def __post_init__(self) -> None:
        require(not bool((self.mask & ~self.sequences.present).any()), "counted tokens are present")
        require(not bool(self.sampler_logprobs[~self.mask].any()), "log-probs under the mask are 0")
        for name in ("prompt_ids", "sample_indices", "texts", "stamps", "sends"):
            require(len(getattr(self, name)) == self.num_seqs, f"{name} has one entry per sequence")

    @cached_property
    def sequences(self) -> Sequences:
        """What models are given of it, always the same object."""
        return Sequences(self.prompt_tokens, self.prompt_lengths, self.tokens, self.lengths)

    @property
    def num_seqs(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def step(self) -> int:
        """The PPO step that drew them: the one after the actor's, which the stamps name."""
        return int(self.stamps[0].partition("@")[2].partition(":")[0]) + 1

    def metrics(self) -> dict[str, float]:
        lengths = self.lengths.float()
        return {
            metric_registry.ROLLOUT_RESPONSE_TOKENS_MEAN.name: float(lengths.mean()),
            metric_registry.ROLLOUT_RESPONSE_TOKENS_MAX.name: float(lengths.max()),
            metric_registry.ROLLOUT_TRUNCATED_FRAC.name: float((self.finish == TRUNCATED).float().mean()),
            metric_registry.ROLLOUT_RESENT_SEQS.name: float(sum(sends > 1 for sends in self.sends)),
            metric_registry.ROLLOUT_TOKENS.name: float(self.lengths.sum()),
        }

    def timing_metrics(self) -> dict[str, float]:
        tokens, seconds = self.drawing or (0, 0.0)
        return {metric_registry.THROUGHPUT_GENERATED.name: tokens / seconds} if tokens and seconds > 0 else {}


@dataclass(frozen=True)
class Rewards(Record["Rewards"]):
    """One score per response. Where the outcome is not ok there is no score: the row is left out of training."""

    kind: ClassVar[str] = "rewards"
    dropped: ClassVar[tuple[str, ...]] = ("shaped",)
    unsaved: ClassVar[tuple[str, ...]] = ("timing",)

    scores: Float[Tensor, " B"]
    """What the scorer gave; 0 where there is no score (see `outcomes`)."""
    outcomes: Int[Tensor, " B"]
    extras: dict[str, list[float | None]]
    """Further scorer figures by name, one per sequence (`lenient`, say); 0 without a score, None: not given."""
    outcome_messages: list[str]
    """Why a row has no score; "" where it has one."""
    truths: list[str | None]
    """Ground truth that each was scored against, for people: prompts are not stored. None: there is none."""
    token_scores: Float[Tensor, "B R"] | None = None
    """The score of each token, where the scorer gives such; training then sees these instead of `scores`."""
    timing: dict[str, float] | None = None
    """Figures of how long scoring took here; None: the record was recalled."""

    def __post_init__(self) -> None:
        ok = self.valid
        require(not bool(self.scores[~ok].any()), "a missing score is stored as 0")
        if self.token_scores is not None:
            require(not bool(self.token_scores[~ok].any()), "missing token scores are stored as 0")
        columns: dict[str, list[Any]] = {"outcome_messages": self.outcome_messages, "truths": self.truths}
        for name, column in (columns | self.extras).items():
            require(len(column) == len(self.scores), f"{name} has one entry per sequence")

    @property
    def valid(self) -> Bool[Tensor, " B"]:
        return self.outcomes == REWARD_OK

    def metrics(self) -> dict[str, float]:
        ok, failed, late = self.valid, self.outcomes >= REWARD_ERROR, self.outcomes == REWARD_TIMEOUT
        figures = {metric_registry.REWARD_ERROR_FRAC.name: float(failed.float().mean())}
        figures[metric_registry.REWARD_TIMEOUT_FRAC.name] = float(late.float().mean())
        if bool(ok.any()):
            figures[metric_registry.REWARD_SCORE_MEAN.name] = float(self.scores[ok].mean())
            figures[metric_registry.REWARD_SCORE_STD.name] = float(self.scores[ok].std(unbiased=False))
            for name, column in sorted(self.extras.items()):
                if given := [each for each, fine in zip(column, ok, strict=True) if fine and each is not None]:
                    figures[f"reward/{name}_mean"] = float(torch.tensor(given).mean())
        return figures

    def timing_metrics(self) -> dict[str, float]:
        return self.timing or {}


@dataclass(frozen=True)
class Values(Record["Values"]):
    """V of the state just before each response token, under the critic at `stamp`."""

    kind: ClassVar[str] = "values"

    values: Float[Tensor, "B R"]
    stamp: str
    behind: Float[Tensor, " B"] | None = None
    """V of the state behind the last token of each truncated response, 0 for the others; None: it was not asked."""


@dataclass(frozen=True)
class Logprobs(Record["Logprobs"]):
    """Log-probs of the response tokens that an update takes ratios to, and those under the reference where they are
    read."""

    kind: ClassVar[str] = "logprobs"
    measured: ClassVar[tuple[str, ...]] = ("gap",)

    stamp: str
    gap: dict[str, float]
    """Sampler against trainer: see `ppo.diagnostics.sampler_gap`; empty where the trainer was not asked."""
    actor: Float[Tensor, "B R"] | None = None
    """Under the actor, as the trainer or the sampler says; None: those of the update itself are meant."""
    entropy: Float[Tensor, "B R"] | None = None
    """None where the trainer was not asked: the update then says what they are."""
    reference: Float[Tensor, "B R"] | None = None
    full_kl: Float[Tensor, "B R"] | None = None
    """KL(actor || reference) of the whole distributions, where a penalty reads it instead of `reference`."""

    def metrics(self) -> dict[str, float]:
        return _gap_figures(self.gap)


@dataclass(frozen=True)
class Correction(Record["Correction"]):
    """What each token counts in the actor's loss, decided from sampler and trainer's log-probs of it."""

    kind: ClassVar[str] = "correction"

    weights: Float[Tensor, "B R"]
    """Factors of the advantages."""
    mask: Bool[Tensor, "B R"]
    """Tokens that count; a subset of the rollouts' mask."""
    summary: dict[str, float]

    def __post_init__(self) -> None:
        require(not bool(self.weights[~self.mask].any()), "weights under the mask are 0")


@dataclass(frozen=True)
class Advantages(Record["Advantages"]):
    """What the updates read."""

    kind: ClassVar[str] = "advantages"

    advantages: Float[Tensor, "B R"]
    returns: Float[Tensor, "B R"]
    token_rewards: Float[Tensor, "B R"]
    mask: Bool[Tensor, "B R"]
    """Tokens that train: the rollouts' mask without the rows that have no reward."""
    carry_out: dict[str, float]
    summary: dict[str, float]
    shaped: Float[Tensor, " B"] | None = None
    """What each response earned: its score after the arithmetic of `[reward]`, before any KL penalty; 0 where there
    is no score. None: a record of before it was kept here."""
    kl_coef: float | None = None
    """Coefficient of the KL penalty in this step, where it is another than in the next (see `carry_out`)."""

    def __post_init__(self) -> None:
        for name in ("advantages", "returns", "token_rewards"):
            require(not bool(getattr(self, name)[~self.mask].any()), f"{name} under the mask are 0")

    @property
    def carry(self) -> Carry:
        return Carry(**self.carry_out)

    @property
    def penalty_coef(self) -> float:
        """Coefficient of the KL penalty in this step; 0: there is none."""
        return self.carry.kl_coef if self.kl_coef is None else self.kl_coef


@dataclass(frozen=True)
class State:
    """A handle on weights + optimizer of one role. Small: the weights stay in the engine or on disk.

    States are identified by lineage (what they were made from), not by content: an update that is repeated on a
    GPU is not bit-equal, and still the same update. `replay` counts such repetitions.
    """

    role: str
    step: int
    """PPO steps this role has been updated in or carried through."""
    updates: int
    """Optimizer steps so far: what schedules count."""
    lineage: str
    replay: int = 0

    @property
    def stamp(self) -> str:
        suffix = f"+r{self.replay}" if self.replay else ""
        return f"{self.role}@{self.step}:{self.lineage[:16]}{suffix}"

    @property
    def identity(self) -> str:
        return f"{self.role}:{self.lineage}"


@dataclass(frozen=True)
class Update(Record[State]):
    """The small record an update commits instead of weights: where it led, and what it looked like."""

    kind: ClassVar[str] = "update"
    measured: ClassVar[tuple[str, ...]] = ("gap",)

    role: str
    step: int
    parent: str
    """Lineage of the state it started from."""
    lineage: str
    """Lineage of the state it made."""
    updates: int
    """Optimizer steps of the state it made, all told."""
    per_minibatch: dict[str, list[float]]
    """loss, grad_norm, lr, ... one entry per optimizer step, in order."""
    summary: dict[str, float]
    """Diagnostics over the whole update: metric name -> number."""
    gap: dict[str, float] | None = None
    """Sampler against trainer, where the log-probs of the step do not say it."""

    @property
    def result(self) -> State:
        """The state that it made."""
        return State(role=self.role, step=self.step, updates=self.updates, lineage=self.lineage)

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), **_gap_figures(self.gap or {})}


@dataclass(frozen=True)
class Evaluation(Record["Evaluation"]):
    """One evaluation of one actor state on one or more sets; per-sample rows are in `rows`."""

    kind: ClassVar[str] = "evaluation"

    stamp: str
    summary: dict[str, float]
    rows: list[dict[str, Any]]

    def readable_files(self) -> dict[str, bytes]:
        lines = (json.dumps(row, sort_keys=True) + "\n" for row in self.rows)
        return {"samples.jsonl": "".join(lines).encode("ascii")}


def _gap_figures(gap: dict[str, float]) -> dict[str, float]:
    return {metric_registry.named("mismatch", name): value for name, value in sorted(gap.items())}


RECORDS: dict[str, type[Record[Any]]] = {
    record.kind: record
    for record in (Rollouts, Rewards, Values, Logprobs, Correction, Advantages, Update, Evaluation)
}


def decode(data: bytes) -> Record[Any]:
    """The record that `Record.encoded` wrote. A field that an older version did not have gets its declared default;
    where one is there that nobody reads any more, the record keeps the identity that it was written with. Raises
    ValueError on bytes that are no record, and naming a field that is missing, unknown or breaks a law."""
    kind, tensors, meta = codec.decode(data)
    if kind not in RECORDS:
        raise ValueError(f"unknown record kind `{kind}`")
    cls = RECORDS[kind]
    found = {name: value for name, value in {**tensors, **meta}.items() if name not in cls.dropped}
    known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(cls)}
    unknown = sorted(found.keys() - known.keys())
    missing = [name for name, is_required in known.items() if is_required and name not in found]
    if unknown or missing:
        what = f"unknown field `{unknown[0]}`" if unknown else f"no field `{missing[0]}`"
        raise ValueError(f"a record of kind `{kind}` with {what}")
    record = cls(**found)
    if len(found) < len(tensors) + len(meta):
        kept = [{name: each for name, each in of.items() if name not in cls.measured} for of in (tensors, meta)]
        record.__dict__["identity"] = codec.digest(codec.encode(kind, *kept))
    return record
