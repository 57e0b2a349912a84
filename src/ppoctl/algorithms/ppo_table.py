"""The recipe table `[ppo]`: what the algorithm computes. Tables of its parts are beside the code that reads them."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ppoctl.algorithms.estimators.gae import GaeAdvantages
from ppoctl.algorithms.estimators.kinds import AdvantagesTable, algorithm_of
from ppoctl.algorithms.stages.correction_table import AboveOne, CorrectionTable, NoCorrection, NoRejection, Rejection
from ppoctl.algorithms.stages.kl_table import Kl, NoKl
from ppoctl.algorithms.stages.loss_tables import AnyPolicyLossTable, ClippedLoss, OldLogprobs, ValueLossTable
from ppoctl.algorithms.stages.resample_table import NoResampling, ResampleTable
from ppoctl.core.recipe_table import RESULTS, AtLeastOne, NotNegative, Table
from ppoctl.core.recipe_table import ParallelTable as ParallelTable

if TYPE_CHECKING:
    from ppoctl.algorithms.stages.correction import CorrectionStage, Keep


def algorithm_name(ppo: Mapping[str, Any]) -> str:
    """Return the name of the algorithm of a recorded table `[ppo]`."""
    resamples = ppo.get("resample", {}).get("kind", "none") != "none"
    return "PF-PPO" if resamples else algorithm_of(ppo.get("advantages", {}).get("kind", "gae"))


class CriticOnlyUntil(Table):
    """Training of the critic alone until its values explain enough of the returns. A step with a lower explained
    variance does not train the actor, if no earlier step has trained it. The actor's optimizer steps and its learning
    rate begin with the first step that trains the actor, but the planned number of its optimizer steps (for decay and
    `lr_warmup_frac`) is that of a run whose actor trains from step 1: if the actor begins later, its learning rate
    does not reach the end of the decay.

    Formula: the actor trains from the first step with 1 - Var(G - V) / Var(G) >= explained_variance on, V before the
    critic's update, but at the latest from step at_most + 1 on
    Source: VC-PPO (arXiv:2503.01491), value pretraining; VAPO (arXiv:2504.05118), 50 steps
    Default of: no system
    Figures: value/explained_variance, policy/trained
    """

    explained_variance: Annotated[float, RESULTS, Field(le=1)]
    """Explained variance of the returns of a step at which the actor begins to train. If `ppo.advantages.gae_lambda`
    is below 1, returns contain values, and the explained variance is higher than that of the rewards."""
    at_most: Annotated[int, RESULTS, AtLeastOne]
    """Maximum number of steps at the start of the run in which only the critic trains."""


class PpoTable(Table):
    """The PPO algorithm: epochs, minibatches, advantages, KL penalty and losses.

    Formula: sequences of a step = rollout.prompts_per_step x rollout.samples_per_prompt; updates of a step = epochs x
    sequences of a step / minibatch_seqs
    Source: Schulman et al. 2017 (arXiv:1707.06347), algorithm 1; critic-only steps: VC-PPO (arXiv:2503.01491)
    Default of: verl, OpenRLHF (1 epoch); NeMo-RL, TRL and trlX use 4
    Figures: policy/approx_kl
    """

    epochs: Annotated[int, RESULTS, AtLeastOne] = 1
    """Passes of the actor over the rollouts of a step."""
    critic_epochs: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Passes of the critic over the rollouts of a step; absent: `epochs`."""
    minibatch_seqs: Annotated[int, RESULTS, AtLeastOne]
    """Sequences per optimizer step of the actor (Megatron-Core's `global_batch_size`). It must divide the number of
    sequences of a step."""
    critic_minibatch_seqs: Annotated[int | None, RESULTS, AtLeastOne] = None
    """Sequences per optimizer step of the critic. It must divide the number of sequences of a step. Absent:
    `minibatch_seqs`.
    Default of: verl, NeMo-RL (the actor's value)."""
    minibatch_order: Annotated[Literal["shuffled", "in_order"], RESULTS] = "shuffled"
    """Assignment of sequences to minibatches. shuffled: each epoch of each role splits a new random order of the
    step's sequences; in_order: all epochs split the sequences in the order of generation, in which the samples of a
    prompt are adjacent.

    Source: Schulman et al. 2017 (arXiv:1707.06347), which shuffles
    Default of: TRL, trlX with accelerate (shuffled); verl, NeMo-RL (in_order)
    """
    critic_only_steps: Annotated[int, RESULTS, NotNegative] = 0
    """Number of steps at the start of the run in which only the critic trains."""
    critic_only_until: CriticOnlyUntil | None = None
    """Condition that ends the training of the critic alone, instead of a fixed number of steps; absent:
    `critic_only_steps`."""
    advantages: AdvantagesTable = GaeAdvantages(kind="gae")
    """Computation of advantages from rewards and values."""
    truncated: Annotated[Literal["terminal", "bootstrap", "filter"], RESULTS] = "terminal"
    """Treatment of a response that reached the length limit. terminal: as if the response had ended there; bootstrap:
    the critic's value of the state after the last token is added to the return of the response; filter: the response
    is excluded from all losses and from whitening.
    Formula: bootstrap: G_T = r_T + gamma V_T+1 at the last token T; V_T+1 is 0 for every other response
    Source: bootstrap: Pardo et al. 2018 (arXiv:1712.00378), eq. 6; filter: DAPO (arXiv:2503.14476), section 3.4
    Default of: NeMo-RL, verl, trlX, TRL (terminal)
    Figures: rollout/truncated_frac, advantage/bootstrap_mean, advantage/filtered_frac
    """
    whiten_rewards: Annotated[bool, RESULTS] = False
    """Whether the rewards of tokens, including a KL penalty in the reward, are scaled to unit variance over all
    unmasked tokens of the step before the advantages are estimated. Their mean does not change. A bootstrap value is
    added afterwards. The critic learns returns of the scaled rewards.

    Formula: r_t = mean + (r_t - mean) / sqrt(variance + 1e-8)
    Source: Ziegler et al. 2019 (arXiv:1909.08593; its code, lm-human-preferences); TRL, which also counts the
        position after the last token of a response
    Default of: all systems (off); only TRL has it
    Figures: advantage/raw_std, value/return_std
    """
    resample: ResampleTable = NoResampling(kind="none")
    """Rows that the updates train on, sampled again by the scores of the responses (PF-PPO)."""
    kl: Kl = NoKl(place="none")
    """KL penalty for the distance between the actor and the reference model."""
    policy_loss: AnyPolicyLossTable = ClippedLoss()
    """Loss of the actor."""
    old_logprobs: Annotated[OldLogprobs, RESULTS] = "trainer"
    """Source of the old log-probs of the sampled tokens; the old probability is the denominator of the ratio.
    trainer: the actor computes them in a forward pass before the update. sampler: the generator returned them, so
    this pass is skipped (verl's bypass mode). current: the update itself computes them, so this pass is skipped
    (NeMo-RL's force_on_policy_ratio); every ratio is then 1, and the actor has one update per step. If the pass is
    skipped, the entropy and mismatch metrics are measured during the actor's update.
    Formula: ratio = exp(logp - old)
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 6; trainer and sampler as separate policies: Hilton et al.
    2021 (arXiv:2110.00641).
    Default of: verl, NeMo-RL.
    Figures: mismatch/gap_k3, policy/ratio_mean"""
    value_loss: ValueLossTable = ValueLossTable()
    """Loss of the critic."""
    rollout_correction: CorrectionTable = NoCorrection(kind="none")
    """Correction for the difference between sampler and trainer log-probs: importance weights of tokens in the
    actor's loss."""
    rollout_rejection: Rejection = NoRejection(kind="none")
    """Rejection of tokens or sequences whose sampler and trainer log-probs differ too much."""
    max_sequence_gap: Annotated[float | None, RESULTS, AboveOne] = None
    """Largest allowed mean, over the tokens of a sequence, of exp|trainer's - sampler's log-prob| (1: the log-probs
    are equal). A sequence above this bound is masked out of the actor's loss; the critic and whitening still use it.
    Absent: no bound.

    Formula: in the loss if mean_t(exp(|trainer - sampler|)) <= max_sequence_gap
    Source: NeMo-RL (`seq_logprob_error_threshold`)
    Default of: NeMo-RL (off); no other system has it
    Figures: mismatch/sequence_gap_mean, mismatch/sequence_gap_max
    """

    @property
    def corrects_rollouts(self) -> bool:
        """Whether any setting of the correction reads the sampler log-probs."""
        tables = (self.rollout_correction, self.rollout_rejection)
        return self.max_sequence_gap is not None or any(table.kind != "none" for table in tables)

    def build_correction(self, *, fingerprint: str, name: str = "correction") -> "CorrectionStage":
        """Return the correction stage of a recipe that corrects rollouts."""
        from ppoctl.algorithms.formulas.importance import kept_by_gap
        from ppoctl.algorithms.stages.correction import CorrectionStage

        table = self.rollout_correction
        by_gap: tuple[Keep, ...] = ()
        if self.max_sequence_gap is not None:
            by_gap = (partial(kept_by_gap, max_gap=self.max_sequence_gap),)
        return CorrectionStage(
            weigh=table.weigh(),
            bounded=table.has_bounds,
            keeps=(*table.keeps(), *self.rollout_rejection.keeps(), *by_gap),
            normalize=table.normalization(),
            fingerprint=fingerprint,
            name=name,
        )
