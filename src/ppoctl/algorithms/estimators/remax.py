"""ReMax: scores relative to the greedy response to the same prompt."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from ppoctl.algorithms.estimators.table import EstimatorTable
from ppoctl.core.recipe_table import RESULTS

if TYPE_CHECKING:
    from ppoctl.algorithms.formulas.estimator import AdvantageEstimate, EstimatorInputs


class RemaxAdvantages(EstimatorTable):
    """ReMax: the score of a response after reward shaping, minus the score of the greedy response to the same prompt
    (the baseline), so that one sampled response per prompt is enough. There is no critic, and all tokens of a
    response have the same advantage. In each step, the actor also generates one greedy response per prompt, with
    temperature 0, without filters, and with the length limits of the rollout; it is scored, but never trained on. Its
    reward is shaped like the other rewards, divided by the same moments, and does not join the moments. If it has no
    score, the responses to its prompt are treated as responses without a score. The token scores of a scorer are
    summed over the response; verl subtracts the baseline from the sum of the token scores from the token on. verl
    does not shape the baseline.

    Formula: A_t = s - s(greedy response)
    Source: Li et al. 2024 (arXiv:2310.10505), algorithm 1
    Default of: no system
    Figures: baseline/score_mean, baseline/error_frac, advantage/raw_mean
    Other names: verl remax
    Equal scores: the same for all responses, and 0 only if the greedy response has the same score
    """

    trains_critic: ClassVar[bool] = False
    reads_values: ClassVar[bool] = False
    reads_token_rewards: ClassVar[bool] = False
    reads_baselines: ClassVar[bool] = True
    whiten: ClassVar[bool] = False
    """Whether advantages are whitened: the baseline already reduces their variance, and whitening would move it."""

    algorithm: ClassVar[str] = "ReMax"

    kind: Annotated[Literal["remax"], RESULTS]
    """Score relative to the greedy response to the same prompt, without a critic."""

    def estimator(self) -> "Remax":
        return Remax()


@dataclass(frozen=True)
class Remax:
    """Scores relative to the greedy response to the same prompt."""

    gamma: ClassVar[float] = 1.0

    def __call__(self, inputs: "EstimatorInputs") -> "AdvantageEstimate":
        import torch

        from ppoctl.algorithms.formulas.estimator import AdvantageEstimate

        assert inputs.baselines is not None, "ReMax requires greedy responses, which were not generated"
        relative = inputs.scores - inputs.baselines
        return AdvantageEstimate(torch.where(inputs.mask, relative[:, None], 0.0), None, {})
