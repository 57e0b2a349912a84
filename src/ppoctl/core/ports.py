"""Ports: the protocols that stages require of the components of a run.

A stage uses a component only through its port. Shapes and dtypes are part of each port, and tests check them; the
protocols are therefore runtime checkable. B is the number of sequences, R the number of response positions. Every row
index that is passed to a port is a row of the `Sequences` that the port receives.

    stages  ->  Models.actor_at(state)  ->  Actor    (Megatron-Core)
            ->  Models.critic_at(state) ->  Critic   (Megatron-Core)
            ->  Generator                            (vLLM)
            ->  Environments                         (child processes)
            ->  Dialogue                             (tokenizer and chat template)
            ->  Scorer                               (child processes)
                  ->  RewardModel                    (Megatron-Core)
            ->  FinishedSamples, EpisodeLog          (samples of a stage that is not committed yet)
            ->  Gate                                 (decides whether the job must stop)

`Scorer` and `RewardModel` are defined in `batch.scores`, `Environments` and `Dialogue` in `batch.episodes`, requests
and samples in `core.batch.requests`; these modules import no torch. No port transfers weights from the
actor to the generator: trainers and engines exchange weights directly (`ppoctl.engines.weights`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ppoctl.core.batch.digest import FileDigest
from ppoctl.core.batch.episodes import Dialogue as Dialogue
from ppoctl.core.batch.episodes import Environments as Environments
from ppoctl.core.batch.records import State
from ppoctl.core.batch.requests import Sample as Sample
from ppoctl.core.batch.requests import SampleRequest as SampleRequest
from ppoctl.core.batch.requests import SamplingParams as SamplingParams
from ppoctl.core.batch.requests import Stream as Stream
from ppoctl.core.batch.scores import RewardModel as RewardModel
from ppoctl.core.batch.scores import Scorer as Scorer
from ppoctl.core.batch.sequences import Sequences


@runtime_checkable
class Generator(Protocol):
    """All vLLM engines. They generate responses with the actor state of the last `prepare` call, one stream at a
    time."""

    def prepare(self, state: State) -> None:
        """Start the engines, load the weights of `state` into them, and verify the weights.

        Returns at once if the engines already hold these weights. No stream may be open. Raises WeightSyncError if
        generator and trainer do not hold the same weights.
        """
        ...

    def open(self, params: SamplingParams) -> Stream:
        """Open a stream of requests. The caller closes it."""
        ...

    def close(self) -> None:
        """Shut down the engines and every process that they started."""
        ...


@dataclass(frozen=True)
class OptimizerStep:
    """Settings of one optimizer step. A stage computes them from committed inputs, so a replay uses the same
    numbers."""

    lr: float
    weight_decay: float
    grad_clip: float
    """Maximum global 2-norm of the gradient; 0: no clipping."""
    beta1: float
    beta2: float
    eps: float


Totals = tuple[int, ...]
"""Divisor of each term of an objective, counted over the whole minibatch. Only the objective reads it."""


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step: its rows, the divisors of its objective, and its settings."""

    rows: Int[Tensor, " M"]
    """Rows of the sequences that the model computes: those with a token in the loss. The first minibatch of an update
    may have others, whose outputs are reported."""
    totals: Totals
    step: OptimizerStep


