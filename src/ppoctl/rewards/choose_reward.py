"""A reward that selects a scorer for each row, for mixed data."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Annotated, Literal, Union

from pydantic import Field

from ppoctl.core.batch.prompts import Json
from ppoctl.core.batch.scores import Score, Scorer, ScoreRequest
from ppoctl.core.errors import RewardError
from ppoctl.core.recipe_table import RESULTS
from ppoctl.rewards.combined_scores import close_all, flush_all_scorers
from ppoctl.rewards.reward_kinds import SCORERS
from ppoctl.rewards.scorer_table import RewardModels, RewardTable, ScorerTable, no_models

if TYPE_CHECKING:
    Case = ScorerTable
else:
    Case = Annotated[Union[SCORERS], Field(discriminator="kind")]  # noqa: UP007 - members are known at run time


class ChooseReward(RewardTable):
    """Score of the scorer that a field of the row selects, for mixed data.

    Default of: verl selects by `data_source`
    """

    kind: Annotated[Literal["choose"], RESULTS]
    """A field of the row selects one of several scorers."""
    by: Annotated[str, RESULTS] = "data_source"
    """Field of the row that selects the scorer. The field `source` is the name of the row's source in a mix; only
    rows of a mix have this field."""
    cases: dict[str, Case] = Field(min_length=1)
    """Scorer for each value of the field."""
    otherwise: Case | None = None
    """Scorer of rows with any other value, or without the field. Absent: such a row is an error when the run
    starts."""

    @property
    def scorers(self) -> dict[tuple[str, ...], ScorerTable]:
        # `loading.partial` replaces an invalid case by None.
        cases: dict[tuple[str, ...], ScorerTable] = {
            ("cases", name): case for name, case in self.cases.items() if case is not None
        }
        return cases if self.otherwise is None else {**cases, ("otherwise",): self.otherwise}

    @property
    def reads_truth(self) -> bool:
        return all(scorer.reads_truth for scorer in self.singles)

    @property
    def reads_answers(self) -> bool:
        return any(scorer.reads_answers for scorer in self.singles)

    def reports(self, figure: str) -> bool:
        return any(scorer.reports(figure) for scorer in self.singles)

    def of_row(self, fields: Mapping[str, Json]) -> ScorerTable:
        """Return the scorer of a row with these fields. Raises RewardError if the row has no scorer."""
        value = fields.get(self.by)
        chosen = self.cases.get(_named(value), self.otherwise)
        if chosen is not None:
            return chosen
        if self.by not in fields:
            has = ", ".join(f"`{name}`" for name in fields) or "none"
            fix = f'write `fields = ["{self.by}"]` in the table of the data'
            if self.by == "source":
                fix = 'make the set a mix: only a mix names the `source` of its rows (`format = "mix"`, `sources`)'
            raise RewardError(
                f"the row has no field `{self.by}`, which selects the reward (fields of the row: {has})",
                hint=f"{fix}, or write a table [reward.otherwise]",
            )
        cases = ", ".join(f"`{name}`" for name in self.cases)
        raise RewardError(
            f"`{self.by}` is `{_named(value)}`, and the reward has no case of that name (cases: {cases})",
            hint=f"write a table [reward.cases.{_quoted(_named(value))}], or [reward.otherwise]",
        )

    def open(self, models: RewardModels = no_models) -> Scorer:
        otherwise = None if self.otherwise is None else self.otherwise.open(models)
        return ChoosingScorer(self, {name: case.open(models) for name, case in self.cases.items()}, otherwise)


class ChoosingScorer:
    """Scorer that sends each response to the scorer of its row."""

    def __init__(self, table: ChooseReward, cases: Mapping[str, Scorer], otherwise: Scorer | None) -> None:
        self._by, self._cases, self._otherwise = table.by, cases, otherwise
        self._of_row = table.of_row

    def submit(self, request: ScoreRequest) -> Future[Score]:
        """Submit the request to the scorer of its row. The score is an error if the row has no scorer."""
        scorer = self._cases.get(_named(request.fields.get(self._by)), self._otherwise)
        if scorer is not None:
            return scorer.submit(request)
        failed: Future[Score] = Future()
        try:
            self._of_row(request.fields)
        except RewardError as error:
            failed.set_result(Score(None, "error", error.message))
        return failed

    def flush(self) -> None:
        flush_all_scorers(self._scorers)

    def close(self) -> None:
        close_all(self._scorers)

    @property
    def _scorers(self) -> tuple[Scorer, ...]:
        return (*self._cases.values(), *(() if self._otherwise is None else (self._otherwise,)))


def _named(value: Json) -> str:
    """Return a value as the name of a case: text unchanged; numbers and booleans as in JSON."""
    return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _quoted(name: str) -> str:
    return name if name.replace("-", "_").isidentifier() else f'"{name}"'
