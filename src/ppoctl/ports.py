"""The sockets engines plug into: all that a stage knows of an engine. Shapes are part of the contract, checked in
tests, which is why the protocols are runtime checkable. How weights get from the actor to the generator no stage
knows: that is between the engines (`ppoctl.weights`).

B sequences, R response positions. Every row index a port takes is a row of the `Sequences` it was given.

    stages  ->  Models.actor_at(state) ->  Actor   (Megatron-Core)
            ->  Models.critic_at(state) -> Critic  (Megatron-Core)
            ->  Generator                          (vLLM)
            ->  Scorer                             (child processes; in `batch.scores`, where light rooms find it)
                  -> RewardModel                   (Megatron-Core; likewise)
            ->  SampleParts                        (finished samples of an unfinished stage)
            ->  Gate                               (whoever may stop the job)
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ppoctl.batch.digest import FileDigest
from ppoctl.batch.records import State
from ppoctl.batch.scores import RewardModel as RewardModel
from ppoctl.batch.scores import Scorer as Scorer
from ppoctl.batch.sequences import Sequences


@dataclass(frozen=True)
class SamplingParams:
    """How to draw. `temperature == 0` is greedy."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response besides the model's own end tokens."""
    min_new_tokens: int = 0
    """Nothing ends a response among its first so many tokens: ids that would are left out, stop strings not seen."""
    max_window_tokens: int | None = None
    """Most tokens of prompt and response together; None: the engine's own window."""

    def new_tokens(self, prompt_tokens: int) -> int:
        """Most tokens of a response to a prompt of this length."""
        if self.max_window_tokens is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.max_window_tokens - prompt_tokens)


@dataclass(frozen=True)
class SampleRequest:
    """One response to draw. `key` is unique within the rollout; `seed` makes the draw independent of all others."""

    key: str
    prompt_tokens: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Sample:
    """One finished response. The end token, where one was sampled, is the last of `tokens` and counts."""

    key: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs of the sampled tokens under the distribution that was sampled from."""
    terminated: bool
    """False when the length limit cut it."""
    text: str
    """Decoded, special tokens skipped, stop string removed."""
    stamp: str
    """`State.stamp` of the actor whose weights drew it."""
    sends: int = 1
    """How often it was asked for: twice where an engine died over it."""


@runtime_checkable
class Stream(Protocol):
    """Draws from one actor state, all with the same `SamplingParams`. Tokens are a function of weights, prompt, seed
    and params, whatever else is drawn at the same time; on a GPU, where that decides how logits are rounded, only
    as long as no two tokens are nearly equally likely (docs/gpu.md, Decoding)."""

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Begin to draw these too; others may be running. Raises DataError on a prompt longer than the window, and
        then none of them is drawn."""
        ...

    def finished(self) -> Sequence[Sample]:
        """Wait until at least one draw has ended that was not handed out yet; those that have, in any order. Empty
        when none is open."""
        ...

    def close(self) -> None:
        """Abort the draws that are open. Safe to call again."""
        ...


@runtime_checkable
class Generator(Protocol):
    """Draws responses from the actor state that it was prepared for last, one stream at a time."""

    def prepare(self, state: State) -> None:
        """Start what draws, and have it hold the state's weights, proven; costs nothing where it does. No stream is
        open meanwhile. Raises WeightSyncError when generator and trainer do not hold the same weights."""
        ...

    def open(self, params: SamplingParams) -> Stream:
        """Begin to draw. The caller closes the stream."""
        ...

    def close(self) -> None:
        """Free the engine and everything it started."""
        ...


@dataclass(frozen=True)
class OptimizerStep:
    """What one optimizer step needs besides gradients. Schedules are computed by the stage, so a replay reads the
    same numbers from the same committed inputs."""

    lr: float
    weight_decay: float
    grad_clip: float
    """Largest global gradient norm (2-norm); 0 turns clipping off."""
    beta1: float
    beta2: float
    eps: float