@dataclass(frozen=True)
class OutputRequest:
    """Outputs that a model computes for each response token, and the distribution they refer to. A separate critic
    ignores the request."""

    temperature: float = 1.0
    """Divisor of the logits."""
    top_p: float = 1.0
    """Only the smallest set of most likely ids with this total probability can be sampled; 1: all ids."""
    top_k: int | None = None
    """Only this many most likely ids can be sampled; None: all ids."""
    min_p: float = 0.0
    """Only ids with at least this fraction of the highest probability can be sampled; 0: all ids."""
    min_new_tokens: int = 0
    """Number of first response positions at which ids that end a response are excluded."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response, in addition to the model's own end tokens."""
    entropy: bool = False
    """Whether to compute the entropy of each distribution."""
    full_kl: bool = False
    """Whether to compute KL(model || reference) over the full vocabulary. The reference uses the same temperature,
    but no filters."""
    values: bool = False
    """Whether to compute values too, by a value head on the policy's model."""
    reference: bool = False
    """Whether to compute the reference's log-probs too, with the same temperature, but no filters."""
    experts: bool = False
    """Whether to return the experts that the routers choose, of a model with experts."""

    @property
    def is_filtered(self) -> bool:
        """Whether some ids cannot be sampled because of top_p, top_k or min_p."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of a model for the response tokens of m rows; float32, 0 at positions without a token."""

    primary: Float[Tensor, "m R"]
    """Actor: log-probs. Critic: values of the states before the tokens."""
    entropy: Float[Tensor, "m R"] | None = None
    """Entropy in nats; None: not requested."""
    full_kl: Float[Tensor, "m R"] | None = None
    """KL(model || reference) over the full vocabulary in nats; None: not requested."""
    values: Float[Tensor, "m R"] | None = None
    """Values of the states before the tokens, by a value head on the policy's model; None: not requested."""
    reference: Float[Tensor, "m R"] | None = None
    """Log-probs under the reference; None: not requested."""
    experts: Int[Tensor, "N E"] | None = None
    """Experts of each of the N input tokens of all rows (`Sequences.experts`); None: not requested, or these are the
    outputs of a part of the rows."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "TokenOutputs":
        """Return the outputs with `change` applied to each grid that is present, without experts."""
        return TokenOutputs(change(self.primary), *(grid if grid is None else change(grid) for grid in self.others))

    @property
    def others(self) -> tuple[Float[Tensor, "m R"] | None, ...]:
        """The grids after `primary`, in order."""
        return self.entropy, self.full_kl, self.values, self.reference


def concatenate_outputs(parts: Sequence[TokenOutputs]) -> TokenOutputs:
    """Return the rows of all parts in order. All parts must come from the same request."""
    columns = zip(*((part.primary, *part.others) for part in parts), strict=True)
    primary, *others = ([grid for grid in column if grid is not None] for column in columns)
    return TokenOutputs(torch.cat(primary), *(torch.cat(grids) if grids else None for grids in others))


@dataclass(frozen=True)
class MinibatchResult:
    """Result of one optimizer step."""

    loss: float
    grad_norm: float
    """Global norm of the gradient before clipping."""
    outputs: TokenOutputs
    """Outputs of the model for the rows of the minibatch, in their order, before the optimizer step."""
    merge_error: float | None = None
    """Norm of the rounding error of the merged weights, divided by the norm of the adapters' product, after the last
    minibatch of an update. None: another minibatch, or a role without this error."""


@runtime_checkable
class Objective(Protocol):
    """Loss of some rows as a pure function of the model's token outputs. The objective holds the data of the step."""

    @property
    def request(self) -> OutputRequest:
        """Outputs that the loss reads."""
        ...

    def totals(self, rows: Int[Tensor, " M"]) -> Totals:
        """Return the divisors of the loss for a minibatch of these rows; all 0 if no token is in the loss."""
        ...

    def __call__(self, rows: Int[Tensor, " m"], outputs: TokenOutputs, totals: Totals) -> Float[Tensor, ""]:
        """Return the contribution of these rows to the loss of a minibatch with these totals.

        For any split of a minibatch, the contributions add up to its loss.
        """
        ...


@runtime_checkable
class Saving(Protocol):
    """Save of a state that is being written to disk."""

    def is_written(self) -> bool:
        """Whether `finish` would return or raise without waiting. This method is cheap enough to call after each
        sample."""
        ...

    def finish(self) -> Mapping[str, FileDigest]:
        """Wait for the save, and return the digest of each file of the folder by name.

        The process that wrote a file also digested it and flushed it to disk. Raises StorageError if a write failed.
        """
        ...


@runtime_checkable
class Trainer(Protocol):
    """Model with an optimizer, at one state, in this process or distributed over other processes."""

    def start(self) -> None:
        """Load the weights of the recipe's model source, and create a fresh optimizer."""
        ...

    def save(self, folder: Path, *, in_background: bool) -> Saving:
        """Write the current weights and optimizer into an existing empty folder (Megatron torch_dist).

        With `in_background`, return as soon as weights and optimizer are copied; training may then continue. Only one
        save may be open; `Saving.finish` ends it. Raises StorageError.
        """
        ...

    def save_weights(self, folder: Path) -> None:
        """Write the weights only, for evaluation and export (Hugging Face safetensors, config, tokenizer)."""
        ...

    def load(self, folder: Path) -> None:
        """Load weights and optimizer as written by `save`. Raises StorageError if a file is missing or does not fit
        the model."""
        ...

    def update(
        self, sequences: Sequences, minibatches: Sequence[Minibatch], objective: Objective
    ) -> list[MinibatchResult]:
        """Run one optimizer step per minibatch, in order. The split of a minibatch into microbatches never changes a
        gradient.

        Raises NonFiniteError before the optimizer step if a loss or gradient is not finite. The weights are then the
        weights after the last good minibatch, and the caller must not use them (nothing of the stage is committed).
        """
        ...


