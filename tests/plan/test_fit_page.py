"""docs/fit.md shows what `plan --fit` proposes, for recipes that `plan` accepts, and the table of changes."""

from pathlib import Path

import pytest

from plan.fit_page import CASES, HEADER, MOVES, line, row

PAGE = (Path(__file__).parents[2] / "docs" / "fit.md").read_text("utf-8").splitlines()
QUICK = 1
"""Number of rows that are checked in the quick set."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if number < QUICK else pytest.mark.slow) for number, case in enumerate(CASES)],
    ids=[f"{name}, {gpus} x {gib:g}" for name, gib, gpus in CASES],
)
def test_table_equals_proposals(case: tuple[str, float, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPOCTL_DATA", "/data")
    assert line(row(*case)) in PAGE, "PYTHONPATH=src:tests python tests/plan/fit_page.py"


def test_table_has_these_rows_only() -> None:
    first = PAGE.index(line(HEADER))
    rows = PAGE[first + 2 : PAGE.index("", first)]
    assert [each.split(" | ")[:2] for each in rows] == [
        [f"| `{name}`", f"{gpus} x {gib:g} GiB"] for name, gib, gpus in CASES
    ]


def test_page_lists_every_change_with_its_cost() -> None:
    cells = [each.strip("| ").split(" | ") for each in PAGE if each.startswith("| ")]
    assert [cell[0] for cell in cells if len(cell) == 3 and cell[2]] == ["change", *MOVES]
