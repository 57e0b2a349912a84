"""GDPO: each component of a reward is normalized within its group, before the components are added."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.group_table import GroupTable, estimate_of
from ppoctl.core.recipe_table import RESULTS

if TYPE_CHECKING:
    from ppoctl.algorithms.formulas.estimator import AdvantageEstimate, EstimatorInputs


class GdpoAdvantages(GroupTable):
    """Group reward-decoupled normalization policy optimization (GDPO), for `reward.kind = "sum"`: the score of each
    component is normalized among the responses to the same prompt (the group), as in `grpo`. The results are
    multiplied by the weights of `[reward.parts]`, added, and whitened over all unmasked tokens of the step. Unlike in
    `grpo`, a component with small differences counts as much as one with large differences. There is no critic.
    Reward shaping is refused, because it applies to the sum. Responses without a score are left out; truncated
    responses that `ppo.truncated` filters are in mean and std, but not in the whitening. An episode with the score of
    `environment.on_failure` has no components and is left out of theirs. Its D is its score, normalized as in `grpo`
    among all scores of the group, times the sum of |weight_k|. verl whitens over tokens
    too. The paper, NeMo-RL and TRL whiten over responses: a long response counts as much as a short one. NeMo-RL
    leaves the response itself out of mean and std by default.

    Formula: D = sum over components k of weight_k (s_k - mean_k(group)) / (std_k(group) + 1e-6); A_t = (D - mean(D))
        / sqrt(var(D) + 1e-8), mean and var over the unmasked tokens of the step, std and var with the divisor n - 1
    Source: GDPO (arXiv:2601.05242)
    Default of: no system
    Figures: advantage/equal_groups_frac, advantage/raw_std
    Other names: verl gdpo; NeMo-RL gdpo; TRL normalize_then_sum
    Equal scores: 0 for an equal component; -mean(D), scaled, if all components are equal; 0 if this holds in all
        groups
    """

    reads_components: ClassVar[bool] = True
    whiten: ClassVar[bool] = True
    """Whether advantages are whitened over all unmasked tokens of the step."""

    algorithm: ClassVar[str] = "GDPO"

    kind: Annotated[Literal["gdpo"], RESULTS]
    """Weighted sum of the components of the reward, each normalized among the responses to the same prompt, without a
    critic."""

    def estimator(self) -> "Gdpo":
        return Gdpo()


@dataclass(frozen=True)
class Gdpo:
    """Weighted sum of the standardized scores of each component."""

    gamma: ClassVar[float] = 1.0

    def __call__(self, inputs: "EstimatorInputs") -> "AdvantageEstimate":
        from ppoctl.algorithms.formulas.groups import decoupled_advantages

        return estimate_of(*decoupled_advantages(inputs))
