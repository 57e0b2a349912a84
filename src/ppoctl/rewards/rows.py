"""Whether the rows of a dataset can be scored: each has a scorer, and the ground truth that it compares with."""

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
    """Looks at rows one by one, and counts those that the reward cannot score."""

    def __init__(self, reward: ScorerTable, key: str) -> None:
        """`key` names the table of the rows. Those of `data.train` must have the ground truth that their scorer
        compares with; in an evaluation a row without one has no score."""
        self._reward, self._key = reward, key
        self._needs_truth = key == "data.train"
        self._faults: dict[str, _RowFault] = {}
        self.unscored = 0
        """Rows of an evaluation that have no score, for want of a ground truth."""

    def see(self, id: str, truth: str | None, fields: Mapping[str, Json], times: int = 1) -> None:
        """Take a row into account, which comes so many times."""
        try:
            lacks = self._reward.of_row(fields).reads_truth and truth is None
            self.unscored += times * (lacks and not self._needs_truth)
            hint = f"name its column as `{self._key}.answer`"
            found = ("there is no ground truth", hint) if lacks and self._needs_truth else None
        except RewardError as error:
            found = (error.message, error.hint or "")
        if found is not None:
            self._faults.setdefault(found[0], _RowFault(0, id, found[1])).rows += times

    def require(self) -> None:
        """Raise RewardError where some of the rows cannot be scored, with how many for each reason."""
        if not self._faults:
            return
        told = "; ".join(
            f"{fault.rows} {'row' if fault.rows == 1 else 'rows'}, first `{fault.first}`: {why}"
            for why, fault in self._faults.items()
        )
        hint = next(iter(self._faults.values())).hint
        raise RewardError(f"the reward cannot score all rows of [{self._key}]: {told}", hint=hint)
