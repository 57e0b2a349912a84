"""Base classes of all kinds of reward: recipe tables that open a scorer and may build a gold answer.

    ScorerTable    scores a response             a kind is one file of this package, and one line in `kinds`
    RewardTable    + reward shaping              accepted by `[reward]`; `kinds` derives one from each scorer
    PartTable      + weight                      accepted by `[reward.parts.NAME]`; made in the same way

The recipe imports these tables, so slow imports happen only when a scorer is opened.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from ppoctl.core.batch.prompts import Json
from ppoctl.core.batch.scores import RewardModel, Scorer
from ppoctl.core.recipe_table import RESULTS, SPEED, AtLeastOne, Fraction, Positive, Table
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.shaping_tables import RewardShaping


@dataclass(frozen=True)
class Candidates:
    """Four responses to one prompt. The gold response must score best."""

    gold: str
    wrong: str
    empty: str
    truncated: str


def no_models(table: "ScorerTable") -> RewardModel:
    """Raise LookupError. This function is the default argument of `open`, for callers without reward models."""
    raise LookupError(f"the reward model of {table!r} is not loaded")


class ScorerTable(Table):
    """Keys of one kind of scorer. Each kind adds `kind`, with its own literal. Shaping of the scores is separate."""

    needs_truth: ClassVar[bool] = False
    """Whether the kind compares with a ground truth."""

    finds_answers: ClassVar[bool] = False
    """Whether the kind may return the answer that it extracted from a response."""

    @property
    def scorers(self) -> Mapping[tuple[str, ...], "ScorerTable"]:
        """Scorers that this scorer consists of, by their keys below `reward`; only this scorer if it combines no
        others."""
        return {(): self}

    @property
    def singles(self) -> tuple["ScorerTable", ...]:
        """Scorers that this scorer consists of."""
        return tuple(self.scorers.values())

    @property
    def reads_truth(self) -> bool:
        """Whether each row must have a ground truth."""
        return self.needs_truth

    @property
    def reads_answers(self) -> bool:
        """Whether responses can vote, because scores include their answers."""
        return self.finds_answers

    @property
    def required_text(self) -> str:
        """Text that each response with a score above 0 contains, if known. A prompt must not end with it, because the
        response to such a prompt continues after it."""
        return ""

    def reports(self, figure: str) -> bool:  # noqa: ARG002 - subclasses read it
        """Whether the scorer may report a metric of this name that is not in the list of metrics."""
        return False

    def of_row(self, fields: Mapping[str, Json]) -> "ScorerTable":  # noqa: ARG002 - subclasses read it
        """Return the scorer of a row with these fields; this scorer if it scores all rows. Raises RewardError if the
        row has no scorer."""
        return self

    def require_there(self, key: str = "reward") -> None:
        """Raise MissingAssetError if this machine lacks a requirement of the scorer, and RewardError if the scorer
        has changed since the recipe was read. `key` is the key of this table."""

    def accepted_by(self, key: str) -> str | None:  # noqa: ARG002 - subclasses read it
        """Return the setting, as for `--set`, with which a resume accepts a changed file of the scorer; None: the
        scorer has no file of the user. `key` is the key of this table."""
        return None

    @abstractmethod
    def open(self, models: "RewardModels" = no_models) -> Scorer:
        """Return the configured scorer, which the caller must close. `models` returns the reward model of a table."""

    def require_truth(self, truth: str) -> None:
        """Raise RewardError if the scorer cannot read a ground truth from its beginning to its end."""

    def response_with(self, answer: str, truth: str) -> str | None:  # noqa: ARG002 - subclasses read them
        """Return a response in the scorer's format with this answer to the row of a ground truth; None: the kind has
        no format for answers."""
        return None

    def candidates(self, truth: str) -> Candidates | None:  # noqa: ARG002 - subclasses read it
        """Return responses in the scorer's format, built from the text of a ground truth; None: the kind cannot build
        a gold answer.

        Raises the error of `require_truth`.
        """
        return None


class RewardTable(ScorerTable, RewardShaping):
    """Keys that every reward has. Each kind adds `kind`, with its own literal."""

    max_error_frac: Annotated[float, RESULTS, Fraction] = 0.05
    """Largest fraction of a step's samples that may have no score. A larger fraction, or a step without any score,
    stops the run (exit 4). Up to this fraction, samples without a score are counted and left out of training."""

    @property
    def component_weights(self) -> Mapping[str, float]:
        """Weight of each component whose score is an extra of the same name; empty: the reward has no components."""
        return {}


class PartTable(ScorerTable):
    """One component of a sum: the keys of a scorer, and the weight of its score."""

    weight: Annotated[float, RESULTS] = 1.0
    """Factor of the component's score in the sum. Below 0, the score is a penalty."""


class ProcessScorer(ScorerTable):
    """A scorer that runs a function in child processes."""

    workers: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of scorer processes."""
    timeout_s: Annotated[float, SPEED, Positive] = 10.0
    """Time limit of one sample in seconds. At the limit its process is killed, and the outcome is `timeout`."""

    @property
    @abstractmethod
    def scores_by(self) -> ScorerSpec:
        """The scoring function, with the options that the table sets."""

    @property
    def deadline_s(self) -> float:
        """Seconds after which a child is considered to hang on a sample."""
        return self.timeout_s

    def open(self, models: "RewardModels" = no_models) -> Scorer:  # noqa: ARG002 - no model
        """Return a pool of child processes, which the first requests start."""
        from ppoctl.rewards.scorer_pool import ScorerPool

        return ScorerPool(self.scores_by, workers=self.workers, timeout_s=self.deadline_s)


RewardModels = Callable[[ScorerTable], RewardModel]
"""Function that returns the reward model of a table. The code that loaded the model closes it."""
