"""The recipe's tables of the algorithm: advantages, penalty, losses, optimizer, how a minibatch is cut and how a
role is spread over processes.

Part of `schema`, in its own file for length; import these classes from `schema`.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ppoctl.table import RESULTS, SPEED, AtLeastOne, Fraction, NotNegative, Positive, Table


class GaeAdvantages(Table):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16)."""

    kind: Annotated[Literal["gae"], RESULTS]
    """Generalised advantage estimation; the only kind."""
    gamma: Annotated[float, RESULTS, Fraction] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, RESULTS, Fraction] = 1.0
    """1: Monte Carlo returns minus values; 0: one-step TD errors."""
    whiten: Annotated[bool, RESULTS] = True
    """Zero mean, unit variance over all counted tokens of the step."""


class NoKl(Table):
    """No penalty; no reference model is loaded."""

    place: Annotated[Literal["none"], RESULTS]
    """No penalty."""


class KlInReward(Table):
    """Subtract coef x KL of each token from its reward (Ziegler et al. 2019)."""

    place: Annotated[Literal["reward"], RESULTS]
    """In the reward of each token."""
    estimator: Annotated[Literal["k1", "k2", "k3"], RESULTS] = "k1"
    """Schulman's estimators of KL(actor, reference) from one sample."""
    coef: Annotated[float, RESULTS, Positive]
    """Fixed coefficient."""


class KlInLoss(Table):
    """Add coef x mean KL to the policy loss."""

    place: Annotated[Literal["loss"], RESULTS]
    """In the policy loss."""
    estimator: Annotated[Literal["k2", "k3"], RESULTS] = "k3"
    """k1 has no useful gradient as a loss (its expectation is zero), so it is not offered."""
    coef: Annotated[float, RESULTS, Positive]
    """Fixed coefficient."""


Kl = Annotated[NoKl | KlInReward | KlInLoss, Field(discriminator="place")]


class PolicyLossTable(Table):
    """Clipped surrogate (Schulman et al. 2017, eq. 7)."""

    clip_low: Annotated[float, RESULTS, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, RESULTS, Positive] = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float | None, RESULTS, Field(gt=1)] = None
    """For negative advantages the loss is at most -A x this (Ye et al. 2020); absent: off."""
    entropy_coef: Annotated[float, RESULTS, NotNegative] = 0.0
    """Times the mean token entropy, subtracted from the loss."""


class ValueLossTable(Table):
    """Squared error of the critic, optionally clipped around the old values."""

    clip: Annotated[float | None, RESULTS, Positive] = None
    """New values are clipped to old value +- clip, and the larger error counts; absent: off."""
    scale: Annotated[float, RESULTS, Positive] = 1.0
    """Multiplies the loss."""


class NoCorrection(Table):
    """Trust the sampler's log-probs to be the trainer's."""

    kind: Annotated[Literal["none"], RESULTS]
    """No weights."""


class TruncatedImportance(Table):
    """Weigh each token by min(trainer / sampler probability, max_ratio) (truncated importance sampling)."""

    kind: Annotated[Literal["tis"], RESULTS]
    """Truncated importance sampling."""
    max_ratio: Annotated[float, RESULTS, Field(gt=1)] = 2.0
    """Largest weight."""


Correction = Annotated[NoCorrection | TruncatedImportance, Field(discriminator="kind")]


class PpoTable(Table):
    """The algorithm."""

    epochs: Annotated[int, RESULTS, AtLeastOne] = 1
    """Passes of the actor over the rollouts of a step."""
    critic_epochs: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Passes of the critic; absent: as many as the actor's."""
    minibatch_seqs: Annotated[int, RESULTS, AtLeastOne]
    """Sequences per optimizer step, of actor and critic alike."""
    critic_only_steps: Annotated[int, RESULTS, NotNegative] = 0
    """In the first steps only the critic trains."""
    advantages: GaeAdvantages = GaeAdvantages(kind="gae")
    """How returns become advantages."""
    kl: Kl = NoKl(place="none")
    """Penalty for leaving the reference."""
    policy_loss: PolicyLossTable = PolicyLossTable()
    """The actor's loss."""
    value_loss: ValueLossTable = ValueLossTable()
    """The critic's loss."""
    rollout_correction: Correction = NoCorrection(kind="none")
    """What to do about the gap between sampler and trainer."""


