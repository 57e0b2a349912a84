"""REINFORCE leave-one-out: scores relative to the mean of the other responses to the same prompt."""

from typing import Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.group_table import GroupEstimator, GroupTable
from ppoctl.core.recipe_table import RESULTS


class RlooAdvantages(GroupTable):
    """REINFORCE leave-one-out (RLOO): the score of a response after reward shaping, minus the mean over the other
    responses to the same prompt. There is no critic, and all tokens of a response have the same advantage. Responses
    without a score are in no mean; truncated responses that `ppo.truncated` filters are. A group with fewer than two
    scores has advantages of exactly 0; a group with one score has its score as the advantage in verl's `rloo`, and 0
    in verl's `rloo_vectorized`. OpenRLHF and TRL add the KL penalty to the reward by default; here `ppo.kl.place` is
    "loss".

    Formula: A_t = s - mean(other responses of the group) = n / (n - 1) (s - mean(group))
    Source: Ahmadian et al. 2024 (arXiv:2402.14740)
    Default of: no system
    Figures: advantage/equal_groups_frac, advantage/raw_std
    Other names: verl rloo, rloo_vectorized; NeMo-RL grpo (normalize_rewards = false); OpenRLHF rloo; TRL RLOOTrainer
    Equal scores: 0
    """

    algorithm: ClassVar[str] = "RLOO"

    kind: Annotated[Literal["rloo"], RESULTS]
    """Score relative to the mean of the other responses to the same prompt, without a critic."""

    def estimator(self) -> GroupEstimator:
        from ppoctl.algorithms.formulas.groups import from_mean_of_others

        return GroupEstimator(from_mean_of_others)
