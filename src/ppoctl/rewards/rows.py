"""Check that the rows of a dataset can be scored: each row requires a scorer, and a ground truth if the scorer
compares with it."""

from collections.abc import Mapping
from dataclasses import dataclass

from ppoctl.batch.prompts import Json
from ppoctl.errors import RewardError
from ppoctl.rewards.table import ScorerTable


@dataclass
class _RowFault:
    rows: int
    first: str
    hint: str


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

    def see(self, id: str, truth: str | None, fields: Mapping[str, Json], times: int = 1) -> None:
        """Check a row that occurs `times` times."""
        try:
            lacks = self._reward.of_row(fields).reads_truth and truth is None
            self.unscored += times * (lacks and not self._needs_truth)
            hint = f"name its column as `{self._key}.answer`"
            fault = ("there is no ground truth", hint) if lacks and self._needs_truth else None
        except RewardError as error:
            fault = (error.message, error.hint or "")
        if fault is not None:
            self._faults.setdefault(fault[0], _RowFault(0, id, fault[1])).rows += times

    def require(self) -> None:
        """Raise RewardError if rows cannot be scored, with the number of rows for each reason."""
        if not self._faults:
            return
        reasons = "; ".join(
            f"{fault.rows} {'row' if fault.rows == 1 else 'rows'}, first `{fault.first}`: {why}"
            for why, fault in self._faults.items()
        )
        hint = next(iter(self._faults.values())).hint
        raise RewardError(f"the reward cannot score all rows of [{self._key}]: {reasons}", hint=hint)
