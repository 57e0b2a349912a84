"""Recipe tables of the losses of actor and critic. A table of a policy loss builds its loss."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from ppoctl.core import metric_registry
from ppoctl.core.metric_registry import Metric
from ppoctl.core.recipe_table import RESULTS, KindOr, NotNegative, Positive, Table
from ppoctl.core.user_functions import FUNCTION_PATTERN, TrainingFunction

if TYPE_CHECKING:
    from ppoctl.algorithms.formulas.policy_loss import PolicyLoss

AggregationName = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length"]

_CLIP_METRICS = (
    metric_registry.POLICY_CLIP_FRAC,
    metric_registry.POLICY_CLIP_FRAC_HIGH,
    metric_registry.POLICY_CLIP_FRAC_LOW,
    metric_registry.POLICY_CLAMPED_RATIO_MIN,
    metric_registry.POLICY_CLAMPED_RATIO_MAX,
)


class PolicyLossTable(Table):
    """Keys that all kinds of policy loss share."""

    metrics: ClassVar[tuple[Metric, ...]] = ()
    """Metrics about clipping that the actor's update reports with this kind of loss."""

    aggregation: Annotated[AggregationName, RESULTS] = "token_mean"
    """Aggregation of token losses (the policy loss, the entropy bonus, KL in the loss) to one number. token_mean: the
    mean over tokens, in which long responses have more weight. sequence_mean_token_mean: the mean over sequences of
    the mean over the tokens of a sequence. sequence_mean_token_sum: the mean over sequences of the sum over the
    tokens of a sequence. fixed_length: the same sum, divided by rollout.max_new_tokens, averaged over sequences.
    Tokens and sequences are counted over the whole minibatch. Sequences without an unmasked token are excluded from
    the means. verl's sequence modes divide by all sequences of the minibatch, so a rejected or masked sequence
    reduces verl's loss.
    Formula: token_mean: sum(m l) / sum(m); sequence_mean_token_mean: mean_i(sum_t(m l) / sum_t(m));
    sequence_mean_token_sum: mean_i(sum_t(m l)); fixed_length: mean_i(sum_t(m l) / rollout.max_new_tokens)
    Source: DAPO (arXiv:2503.14476) for token_mean, GRPO (arXiv:2402.03300) for sequence_mean_token_mean, Dr. GRPO
    (arXiv:2503.20783) for fixed_length.
    Default of: verl, NeMo-RL, OpenRLHF; TRL and trlX use the mean over the tokens of each microbatch."""
    entropy_coef: Annotated[float, RESULTS, NotNegative] = 0.0
    """Coefficient of the entropy bonus: entropy_coef x the mean token entropy is subtracted from the loss.
    Formula: l - entropy_coef H, H = -sum_v p_v log p_v at the temperature of sampling
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 9.
    Default of: verl (0.001 before 0.3), OpenRLHF; NeMo-RL, TRL and trlX have no such term.
    Figures: policy/entropy_mean"""
    positive_nll_coef: Annotated[float, RESULTS, NotNegative] = 0.0
    """Coefficient of the negative log-likelihood of good responses, which is added to the loss. The mean is over all
    tokens of the minibatch whose response has a reward above 0.
    Formula: positive_nll_coef x sum(-log p) / (number of those tokens)
    Source: VAPO (arXiv:2504.05118), which uses 0.1.
    Default of: NeMo-RL."""

    @abstractmethod
    def build(self) -> "PolicyLoss":
        """Return the policy loss with the settings of the table."""


