"""The recipe's tables of PPO as a whole, and of one trained role: optimizer, batching.

The parts of PPO have a file each: `advantages`, `kl`, `losses`, `correction`; so has the `optimizer`. Import all of
these classes from `schema`.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from ppoctl.recipe.advantages import AdvantagesTable, GaeAdvantages
from ppoctl.recipe.correction import AboveOne, CorrectionTable, NoCorrection, NoRejection, Rejection
from ppoctl.recipe.kl import Kl, NoKl
from ppoctl.recipe.losses import AnyPolicyLossTable, ClippedLoss, OldLogprobs, ValueLossTable
from ppoctl.recipe.optimizer import OptimizerTable
from ppoctl.recipe_table import RESULTS, SPEED, AtLeastOne, NotNegative, Table
from ppoctl.recipe_table import ParallelTable as ParallelTable


class PpoTable(Table):
    """The PPO algorithm: epochs, minibatches, advantages, penalty and losses.

    Formula: sequences of a step = rollout.prompts_per_step x rollout.samples_per_prompt; updates of a step = epochs x
    sequences of a step / minibatch_seqs
    Source: Schulman et al. 2017 (arXiv:1707.06347), algorithm 1; steps of the critic alone: VC-PPO (arXiv:2503.01491)
    Default of: verl, OpenRLHF (1 epoch); NeMo-RL, TRL and trlX have 4
    Figures: policy/approx_kl
    """

    epochs: Annotated[int, RESULTS, AtLeastOne] = 1
    """Passes of the actor over the rollouts of a step."""
    critic_epochs: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Passes of the critic over the rollouts of a step; absent: as many as the actor's."""
    minibatch_seqs: Annotated[int, RESULTS, AtLeastOne]
    """Sequences per optimizer step of the actor (Megatron-Core's `global_batch_size`); divides those of a step."""
    critic_minibatch_seqs: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Sequences per optimizer step of the critic; divides those of a step. Absent: as many as the actor's.
    Default of: verl, NeMo-RL (the actor's)."""
    minibatch_order: Annotated[Literal["shuffled", "in_order"], RESULTS] = "shuffled"
    """Rows of a minibatch. shuffled: each epoch of each role cuts another random order of the step's sequences;
    in_order: all epochs cut them as they were drawn, the samples of a prompt side by side.

    Source: Schulman et al. 2017 (arXiv:1707.06347), which shuffles
    Default of: TRL, trlX with accelerate (shuffled); verl, NeMo-RL (in_order)
    """
    critic_only_steps: Annotated[int, RESULTS, NotNegative] = 0
    """Number of first steps in which only the critic trains."""
    advantages: AdvantagesTable = GaeAdvantages(kind="gae")
    """How rewards and values become advantages."""
    truncated: Annotated[Literal["terminal", "bootstrap", "filter"], RESULTS] = "terminal"
    """How a response that reached the length limit counts. terminal: as if it had ended there; bootstrap: its return
    goes on with the critic's value of the state behind its last token; filter: in no loss and no whitening.
    Formula: bootstrap: G_T = r_T + gamma V_T+1 at its last token, in which V_T+1 is 0 otherwise
    Source: bootstrap: Pardo et al. 2018 (arXiv:1712.00378), eq. 6; filter: DAPO (arXiv:2503.14476), section 3.4
    Default of: NeMo-RL, verl, trlX, TRL (terminal)
    Figures: rollout/truncated_frac, advantage/bootstrap_mean, advantage/filtered_frac
    """
    kl: Kl = NoKl(place="none")
    """Penalty for moving away from the reference model."""
    policy_loss: AnyPolicyLossTable = ClippedLoss()
    """Loss of the actor."""
    old_logprobs: Annotated[OldLogprobs, RESULTS] = "trainer"
    """Whose log-probs of the drawn tokens are the old ones, which ratios are taken to. trainer: the actor's, by a
    forward pass before the update. sampler: the generator's own, without that pass (verl's bypass mode). current:
    those of the update itself, without that pass (NeMo-RL's force_on_policy_ratio): every ratio is 1, and the actor
    has one update a step. Without the pass, entropy and mismatch are figures of the actor's update.
    Formula: ratio = exp(logp - old)
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 6; trainer apart from sampler: Hilton et al. 2021
    (arXiv:2110.00641).
    Default of: verl, NeMo-RL.
    Figures: mismatch/gap_k3, policy/ratio_mean"""
    value_loss: ValueLossTable = ValueLossTable()
    """Loss of the critic."""
    rollout_correction: CorrectionTable = NoCorrection(kind="none")
    """Correction of the gap between the sampler's and the trainer's log-probs: what tokens weigh in the actor's
    loss."""
    rollout_rejection: Rejection = NoRejection(kind="none")
    """Rejection of tokens or sequences on which sampler and trainer lie too far apart."""
    max_sequence_gap: Annotated[float | None, RESULTS, AboveOne] = None
    """Largest mean over a sequence's tokens of exp|trainer's - sampler's log-prob| (1: they agree) with which it
    counts in the actor's loss; the critic learns from it, and whitening sees it, all the same. Absent: any.

    Formula: counts where mean_t(exp(|trainer - sampler|)) <= max_sequence_gap
    Source: NeMo-RL (`seq_logprob_error_threshold`)
    Default of: NeMo-RL (off); nobody else has it
    Figures: mismatch/sequence_gap_mean, mismatch/sequence_gap_max
    """

    @property
    def corrects_rollouts(self) -> bool:
        """Whether anything is decided from the sampler's log-probs."""
        tables = (self.rollout_correction, self.rollout_rejection)
        return self.max_sequence_gap is not None or any(table.kind != "none" for table in tables)


Recompute = Literal["none", "selective", "full"]


class BySequences(Table):
    """Batching by a fixed number of sequences per microbatch."""

    microbatch_seqs: Annotated[int, SPEED, AtLeastOne]
    """Sequences in one forward and backward pass (Megatron-Core's `micro_batch_size`)."""
    forward_microbatch_seqs: Annotated[int | None, SPEED, AtLeastOne] = None
    """Sequences in one forward pass without gradient (log-probs, reference, values); absent: `microbatch_seqs`."""
    logits_chunk_tokens: Annotated[int, SPEED, AtLeastOne] = 1024
    """Tokens whose logits exist at one time."""


class ByTokens(Table):
    """Batching by a token budget: each microbatch holds as many whole sequences as fit."""

    max_tokens_per_microbatch: Annotated[int, SPEED, AtLeastOne]
    """Most packed tokens in one forward and backward pass; a longer sequence is an error at start."""
    forward_max_tokens_per_microbatch: Annotated[int | None, SPEED, AtLeastOne] = None
    """Most packed tokens in one forward pass without gradient (log-probs, reference, values); absent:
    `max_tokens_per_microbatch`."""
    logits_chunk_tokens: Annotated[int, SPEED, AtLeastOne] = 1024
    """Tokens whose logits exist at one time."""


def _batching_kind(value: Any) -> str | None:
    keys = value if isinstance(value, dict) else getattr(type(value), "model_fields", None)
    return None if keys is None else "sequences" if _TOKEN_KEYS.isdisjoint(keys) else "tokens"


_TOKEN_KEYS = frozenset(ByTokens.model_fields) - frozenset(BySequences.model_fields)


Batching = Annotated[
    Annotated[BySequences, Tag("sequences")] | Annotated[ByTokens, Tag("tokens")], Discriminator(_batching_kind)
]


class TrainedTable(Table):
    """One trained role (actor or critic)."""

    optimizer: OptimizerTable
    """Optimizer of the role and its learning-rate schedule."""
    batching: Batching = ByTokens(max_tokens_per_microbatch=16384)
    """How the role's rows are cut into microbatches to fit memory; it never changes a gradient."""
    recompute: Annotated[Recompute, SPEED] = "none"
    """Activations that an update computes again in its backward pass instead of keeping them (Megatron-Core's
    `recompute_granularity`). selective: those inside the MLP; full: all but the input of each layer (a third more
    arithmetic)."""
    parallel: ParallelTable | None = None
    """Parallel layout of the role; absent: one process for the actor, and the actor's layout for the critic."""
