"""Records that stages exchange: immutable, self-checking, and identified by their content.

B is the number of sequences, R the number of response positions (of the longest response), T the number of prompt
tokens of all sequences. Per-token quantities are on the response grid `[B, R]`, left-justified: column r is the r-th
response token and the state just before it. In `mask`, True means *in the loss*; floats are exactly 0 where masked
out.

The ids that were sampled are the ids that are trained on. Decoded responses are stored for scorers and people;
nothing is tokenized again. Texts and ground truths of prompts are in `Prompts`.
"""

import json
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from ppoctl.core import metric_registry, speed_metrics
from ppoctl.core.batch import codec
from ppoctl.core.batch.carry import Carry as Carry
from ppoctl.core.batch.record import Record as Record
from ppoctl.core.batch.rollouts import TERMINATED as TERMINATED
from ppoctl.core.batch.rollouts import TRUNCATED as TRUNCATED
from ppoctl.core.batch.rollouts import UNFINISHED as UNFINISHED
from ppoctl.core.batch.rollouts import GreedyRollouts as GreedyRollouts
from ppoctl.core.batch.rollouts import PartialRollouts as PartialRollouts
from ppoctl.core.batch.rollouts import Rollouts as Rollouts
from ppoctl.core.batch.sequences import require
from ppoctl.core.batch.update import State as State
from ppoctl.core.batch.update import Update as Update
from ppoctl.core.batch.update import gap_metrics

REWARD_OK = 0
REWARD_TIMEOUT = 1
REWARD_ERROR = 2


@dataclass(frozen=True)
class Rewards(Record["Rewards"]):
    """One score per response. If the outcome is not ok, there is no score and the row is excluded from training."""

    kind: ClassVar[str] = "rewards"
    dropped: ClassVar[tuple[str, ...]] = ("shaped",)
    unsaved: ClassVar[tuple[str, ...]] = ("timing", "of_rollouts")

    scores: Float[Tensor, " B"]
    """Scores as returned by the scorer; 0 without a score (see `outcomes`)."""
    outcomes: Int[Tensor, " B"]
    extras: dict[str, list[float | None]]
    """Additional metrics of the scorer by name, one value per sequence; 0 without a score, None: not returned."""
    outcome_messages: list[str]
    """Reason why a row has no score; "" if it has a score."""
    truths: list[str | None]
    """Ground truth of each response, for people, because prompts are not stored; None: no ground truth."""
    token_scores: Float[Tensor, "B R"] | None = None
    """Score of each token, if the scorer returns them; training then uses these instead of `scores`. A row with NaN
    has none: its score in `scores` counts at its last unmasked token."""
    timing: dict[str, float] | None = None
    """Metrics of how long scoring took in this process; None: the record was loaded."""
    of_rollouts: dict[str, float] | None = None
    """Metrics of the responses, if the step before generated them; None: it did not, or the record was loaded."""

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
        metrics = {metric_registry.REWARD_ERROR_FRAC.name: float(failed.float().mean()), **(self.of_rollouts or {})}
        metrics[metric_registry.REWARD_TIMEOUT_FRAC.name] = float(late.float().mean())
        if bool(ok.any()):
            metrics[metric_registry.REWARD_SCORE_MEAN.name] = float(self.scores[ok].mean())
            metrics[metric_registry.REWARD_SCORE_STD.name] = float(self.scores[ok].std(unbiased=False))
            for name, column in sorted(self.extras.items()):
                if given := [value for value, is_ok in zip(column, ok, strict=True) if is_ok and value is not None]:
                    metrics[f"reward/{name}_mean"] = float(torch.tensor(given).mean())
        return metrics

    def timing_metrics(self) -> dict[str, float]:
        return self.timing or {}