class ClippedLoss(PolicyLossTable):
    """PPO's clipped surrogate: a token has no gradient if its ratio is above the clip range and its advantage is
    positive, or if its ratio is below the range and its advantage is negative.
    Formula: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = new / old probability of the token
    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7.
    Default of: all other systems (this kind of loss).
    Figures: policy/clip_frac, policy/ratio_max"""

    metrics: ClassVar[tuple[Metric, ...]] = (*_CLIP_METRICS, metric_registry.POLICY_DUAL_CLIP_FRAC)

    kind: Annotated[Literal["clip"], RESULTS] = "clip"
    """PPO's clipped surrogate."""
    clip_low: Annotated[float, RESULTS, Field(gt=0, lt=1)] = 0.2
    """Lower clip of the probability ratio, at 1 - clip_low.
    Default of: verl, NeMo-RL, OpenRLHF, TRL, trlX.
    Figures: policy/clip_frac_low"""
    clip_high: Annotated[float, RESULTS, Positive] = 0.2
    """Upper clip of the probability ratio, at 1 + clip_high. A value above clip_low lets unlikely tokens gain more
    probability.
    Source: DAPO (arXiv:2503.14476), which uses 0.28.
    Default of: verl, OpenRLHF, TRL, trlX; NeMo-RL uses 0.28.
    Figures: policy/clip_frac_high"""
    dual_clip: Annotated[float | None, RESULTS, Field(gt=1)] = None
    """Bound of the loss of a token with negative advantage A, at -A x dual_clip; absent: no bound.
    Source: Ye et al. 2020 (arXiv:1912.09729).
    Default of: OpenRLHF; verl uses 3, NeMo-RL 10.
    Figures: policy/dual_clip_frac"""

    def build(self) -> "PolicyLoss":
        from ppoctl.algorithms.formulas.policy_loss import PolicyClip

        return PolicyClip(self.clip_low, self.clip_high, self.dual_clip)


class GspoLoss(PolicyLossTable):
    """Group Sequence Policy Optimization (GSPO): the clipped surrogate with one ratio for all tokens of a sequence.
    Formula: max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s = exp(mean over the sequence of log r), the mean
    clamped to +-20 (verl: at most 10, NeMo-RL: no clamp)
    Source: GSPO (arXiv:2507.18071), eq. 5-7 and 13-14.
    Default of: no system (this kind of loss)."""

    metrics: ClassVar[tuple[Metric, ...]] = _CLIP_METRICS

    kind: Annotated[Literal["gspo"], RESULTS]
    """GSPO: the ratio is the geometric mean over the sequence."""
    clip_low: Annotated[float, RESULTS, Field(gt=0, lt=1)] = 3e-4
    """Lower clip of the sequence ratio, at 1 - clip_low. The default is small because a geometric mean changes
    little.
    Default of: the paper, section 5.1.
    Figures: policy/clip_frac_low"""
    clip_high: Annotated[float, RESULTS, Positive] = 4e-4
    """Upper clip of the sequence ratio, at 1 + clip_high.
    Default of: the paper, section 5.1.
    Figures: policy/clip_frac_high"""
    ratio_gradient: Annotated[Literal["token", "sequence"], RESULTS] = "token"
    """Gradient of the sequence ratio. token: each token gets the gradient of its own advantage (eq. 13-14). sequence:
    the gradient passes through the sequence ratio, so that all tokens of a sequence get its mean advantage (eq. 5-7).
    The two gradients differ if the tokens of a response have different advantages, as is usual with a critic.
    Default of: verl; NeMo-RL uses sequence."""
    aggregation: Annotated[AggregationName, RESULTS] = "sequence_mean_token_mean"
    """Aggregation of token losses to one number, with the same options as in the other kinds of policy loss.
    Default of: the paper, eq. 5."""

    def build(self) -> "PolicyLoss":
        from ppoctl.algorithms.formulas.policy_loss import Gspo

        return Gspo(self.clip_low, self.clip_high, self.ratio_gradient)


class CispoLoss(PolicyLossTable):
    """CISPO: the loss of a token is its log-prob, weighted by its advantage and its clipped ratio; the ratio is
    treated as a constant. A token outside the clip range therefore keeps its gradient.
    Formula: -A sg(clip(r, 1 - clip_low, 1 + clip_high)) log p
    Source: MiniMax-M1 (arXiv:2506.13585), eq. 4-5.
    Default of: no system (this kind of loss)."""

    metrics: ClassVar[tuple[Metric, ...]] = _CLIP_METRICS

    kind: Annotated[Literal["cispo"], RESULTS]
    """CISPO: the weight of a token is bounded, and its gradient is kept."""
    clip_low: Annotated[float, RESULTS, Field(gt=0, le=1)] = 1.0
    """Lower bound of the weight, at 1 - clip_low; 1: no lower bound.
    Default of: MiniMax-M1.
    Figures: policy/clip_frac_low"""
    clip_high: Annotated[float, RESULTS, Positive] = 0.2
    """Upper bound of the weight, at 1 + clip_high.
    Default of: verl; the paper gives no number.
    Figures: policy/clip_frac_high"""

    def build(self) -> "PolicyLoss":
        from ppoctl.algorithms.formulas.policy_loss import Cispo

        return Cispo(self.clip_low, self.clip_high)


