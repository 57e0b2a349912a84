"""Check that the rows of a dataset can be scored: each row requires a scorer and, if the scorer compares with it, a
ground truth that this scorer reads to its end."""

from collections.abc import Mapping
from dataclasses import dataclass

from ppoctl.core.batch.prompts import Json
from ppoctl.core.errors import RewardError
from ppoctl.rewards.scorer_table import ScorerTable

_SHOWN_ROWS = 5
ADD_TRUTH = (
    'name its column: `answer` with `format = "columns"`; rows of a function need the key `answer`, and rows of verl '
    "`reward_model.ground_truth`"
)
"""Hint for rows without a ground truth. Only the format `columns` has a key that names a column."""


@dataclass
class _RowFault:
    """Rows that the reward cannot score for one reason."""

    rows: int
    hint: str
    first: str
    """First row, and why it cannot be scored."""
    more: list[str]
    """Ids of further rows, up to a limit."""


class RowCheck:
    """Counter of the rows that the reward cannot score."""

    def __init__(self, reward: ScorerTable, key: str) -> None:
        """`key` is the key of the recipe table that defines the rows. Rows of `data.train` must have the ground truth
        that their scorer requires; an evaluation row without it gets no score."""
        self._reward, self._key = reward, key
        self._needs_truth = key == "data.train"
        self._faults: dict[str, _RowFault] = {}
        self.unscored = 0
        """Number of evaluation rows that get no score because they have no ground truth."""
        self._seen = 0
        self.empty = 0
        """Number of rows that get no score because their ground truth is empty. Real data has a few such rows."""

    def see(self, id: str, truth: str | None, fields: Mapping[str, Json], times: int = 1) -> None:
        """Check a row that occurs `times` times."""
        self._seen += times
        try:
            scorer = self._reward.of_row(fields)
        except RewardError as error:
            self._add(error.message, error, id, times)
            return
        if truth is None:
            self._without_truth(scorer, id, times)
        elif scorer.reads_truth and not truth.strip():
            self.empty += times
        else:
            try:
                scorer.require_truth(truth)
            except RewardError as error:
                self._add(error.hint or "", error, id, times)

    def _without_truth(self, scorer: ScorerTable, id: str, times: int) -> None:
        if scorer.reads_truth and not self._needs_truth:
            self.unscored += times
        elif scorer.reads_truth:
            lacks = RewardError("there is no ground truth", hint=ADD_TRUTH)
            self._add(lacks.message, lacks, id, times)

    def _add(self, reason: str, error: RewardError, id: str, times: int) -> None:
        """Count a row. Rows with the same `reason` are counted together."""
        fault = self._faults.setdefault(reason, _RowFault(0, error.hint or "", f"first `{id}`: {error.message}", []))
        if fault.rows and len(fault.more) < _SHOWN_ROWS - 1:
            fault.more.append(f"`{id}`")
        fault.rows += times

    def require(self) -> None:
        """Raise RewardError if rows cannot be scored, with the number of rows for each reason."""
        if 0 < self.empty == self._seen:
            raise RewardError(f"the ground truth of all rows of [{self._key}] is empty", hint=ADD_TRUTH)
        if not self._faults:
            return
        reasons = "; ".join(
            f"{fault.rows} {'row' if fault.rows == 1 else 'rows'}, {fault.first}"
            + (f" (also {', '.join(fault.more)})" if fault.more else "")
            for fault in self._faults.values()
        )
        hint = next(iter(self._faults.values())).hint
        raise RewardError(f"the reward cannot score all rows of [{self._key}]: {reasons}", hint=hint)