Totals = tuple[int, ...]
"""What each term of an objective divides by, counted over a whole minibatch. Only the objective reads it."""


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step: which rows, what the objective divides by, and the step's settings."""

    rows: Int[Tensor, " M"]
    totals: Totals
    step: OptimizerStep


@dataclass(frozen=True)
class OutputRequest:
    """What a model is asked about each response token, and under which distribution; a critic reads none of it."""

    temperature: float = 1.0
    """Divides the logits."""
    top_p: float = 1.0
    """Only the smallest set of likeliest ids with this share of the probability can be drawn; 1: all."""
    top_k: int | None = None
    """Only so many likeliest ids can be drawn; None: all."""
    min_p: float = 0.0
    """Only ids at least so many times as likely as the likeliest can be drawn; 0: all."""
    min_new_tokens: int = 0
    """At the first so many response positions no id can be drawn that ends a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Such ids, besides the model's own end tokens."""
    entropy: bool = False
    """Whether the entropy of each distribution is asked for too."""
    full_kl: bool = False
    """Whether KL(model || reference) over the whole vocabulary is asked for too. The reference is read at the same
    temperature, without filters."""

    @property
    def is_filtered(self) -> bool:
        """Whether there are ids that cannot be drawn."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


@dataclass(frozen=True)
class TokenOutputs:
    """What a model says about the response tokens of some rows, on their response grid; float32, 0 where not
    present."""

    primary: Float[Tensor, "m R"]
    """Actor: log-probs. Critic: values of the states before the tokens."""
    entropy: Float[Tensor, "m R"] | None = None
    """Nats; absent where it was not asked for."""
    full_kl: Float[Tensor, "m R"] | None = None
    """KL(model || reference) of the whole distributions, in nats; absent where it was not asked for."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "TokenOutputs":
        """What a function makes of each grid that is there."""
        entropy, full_kl = (None if grid is None else change(grid) for grid in (self.entropy, self.full_kl))
        return TokenOutputs(change(self.primary), entropy, full_kl)


def concatenate_outputs(parts: Sequence[TokenOutputs]) -> TokenOutputs:
    """The rows of all parts, one part after the other; all were asked the same."""
    entropies = [part.entropy for part in parts if part.entropy is not None]
    full_kls = [part.full_kl for part in parts if part.full_kl is not None]
    outputs = torch.cat([part.primary for part in parts])
    return TokenOutputs(outputs, *(torch.cat(grids) if grids else None for grids in (entropies, full_kls)))


@dataclass(frozen=True)
class MinibatchResult:
    """What an optimizer step saw and did."""

    loss: float
    grad_norm: float
    """Before clipping."""
    said: TokenOutputs
    """What the model said before the step of the minibatch's rows, in their order."""


@runtime_checkable
class Objective(Protocol):
    """The loss of some rows as a pure function of the model's token outputs; closes over the step's data."""

    @property
    def request(self) -> OutputRequest:
        """What it reads of the model."""
        ...

    def totals(self, rows: Int[Tensor, " M"]) -> Totals:
        """What the loss of a minibatch of these rows is divided by; all 0 where nothing in it counts."""
        ...

    def __call__(self, rows: Int[Tensor, " m"], said: TokenOutputs, totals: Totals) -> Float[Tensor, ""]:
        """The share of these rows in the loss of a minibatch with these totals; summing over any split of a minibatch
        gives its loss."""
        ...


@runtime_checkable
class Saving(Protocol):
    """A state on its way to disk."""

    def is_written(self) -> bool:
        """Whether `finish` would not have to wait, or would fail. Cheap enough to be asked between two samples."""
        ...

    def finish(self) -> Mapping[str, FileDigest]:
        """Wait for it. Every file of the folder by name, digested by the process that wrote it and flushed to disk.

        Raises StorageError when the disk did not take it.
        """
        ...