class ReinforceLoss(PolicyLossTable):
    """REINFORCE: the plain policy gradient, without a ratio to the old policy.
    Formula: -A log p
    Source: Williams 1992.
    Default of: no system (this kind of loss)."""

    kind: Annotated[Literal["reinforce"], RESULTS]
    """The plain policy gradient (NeMo-RL's disable_ppo_ratio)."""

    def build(self) -> "PolicyLoss":
        from ppoctl.algorithms.formulas.policy_loss import Reinforce

        return Reinforce()


class PythonPolicyLoss(PolicyLossTable):
    """Loss of each token that your own Python function computes: the mean over tokens, the entropy bonus and the KL
    penalty are added as for the other kinds.
    Formula: l = function(inputs, **options)
    Source: docs/your-own-loss.md.
    Default of: no system (this kind of loss)."""

    metrics: ClassVar[tuple[Metric, ...]] = (metric_registry.POLICY_CUSTOM,)

    kind: Annotated[Literal["python"], RESULTS]
    """Your own Python function."""
    function: Annotated[str, RESULTS, Field(pattern=FUNCTION_PATTERN)]
    """`path.py:name`, with a path relative to the recipe file, or `module:name` of an installed package. The function
    is called with complete rows of a minibatch (`PolicyLossInputs` in `ppoctl.algorithms.formulas.policy_loss`:
    `logprobs`, `old_logprobs`, `advantages`, `mask`, `sampler_logprobs`, `entropy`), and with `options` as keyword
    arguments. It returns the loss of each token, or (losses, {metric: values of the tokens}). The metrics are
    reported as `policy/custom_NAME`."""
    options: Annotated[dict[str, Any], RESULTS] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    digest: Annotated[str, RESULTS] = ""
    """SHA-256 of the function's file, written when the recipe is read. A run does not continue with a changed file,
    unless `function` is set again. Empty for a function of an installed package."""
    needs_entropy: Annotated[bool, RESULTS] = False
    """Whether the function receives the entropy of each token's distribution, which then has a gradient."""

    @property
    def called(self) -> TrainingFunction:
        """The function with its options."""
        return TrainingFunction("ppo.policy_loss", self.function, dict(self.options), self.digest)

    def build(self) -> "PolicyLoss":
        from ppoctl.algorithms.stages.python_loss import PythonLoss

        return PythonLoss(self.called, self.needs_entropy)


AnyPolicyLossTable = Annotated[
    Annotated[ClippedLoss, Tag("clip")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[PythonPolicyLoss, Tag("python")],
    Discriminator(KindOr("clip")),
]

OldLogprobs = Literal["trainer", "sampler", "current"]


class ValueLossTable(Table):
    """Squared error of the critic, optionally clipped around the old values.

    Formula: e1 = (V - G)^2; e2 = (clip(V, V_old - clip, V_old + clip) - G)^2; l = scale max(e1, e2) / 2, or
    scale e1 / 2 without clip
    Source: PPO2 of OpenAI's baselines
    Default of: scale: verl, OpenRLHF, trlX (NeMo-RL's base recipe uses 0.4, TRL 0.1). clip absent: no other system;
    verl and OpenRLHF use 0.5, NeMo-RL's base recipe, TRL and trlX 0.2
    Figures: value/loss, value/explained_variance, value/explained_variance_last_epoch, value/clip_frac,
    value/value_error
    """

    clip: Annotated[float | None, RESULTS, Positive] = None
    """Bound of the change of a value: the new value is clipped to the old value +- clip, and the loss uses the larger
    of the clipped and the unclipped error. Absent: no clipping."""
    scale: Annotated[float, RESULTS, Positive] = 1.0
    """Factor of the value loss."""
    coef: Annotated[float, RESULTS, Positive] = 1.0
    """Factor of the value loss in the joint loss of a value head on the actor's model (trlX's `vf_coef`). The metric
    `value/loss` does not contain it."""
    aggregation: Annotated[AggregationName, RESULTS] = "token_mean"
    """Aggregation of token losses to one number, over a whole minibatch. token_mean: the mean over all unmasked
    tokens. sequence_mean_token_mean: the mean over sequences of the mean over the tokens of a sequence.
    sequence_mean_token_sum: the mean over sequences of the sum over the tokens of a sequence. fixed_length: the same
    sum, divided by rollout.max_new_tokens, averaged over sequences. Sequences without an unmasked token are excluded
    from the means.
    Default of: PPO2, NeMo-RL, verl (token_mean)."""