@dataclass(frozen=True)
class GreedyRewards(Rewards):
    """One score per greedy response."""

    kind: ClassVar[str] = "greedy_rewards"

    def metrics(self) -> dict[str, float]:
        metrics = {metric_registry.BASELINE_ERROR_FRAC.name: float((~self.valid).float().mean())}
        if bool(self.valid.any()):
            metrics[metric_registry.BASELINE_SCORE_MEAN.name] = float(self.scores[self.valid].mean())
        return metrics

    def timing_metrics(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Values(Record["Values"]):
    """Values of the states just before each response token, under the critic at `stamp`."""

    kind: ClassVar[str] = "values"

    values: Float[Tensor, "B R"]
    stamp: str
    behind: Float[Tensor, " B"] | None = None
    """Bootstrap value: value of the state after the last token of a truncated response, else 0; None: not
    computed."""


@dataclass(frozen=True)
class Logprobs(Record["Logprobs"]):
    """Old log-probs of the response tokens, for ratios, and the reference's log-probs if a KL penalty reads them."""

    kind: ClassVar[str] = "logprobs"
    measured: ClassVar[tuple[str, ...]] = ("gap",)

    stamp: str
    gap: dict[str, float]
    """Sampler/trainer log-prob gap (`formulas.diagnostics.sampler_gap`); empty: the trainer has no log-probs."""
    actor: Float[Tensor, "B R"] | None = None
    """Log-probs of the actor, from the trainer or the sampler; None: the log-probs of the update itself are used."""
    entropy: Float[Tensor, "B R"] | None = None
    """Entropies in nats; None: not computed by this stage. The update then computes them."""
    reference: Float[Tensor, "B R"] | None = None
    full_kl: Float[Tensor, "B R"] | None = None
    """KL(actor || reference) over the full vocabulary, if a penalty reads it instead of `reference`."""
    values: Float[Tensor, "B R"] | None = None
    """Values by a value head on the actor's model, which the same forward pass computes; None: there is no such
    head."""
    behind: Float[Tensor, " B"] | None = None
    """Bootstrap values by this head, as in `Values`."""
    experts: UInt8[Tensor, "N E"] | None = None
    """Experts that the trainer's routers chose for each input token, row by row (`Sequences.experts`); None: not
    stored."""
    input_lengths: Int[Tensor, " B"] | None = None
    """Number of input tokens of each row; None: no experts are stored."""

    def metrics(self) -> dict[str, float]:
        return gap_metrics(self.gap)


@dataclass(frozen=True)
class Correction(Record["Correction"]):
    """Importance weights and mask of the actor's loss, computed from the sampler's and trainer's log-probs."""

    kind: ClassVar[str] = "correction"

    weights: Float[Tensor, "B R"]
    """Factors of the advantages."""
    mask: Bool[Tensor, "B R"]
    """Tokens in the actor's loss; a subset of the rollouts' mask."""
    summary: dict[str, float]

    def __post_init__(self) -> None:
        require(not bool(self.weights[~self.mask].any()), "masked-out weights are 0")


@dataclass(frozen=True)
class Advantages(Record["Advantages"]):
    """Advantages, returns and token rewards: the inputs of the updates."""

    kind: ClassVar[str] = "advantages"

    advantages: Float[Tensor, "B R"]
    token_rewards: Float[Tensor, "B R"]
    mask: Bool[Tensor, "B R"]
    """Tokens to train on: the rollouts' mask without the rows that have no reward."""
    carry_out: dict[str, float]
    summary: dict[str, float]
    returns: Float[Tensor, "B R"] | None = None
    """Returns that the critic learns; None: no critic learns."""
    shaped: Float[Tensor, " B"] | None = None
    """Reward of each response after reward shaping, before any KL penalty; 0 without a score. None: not stored."""
    kl_coef: float | None = None
    """Coefficient of the KL penalty in this step, if the next step has another coefficient (see `carry_out`)."""
    trains_actor: bool | None = None
    """Whether this step trains the actor (`ppo.critic_only_until`); None: every step with an actor update does."""

    def __post_init__(self) -> None:
        for name in ("advantages", "returns", "token_rewards"):
            require((x := getattr(self, name)) is None or not bool(x[~self.mask].any()), f"masked-out {name} are 0")

    @property
    def carry(self) -> Carry:
        return Carry(**self.carry_out)

    @property
    def penalty_coef(self) -> float:
        """Coefficient of the KL penalty in this step; 0: no penalty."""
        return self.carry.kl_coef if self.kl_coef is None else self.kl_coef


@dataclass(frozen=True)
class Evaluation(Record["Evaluation"]):
    """One evaluation of an actor state on one or more sets. `rows` has one entry per sample."""

    kind: ClassVar[str] = "evaluation"

    stamp: str
    summary: dict[str, float]
    rows: list[dict[str, Any]]

    def readable_files(self) -> dict[str, bytes]:
        lines = (json.dumps(row, sort_keys=True) + "\n" for row in self.rows)
        return {"samples.jsonl": "".join(lines).encode("ascii")}


@dataclass(frozen=True)
class Selection(Record["Selection"]):
    """Samples that the step continues with, as rows of its rounds. A sample may occur several times.

    `selection.take` selects these rows of other records.
    """

    kind: ClassVar[str] = "selection"
    unsaved: ClassVar[tuple[str, ...]] = ("cancelled",)

    rounds: Int[Tensor, " B"]
    """Round of each selected sample, from 1."""
    rows: Int[Tensor, " B"]
    """Row of each selected sample in the rollouts of its round, from 0."""
    prompt_ids: list[str]
    sample_indices: list[int]
    is_full: bool
    """Whether the selection has as many samples as the step requires; otherwise another round follows."""
    summary: dict[str, float]
    cancelled: tuple[int, float] | None = None
    """Number of tokens of the next round that this process generated and did not use, and the seconds that this took;
    None: rounds do not overlap, or the record was loaded."""

    def __post_init__(self) -> None:
        require(bool((self.rounds >= 1).all()) and bool((self.rows >= 0).all()), "rounds count from 1, rows from 0")
        for name in ("prompt_ids", "sample_indices"):
            require(len(getattr(self, name)) == len(self.rounds), f"{name} has one entry per selected sample")

    def manifest_fields(self) -> dict[str, Any]:
        return {"is_full": self.is_full}

    def timing_metrics(self) -> dict[str, float]:
        if self.cancelled is None:
            return {}
        tokens, seconds = self.cancelled
        return {
            speed_metrics.GROUPS_CANCELLED_TOKENS.name: float(tokens),
            speed_metrics.TIME_CANCELLED_S.name: seconds,
        }


RECORDS: dict[str, type[Record[Any]]] = {
    record.kind: record
    for record in (
        Rollouts,
        Rewards,
        PartialRollouts,
        GreedyRollouts,
        GreedyRewards,
        Values,
        Logprobs,
        Correction,
        Advantages,
        Update,
        Evaluation,
        Selection,
    )
}


def decode(data: bytes) -> Record[Any]:
    """Return the record that `Record.encoded` wrote. A field that the writing version did not have gets its default.

    A record with a dropped field keeps the identity that it was written with. Raises ValueError if the bytes are not
    a record, or if a field is missing, unknown or violates an invariant; the error names the field.
    """
    kind, tensors, meta = codec.decode(data)
    if kind not in RECORDS:
        raise ValueError(f"unknown record kind `{kind}`")
    cls = RECORDS[kind]
    values = {name: value for name, value in {**tensors, **meta}.items() if name not in cls.dropped}
    known = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(cls)}
    unknown = sorted(values.keys() - known.keys())
    missing = [name for name, is_required in known.items() if is_required and name not in values]
    if unknown or missing:
        problem = f"unknown field `{unknown[0]}`" if unknown else f"no field `{missing[0]}`"
        raise ValueError(f"a record of kind `{kind}` with {problem}")
    record = cls(**values)
    if len(values) < len(tensors) + len(meta):
        kept = [{key: value for key, value in part.items() if key not in cls.measured} for part in (tensors, meta)]
        record.__dict__["identity"] = codec.digest(codec.encode(kind, *kept))
    return record