class OptimizerTable(Table):
    """AdamW and its schedule. Everything is counted in optimizer steps."""

    lr: Annotated[float, RESULTS, Positive]
    """Peak learning rate."""
    weight_decay: Annotated[float, RESULTS, NotNegative] = 0.0
    """Decoupled; not applied to biases and norms."""
    beta1: Annotated[float, RESULTS, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, RESULTS, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, RESULTS, Positive] = 1e-8
    """Added to the root of the second moment."""
    grad_clip: Annotated[float, RESULTS, NotNegative] = 1.0
    """Largest global gradient norm; 0: off."""
    lr_schedule: Annotated[Literal["constant", "linear", "cosine"], RESULTS] = "constant"
    """After warm-up."""
    lr_warmup_updates: Annotated[int, RESULTS, NotNegative] = 0
    """Optimizer steps of linear warm-up; the first is above 0."""
    lr_decay_updates: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Where linear and cosine reach their minimum; absent: at the last planned optimizer step."""
    lr_min_frac: Annotated[float, RESULTS, Fraction] = 0.0
    """Minimum of linear and cosine, as a share of lr."""


Recompute = Literal["none", "selective", "full"]


class BySequences(Table):
    """A fixed number of sequences per microbatch."""

    microbatch_seqs: Annotated[int, SPEED, AtLeastOne]
    """Sequences in one forward and backward."""
    forward_microbatch_seqs: Annotated[int | None, SPEED, AtLeastOne] = None
    """Sequences in one forward of log-probs, reference or values, which keep no gradient; absent: the same."""
    logits_chunk_tokens: Annotated[int, SPEED, AtLeastOne] = 1024
    """Tokens whose logits exist at one time."""


class ByTokens(Table):
    """As many sequences per microbatch as fit a token budget."""

    max_tokens_per_microbatch: Annotated[int, SPEED, AtLeastOne]
    """Hard cap on packed tokens in one forward and backward; a longer sequence is an error at start."""
    forward_max_tokens_per_microbatch: Annotated[int | None, SPEED, AtLeastOne] = None
    """The cap in a forward of log-probs, reference or values, which keep no gradient; absent: the same."""
    logits_chunk_tokens: Annotated[int, SPEED, AtLeastOne] = 1024
    """Tokens whose logits exist at one time."""


def _batching_kind(value: Any) -> str:
    keys = value if isinstance(value, dict) else type(value).model_fields
    return "sequences" if _TOKEN_KEYS.isdisjoint(keys) else "tokens"


_TOKEN_KEYS = frozenset(ByTokens.model_fields) - frozenset(BySequences.model_fields)


Batching = Annotated[
    Annotated[BySequences, Tag("sequences")] | Annotated[ByTokens, Tag("tokens")], Discriminator(_batching_kind)
]


class ParallelTable(Table):
    """Megatron-Core's parallel layout of one role. A written table is complete: keys not given are 1 or off."""

    tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split each layer; divides attention heads and key/value heads."""
    pipeline: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split the layers."""
    stages_per_rank: Annotated[int, SPEED, AtLeastOne] = 1
    """Runs of layers on each pipeline rank; more than one (the interleaved schedule) shortens the wait at the ends of
    a minibatch, for more messages."""
    context: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split the tokens of a microbatch, also those of one sequence: what to raise when one is too long."""
    data: Annotated[int, SPEED, AtLeastOne] = 1
    """Copies of the model that share the rows of a minibatch."""
    sequence: Annotated[bool, SPEED] = False
    """Split norms and residuals over the tensor ranks too (sequence parallelism); experts need it where there are
    tensor ranks."""
    expert: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that share the experts of a layer; divides their number. Made of the data, context and tensor ranks: no
    more processes."""
    expert_tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split each expert, besides; also made of those ranks. Experts are small: 1, whole,
    suits nearly all (Megatron-Core's own default is `tensor`)."""
    first_stage_layers: Annotated[int | None, SPEED, AtLeastOne] = None
    """Layers of the first pipeline rank, which also holds the embedding; absent: as many as the others."""
    last_stage_layers: Annotated[int | None, SPEED, AtLeastOne] = None
    """Layers of the last pipeline rank, which also holds the output layer; absent: as many as the others."""
    distributed_optimizer: Annotated[bool, SPEED] = False
    """Split main weights and moments over the data and context ranks."""

    @property
    def expert_ranks(self) -> int:
        """Ranks of a pipeline stage that hold one copy of all its experts."""
        return self.expert * self.expert_tensor

    @property
    def experts_span_data(self) -> bool:
        """Whether data ranks exchange tokens: then each must run as many microbatches as the others."""
        return self.tensor * self.context % self.expert_ranks != 0

    @property
    def virtual_pipeline(self) -> int | None:
        """Megatron-Core's name for more than one run of layers on a rank; None: one."""
        return self.stages_per_rank if self.stages_per_rank > 1 else None

    @property
    def model_ranks(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """Processes of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        """Processes of the role."""
        return self.stage_ranks * self.pipeline

    def describe(self) -> str:
        """What is not 1 or off, in words."""
        sizes = {"tensor": self.tensor, "pipeline": self.pipeline, "stages per rank": self.stages_per_rank}
        sizes |= {
            "context": self.context,
            "data": self.data,
            "expert": self.expert,
            "expert tensor": self.expert_tensor,
        }
        words = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        words += ["sequence"] * self.sequence + ["distributed optimizer"] * self.distributed_optimizer
        return ", ".join(words) or "one process"


class TrainedTable(Table):
    """One trained role (actor or critic)."""

    optimizer: OptimizerTable
    """How it learns."""
    batching: Batching = ByTokens(max_tokens_per_microbatch=16384)
    """How its rows are cut to fit memory; never changes a gradient."""
    recompute: Annotated[Recompute, SPEED] = "none"
    """Activations that an update computes again in its backward instead of keeping them: selective, those inside the
    MLP; full, all but the input of each layer (a third more arithmetic)."""
    parallel: ParallelTable | None = None
    """How it is spread over processes; absent: one process for the actor, and as the actor for the critic."""
