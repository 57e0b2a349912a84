"""What every kind of reward is: a table of the recipe that opens its scorer and may know what gold looks like.

A kind is one file of this room and one line in `kinds`. The recipe imports these tables, so nothing heavy is imported
here before a scorer is opened.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

from ppoctl.batch.scores import Scorer
from ppoctl.rewards.arithmetic import RewardArithmetic
from ppoctl.rewards.function import ScorerSpec
from ppoctl.table import RESULTS, SPEED, AtLeastOne, Fraction, Positive


@dataclass(frozen=True)
class Candidates:
    """Four responses to one question, of which the gold one must score best."""

    gold: str
    wrong: str
    empty: str
    truncated: str


class RewardTable(RewardArithmetic):
    """Keys that every reward has. A kind adds `kind`, a literal of its own."""

    needs_truth: ClassVar[bool] = False
    """Whether each row must have a ground truth."""

    max_error_frac: Annotated[float, RESULTS, Fraction] = 0.05
    """Largest share of a step's samples that may have no score. More stop the run (exit 4), and so does a step
    without any score; below, they are left out of training and counted."""

    @abstractmethod
    def open(self) -> Scorer:
        """The scorer that this table asks for, to be closed by the caller."""

    def candidates(self, truth: str) -> Candidates | None:  # noqa: ARG002 - for those that know
        """Responses in the reward's own format, made from a ground truth; None: the kind knows no gold answer.

        Raises RewardError on a truth in which the reward's format is not to be found.
        """
        return None


class ProcessReward(RewardTable):
    """A reward that a function gives, in child processes."""

    workers: Annotated[int, SPEED, AtLeastOne] = 1
    """Child processes that score."""
    timeout_s: Annotated[float, SPEED, Positive] = 10.0
    """Seconds for one sample; then its child is killed, and the outcome is `timeout`."""

    @property
    @abstractmethod
    def scores_by(self) -> ScorerSpec:
        """The function, with the options that the table sets."""

    def open(self) -> Scorer:
        """A pool of children, which the first requests start."""
        from ppoctl.rewards.pool import ScorerPool

        return ScorerPool(self.scores_by, workers=self.workers, timeout_s=self.timeout_s)