@runtime_checkable
class Trainer(Protocol):
    """A model with an optimizer at one state, in this process or spread over others."""

    def start(self) -> None:
        """Weights from the recipe's model source, a fresh optimizer."""
        ...

    def save(self, folder: Path, *, in_background: bool) -> Saving:
        """Write weights and optimizer, as they are now, into an existing empty folder (Megatron torch_dist).

        In the background: returns once they are copied, and training may go on. One save at a time; it ends with
        `Saving.finish`. Raises StorageError.
        """
        ...

    def save_weights(self, folder: Path) -> None:
        """Write weights alone, for evaluation and export (Hugging Face safetensors, config, tokenizer)."""
        ...

    def load(self, folder: Path) -> None:
        """Weights and optimizer as `save` wrote them; raises StorageError when a part is missing or does not fit."""
        ...

    def update(
        self, sequences: Sequences, minibatches: Sequence[Minibatch], objective: Objective
    ) -> list[MinibatchResult]:
        """One optimizer step per minibatch, in order. The split into microbatches never changes a gradient.

        Raises NonFiniteError before the optimizer runs when a loss or gradient is not finite: the weights are then
        those after the last good minibatch, and the caller must not use them (nothing of the stage is committed).
        """
        ...


@runtime_checkable
class Actor(Trainer, Protocol):
    def logprobs(self, sequences: Sequences, asked: OutputRequest) -> TokenOutputs:
        """Log-prob of each response token, and what else is asked."""
        ...

    def reference_logprobs(self, sequences: Sequences, asked: OutputRequest) -> Float[Tensor, "B R"]:
        """Log-prob of each response token under the frozen initial weights; float32, 0 where not present."""
        ...


@runtime_checkable
class Critic(Trainer, Protocol):
    def values(self, sequences: Sequences) -> Float[Tensor, "B R"]:
        """V of the state before each response token; float32, 0 where not present."""
        ...


@runtime_checkable
class Models(Protocol):
    """Brings the trainers to states: resident already, loaded, or loaded and replayed. See `store.states`."""

    def actor_at(self, state: State) -> Actor: ...

    def critic_at(self, state: State) -> Critic: ...

    def stamped(self, state: State) -> State:
        """Equal state whose stamp says how often it was made again inexactly; its engine is then at it."""
        ...

    def advancing(self, state: State, *, to: State) -> AbstractContextManager[Trainer]:
        """The engine at `state`; when the context ends well it counts as being at `to`, else as being nowhere."""
        ...


@dataclass(frozen=True)
class SampleSetKey:
    """What finished samples were drawn for; samples of anything else are others."""

    step: int
    stage: str
    fingerprint: str
    """Digest of actor state, prompts and settings."""


@runtime_checkable
class FinishedSamples(Protocol):
    """Finished samples of a stage that is not committed yet, kept over a crash; dropped when it is."""

    def load(self, drawn_for: SampleSetKey) -> dict[str, Sample]:
        """Samples that an earlier attempt finished for the same, by key."""
        ...

    def writer(self, drawn_for: SampleSetKey) -> AbstractContextManager[Callable[[Sample], None]]:
        """A function that takes each finished sample; written out in groups, and when the context fails."""
        ...


@runtime_checkable
class Gate(Protocol):
    """Whoever may stop the job, asked where nothing finished would be lost. It is told where the job is, so that it
    can know what is still to come."""

    def before(self, step: int, stage: str) -> None:
        """A stage is about to run. Raises PreemptedError or InterruptedByUserError where it should not."""
        ...

    def between(self) -> None:
        """A piece of that stage's work is done, and the next is about to begin. Raises as `before` does; cheap enough
        to be asked after each sample."""
        ...

    def may_save(self) -> bool:
        """Whether states that are not saved may be, once one of the others has raised: there is time for it, and no
        engine was interrupted in its work."""
        ...
