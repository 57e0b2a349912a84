"""Errors of rows, collected so that one pass over a data set reports all of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ppoctl.core.errors import DataError
from ppoctl.data.row_blocks import Place

MOST_FAULTS = 20
"""Maximum number of different faults of a data set that are reported."""
_VALUE = re.compile(r"(?<= is )`.*`(?= \(a \w+\), but )|\b(column|message|byte|at) \d+", re.DOTALL)
"""Parts of a message that differ between rows with the same fault: the value that has a wrong type, and numbers."""
_MOST_PLACES = 3
"""Maximum number of places that a fault names after the first one."""


@dataclass
class _Fault:
    error: DataError
    places: list[Place]
    rows: int = 1


@dataclass
class RowFaults:
    """Faults of the rows of one data set. Rows with the same fault are reported together."""

    _faults: dict[str, _Fault] = field(default_factory=dict)
    _more: int = 0

    def add(self, error: DataError, place: Place, id: str = "") -> None:
        """Add the error of a row. The message contains the place of the row, and perhaps its id."""
        what = error.message.replace(place, "")
        what = _VALUE.sub("", what.replace(id, "") if id else what)
        if (known := self._faults.get(what)) is not None:
            known.rows += 1
            if len(known.places) <= _MOST_PLACES:
                known.places.append(place)
        elif len(self._faults) < MOST_FAULTS:
            self._faults[what] = _Fault(error, [place])
        else:
            self._more += 1

    def errors(self) -> tuple[DataError, ...]:
        """Return one error for each fault, in the order of the rows, and one with the number of rows that are not
        shown."""
        shown = [_error(fault) for fault in self._faults.values()]
        if self._more:
            rows = "1 more row is" if self._more == 1 else f"{self._more} more rows are"
            shown.append(DataError(f"{rows} wrong", hint=shown[0].hint))
        return tuple(shown)

    def require_none(self) -> None:
        """Raise one error for all faults, with a line for each."""
        if errors := self.errors():
            raise joined(errors)


def joined(errors: Sequence[DataError]) -> DataError:
    """Return one error with the messages of several errors, one per line, and the hint of the first."""
    first = errors[0]
    return first if len(errors) == 1 else DataError("\n".join(map(str, errors)), hint=first.hint)


def _error(fault: _Fault) -> DataError:
    if fault.rows == 1:
        return fault.error
    first, *others = fault.places
    folder = first[: first.rfind("`") + 2]
    also = [place.removeprefix(folder) for place in others]
    if fault.rows > len(fault.places):
        also.append(f"{fault.rows - len(fault.places)} more rows")
    return DataError(f"{fault.error.message}; also {', '.join(also)}", hint=fault.error.hint)
