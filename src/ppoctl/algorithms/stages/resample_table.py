"""Recipe tables of resampling: the rows of the updates are sampled again by their scores (PF-PPO)."""

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ppoctl.core.recipe_table import RESULTS, Positive, Table

if TYPE_CHECKING:
    from ppoctl.algorithms.stages.resample import WeighRows


class NoResampling(Table):
    """No resampling: the updates train on each response of the step once per epoch."""

    kind: Annotated[Literal["none"], RESULTS]
    """No resampling."""


class Resampling(Table):
    """Policy filtration (PF-PPO): before the updates, the rows of a step are sampled again with replacement. The
    probability of a row is proportional to a weight, which the score s of its response determines. s is the score
    after reward shaping, before any KL penalty. The number of rows does not change; a row that is sampled twice
    counts twice in both losses. Responses without a score, and those that `ppo.truncated` filters, are never sampled;
    if the weights of all others are 0, the others are equally likely. Values, log-probs, advantages and corrections
    are computed over all rows, before they are sampled again; `trained/seqs` and `trained/tokens` count these rows.
    The metrics of the updates are means over the sampled rows.

    Formula: P(i) = w_i / sum_j w_j
    Source: Zhang et al. 2024 (arXiv:2409.06957); the weights are verl's
    Default of: all systems (off); only verl has it
    Figures: resample/effective_seqs
    """

    order: Annotated[Literal["after_whitening", "before_whitening"], RESULTS] = "after_whitening"
    """Order of resampling and whitening. after_whitening: advantages are whitened over all rows, then rows are
    sampled, so the mean of the advantages in the loss is not 0. before_whitening: rows are sampled first, then their
    advantages are whitened, each as often as its row was sampled. The critic's update does not depend on the order.
    Default of: verl (after_whitening)."""

    @abstractmethod
    def weigh(self) -> "WeighRows":
        """Return the function that computes the weight of each row."""


class PowerResampling(Resampling):
    """Rows are sampled in proportion to a power of the size of their score. With scores of 0 and 1, only responses
    with score 1 train. Negative scores count like positive scores of the same size.

    Formula: w = |s|^power
    Source: verl (`reweight_method = "pow"`)
    Default of: verl, if resampling is on
    Figures: resample/effective_seqs
    """

    kind: Annotated[Literal["pow"], RESULTS]
    """In proportion to a power of the size of the score."""
    power: Annotated[float, RESULTS, Positive] = 2.0
    """Exponent.
    Default of: verl."""

    def weigh(self) -> "WeighRows":
        from ppoctl.algorithms.formulas.resampling import power_weights

        return partial(power_weights, power=self.power)


class MaxMinResampling(Resampling):
    """Only rows with the highest or the lowest score of the step train.

    Formula: w = 1 if s = max(s) or s = min(s), else 0
    Source: Zhang et al. 2024 (arXiv:2409.06957), which filters the responses to each prompt; verl (`max_min`)
    Default of: no system
    Figures: resample/effective_seqs
    """

    kind: Annotated[Literal["max_min"], RESULTS]
    """Only the highest and the lowest score."""

    def weigh(self) -> "WeighRows":
        from ppoctl.algorithms.formulas.resampling import max_min_weights

        return max_min_weights


class MaxRandomResampling(Resampling):
    """Rows with the highest score of the step are four times as likely as others.

    Formula: w = 0.4 if s = max(s), else 0.1
    Source: Zhang et al. 2024 (arXiv:2409.06957), which filters the responses to each prompt; verl (`max_random`),
        whose numbers these are
    Default of: no system
    Figures: resample/effective_seqs
    """

    kind: Annotated[Literal["max_random"], RESULTS]
    """The highest score, and others less often."""

    def weigh(self) -> "WeighRows":
        from ppoctl.algorithms.formulas.resampling import max_random_weights

        return max_random_weights


ResampleTable = Annotated[
    NoResampling | PowerResampling | MaxMinResampling | MaxRandomResampling, Field(discriminator="kind")
]
