"""Exact match: which texts count as equal."""

import pytest

from ppoctl.rewards import exact_match
from rewards.asking import request


@pytest.mark.parametrize(
    ("response", "value", "value_ignoring_case"),
    [("Paris", 1, 1), (" Paris\n", 1, 1), ("paris", 0, 1), ("Paris.", 0, 0), ("", 0, 0), ("In Paris", 0, 0)],
)
def test_exact_match_ignores_surrounding_whitespace(response: str, value: float, value_ignoring_case: float) -> None:
    assert exact_match.score(request(response, "Paris ")).value == value
    assert exact_match.score(request(response, "Paris "), ignore_case=True).value == value_ignoring_case


def test_ignore_case_folds_beyond_ascii() -> None:
    assert exact_match.score(request("STRASSE", "stra\u00dfe"), ignore_case=True).value == 1


def test_exact_match_with_empty_truth_raises() -> None:
    with pytest.raises(ValueError, match="ground truth is empty"):
        exact_match.score(request("", "  "))
