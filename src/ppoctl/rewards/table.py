"""What every kind of reward is: a table of the recipe that opens its scorer and may know what gold looks like.

    ScorerTable    how good a response is        a kind is one file of this room, and one line in `kinds`
    RewardTable    + arithmetic                  what `[reward]` may be; `kinds` makes one of each scorer
    PartTable      + weight                      what `[reward.parts.NAME]` may be; likewise

The recipe imports these tables, so nothing heavy is imported here before a scorer is opened.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from ppoctl.batch.prompts import Json
from ppoctl.batch.scores import RewardModel, Scorer
from ppoctl.recipe_table import RESULTS, SPEED, AtLeastOne, Fraction, Positive, Table
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.shaping import RewardShaping


@dataclass(frozen=True)
class Candidates:
    """Four responses to one question, of which the gold one must score best."""

    gold: str
    wrong: str
    empty: str
    truncated: str


def no_models(table: "ScorerTable") -> RewardModel:
    """The reward model of a table, where nobody has placed any."""
    raise LookupError(f"nobody has placed the reward model of {table!r}")


class ScorerTable(Table):
    """How good a response is: keys of one kind, which adds `kind`, a literal of its own. It says nothing of what
    becomes of scores."""

    needs_truth: ClassVar[bool] = False
    """Whether a kind compares with a ground truth."""

    finds_answers: ClassVar[bool] = False
    """Whether a kind may tell which answer it read out of a response."""

    @property
    def scorers(self) -> Mapping[tuple[str, ...], "ScorerTable"]:
        """Scorers that this one is made of, by their keys below `reward`: itself, where it is not made of others."""
        return {(): self}

    @property
    def singles(self) -> tuple["ScorerTable", ...]:
        """Scorers that this one is made of."""
        return tuple(self.scorers.values())

    @property
    def reads_truth(self) -> bool:
        """Whether each row must have a ground truth."""
        return self.needs_truth

    @property
    def reads_answers(self) -> bool:
        """Whether responses can vote: their answers are told beside their scores."""
        return self.finds_answers

    @property
    def overlaps_generation(self) -> bool:
        """Whether responses may be scored while others are still drawn; not where that takes the generator's
        devices."""
        return True

    def reports(self, figure: str) -> bool:  # noqa: ARG002 - for those that do
        """Whether it may give a figure of this name beside the score, one that no list of metrics has."""
        return False

    def of_row(self, fields: Mapping[str, Json]) -> "ScorerTable":  # noqa: ARG002 - for those that choose
        """The scorer of a row with these fields: itself, where it scores all rows. Raises RewardError where there is
        none."""
        return self

    def require_there(self, key: str = "reward") -> None:
        """Raise MissingAssetError where this machine lacks what the scorer needs, RewardError where it is another
        than the recipe was read with. `key` is that of this table."""

    @abstractmethod
    def open(self, models: "RewardModels" = no_models) -> Scorer:
        """The scorer that this table asks for, to be closed by the caller; `models` has those of its tables that need
        one."""

    def candidates(self, truth: str) -> Candidates | None:  # noqa: ARG002 - for those that know
        """Responses in the scorer's own format, made from a ground truth; None: the kind knows no gold answer.

        Raises RewardError on a truth in which the scorer's format is not to be found.
        """
        return None


class RewardTable(ScorerTable, RewardShaping):
    """Keys that every reward has. A kind adds `kind`, a literal of its own."""

    max_error_frac: Annotated[float, RESULTS, Fraction] = 0.05
    """Largest share of a step's samples that may have no score. More stop the run (exit 4), and so does a step
    without any score; below, they are left out of training and counted."""


class PartTable(ScorerTable):
    """One part of a sum: the keys of a scorer, and what its score counts."""

    weight: Annotated[float, RESULTS] = 1.0
    """Factor of the part's score in the sum; below 0 the score is a penalty."""


class ProcessScorer(ScorerTable):
    """A scorer that is a function in child processes."""

    workers: Annotated[int, SPEED, AtLeastOne] = 1
    """Child processes that score."""
    timeout_s: Annotated[float, SPEED, Positive] = 10.0
    """Seconds for one sample; then its child is killed, and the outcome is `timeout`."""

    @property
    @abstractmethod
    def scores_by(self) -> ScorerSpec:
        """The function, with the options that the table sets."""

    @property
    def deadline_s(self) -> float:
        """Seconds after which a child is taken to hang over a sample."""
        return self.timeout_s

    def open(self, models: "RewardModels" = no_models) -> Scorer:  # noqa: ARG002 - no model
        """A pool of children, which the first requests start."""
        from ppoctl.rewards.pool import ScorerPool

        return ScorerPool(self.scores_by, workers=self.workers, timeout_s=self.deadline_s)


RewardModels = Callable[[ScorerTable], RewardModel]
"""The model of a table that needs one; whoever placed it closes it."""