@runtime_checkable
class Actor(Trainer, Protocol):
    def logprobs(self, sequences: Sequences, request: OutputRequest) -> TokenOutputs:
        """Return the log-prob of each response token, and the other requested outputs."""
        ...

    def reference_logprobs(self, sequences: Sequences, request: OutputRequest) -> Float[Tensor, "B R"]:
        """Return the log-prob of each response token under the frozen initial weights; float32, 0 at positions
        without a token."""
        ...


@runtime_checkable
class Critic(Trainer, Protocol):
    def values(self, sequences: Sequences) -> Float[Tensor, "B R"]:
        """Return the value of the state before each response token; float32, 0 at positions without a token."""
        ...


@runtime_checkable
class Models(Protocol):
    """Trainers by requested state. The state is already in memory, loaded, or loaded and replayed (see
    `store.states`)."""

    def actor_at(self, state: State) -> Actor: ...

    def critic_at(self, state: State) -> Critic: ...

    def stamped(self, state: State) -> State:
        """Return an equal state whose stamp counts the inexact replays that produced it. The role's trainer is then
        at that state."""
        ...

    def advancing(self, state: State, *, to: State) -> AbstractContextManager[Trainer]:
        """Return a context with the trainer at `state`. The trainer is at `to` after a normal exit, and at no state
        after an error."""
        ...


@dataclass(frozen=True)
class SampleSetKey:
    """Identity of a set of finished samples. Samples with another key are never reused."""

    step: int
    stage: str
    fingerprint: str
    """Digest of actor state, prompts and settings."""


OnProgress = Callable[[int, int, int], None]
"""Called with (finished samples, all samples, tokens generated so far); tokens of loaded samples are not counted."""


@runtime_checkable
class FinishedSamples(Protocol):
    """Finished samples of a stage that is not committed yet. The samples survive a crash and are dropped when the
    stage is committed."""

    def load(self, key: SampleSetKey) -> dict[str, Sample]:
        """Return the samples that an earlier attempt finished for the same `SampleSetKey`, by request key."""
        ...

    def writer(
        self, key: SampleSetKey, *, to_the_end: bool = False
    ) -> AbstractContextManager[Callable[[Sample], None]]:
        """Return a context with a function that takes each finished sample.

        Samples are written in groups, even if the context ends with an error. After a normal end, the last group is
        only written if `to_the_end` is true.
        """
        ...


@dataclass(frozen=True)
class EpisodeEntry:
    """One event of an episode, as a log keeps it."""

    key: str
    """Key of the episode."""
    number: int
    """Number of the event in its episode, from 0."""
    event: Mapping[str, Any]
    """The event as a JSON value."""


@runtime_checkable
class EpisodeLog(Protocol):
    """Events of the episodes of a stage that is not committed yet. They survive a crash and are dropped when the
    stage is committed."""

    def load(self, key: SampleSetKey) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return the events that earlier attempts recorded for the same `SampleSetKey`, in order, by key of the
        episode."""
        ...

    def append(self, key: SampleSetKey, entries: Sequence[EpisodeEntry]) -> None:
        """Record these events. They are on disk when this method returns. Raises StorageError."""
        ...


@runtime_checkable
class Gate(Protocol):
    """Decides whether the job must stop. It is called only when a stop loses no finished work."""

    def before(self, step: int, stage: str) -> None:
        """Check before a stage runs. Raises PreemptedError or InterruptedByUserError if the stage must not start."""
        ...

    def between(self) -> None:
        """Check between two units of work within a stage. Raises the errors of `before`. This method is cheap enough
        to call after each sample."""
        ...

    def may_save(self) -> bool:
        """Whether unsaved states may be saved after `before` or `between` has raised.

        It returns True if enough time is left and no engine was interrupted while it worked.
        """
        ...
