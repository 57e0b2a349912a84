"""Estimates over k responses equal the mean over all choices of k, counted one by one."""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppoctl.algorithms.stages.eval_metrics import UNSCORED, Estimates, summarise
from ppoctl.algorithms.stages.pass_at import best_at, majority_at, mean_and_error

SCORES = st.lists(st.sampled_from([0.0, 1.0, 0.25, -1.0]), min_size=1, max_size=7)
GIVEN = st.lists(
    st.tuples(st.sampled_from(["4", "5", "6", None]), st.sampled_from([0.0, 1.0, 0.5])), min_size=1, max_size=7
)


def voted(chosen: Sequence[tuple[str | None, float]], everything: Sequence[tuple[str | None, float]]) -> float:
    """Return the score of the most frequent answer; the mean score if several tie."""
    votes = Counter(answer for answer, _ in chosen)
    most = [answer for answer, count in votes.items() if count == max(votes.values())]
    return mean(mean(score for other, score in everything if other == answer) for answer in most)


@given(SCORES, st.data())
def test_best_at_k_is_mean_over_all_choices(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    assert best_at(scores, k) == pytest.approx(mean(max(chosen) for chosen in combinations(scores, k)))


@given(GIVEN, st.data())
def test_majority_at_k_is_mean_over_all_choices(samples: list[tuple[str | None, float]], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    expected = mean(voted(chosen, samples) for chosen in combinations(samples, k))
    assert majority_at(*zip(*samples, strict=True), k) == pytest.approx(expected)  # type: ignore[arg-type]


def test_best_at_k_of_binary_scores_equals_pass_at_k() -> None:
    """1 - C(n - c, k) / C(n, k) with n = 10, c = 3, k = 4: 1 - 35 / 210."""
    assert best_at([1.0] * 3 + [0.0] * 7, 4) == pytest.approx(1 - 35 / 210)
    assert best_at([1.0] * 3 + [0.0] * 7, 1) == pytest.approx(0.3)
    assert best_at([0.0] * 2000 + [1.0], 1000) == pytest.approx(1000 / 2001)


def test_majority_votes_by_hand() -> None:
    """Pairs of (a, a, b): one has a majority, two are ties: (1 + 1/2 + 1/2) / 3 if a is right."""
    assert majority_at(["a", "a", "b"], [1.0, 1.0, 0.0], 2) == pytest.approx(2 / 3)
    assert majority_at(["a", "a", "b"], [1.0, 1.0, 0.0], 3) == 1
    assert majority_at(["a", "a", "b"], [0.0, 0.0, 1.0], 3) == 0
    # Responses without an answer vote together.
    assert majority_at([None, None, "b"], [0.0, 0.0, 1.0], 3) == 0
    assert majority_at(["a"] * 600 + ["b"] * 400, [1.0] * 600 + [0.0] * 400, 999) == pytest.approx(1)


def test_standard_error_is_over_prompts() -> None:
    assert mean_and_error([0.5, 1.0]) == (0.75, pytest.approx((0.125 / 2) ** 0.5))
    assert mean_and_error([0.5]) == (0.5, 0.0)


def rows(*of_prompts: tuple[str, list[float | None], str]) -> list[dict[str, object]]:
    return [
        {
            "prompt_id": name,
            "score": score,
            "outcome": "ok" if score is not None else "error",
            "given": answer or None,
        }
        | {"terminated": True, "response_tokens": 4}
        for name, scores, answers in of_prompts
        for score, answer in zip(scores, answers, strict=True)
    ]


def test_eval_metrics_average_prompts_with_enough_scores() -> None:
    """Prompt c has one score of three: it counts only for estimates that need one response."""
    found = rows(("a", [2.0, 0.0, 2.0], "xyx"), ("b", [0.0, 0.0, 1.0], "xxy"), ("c", [None, 1.0, None], "---"))
    metrics = summarise("s", "sampled", found, Estimates(pass_at=(2,), maj_at=(3,), pass_score=1.0))
    estimates = {name.removeprefix("eval/s/"): value for name, value in metrics.items() if "stderr" not in name}
    assert estimates == pytest.approx(
        {
            "truncated_frac": 0,
            "response_tokens_mean": 4,
            "error_frac": 2 / 9,
            "pass_at_1": (2 / 3 + 1 / 3 + 1) / 3,
            "score_mean": (4 / 3 + 1 / 3 + 1) / 3,
            "pass_at_2": (1 + 2 / 3) / 2,
            "best_at_2": (2 + 2 / 3) / 2,
            "maj_at_3": (1 + 0) / 2,
        }
    )
    assert metrics["eval/s/maj_at_3_stderr"] == pytest.approx(0.5)


def test_unrequested_score_is_not_counted_as_error() -> None:
    """Two of four were scored, and one of them failed."""
    found = rows(("a", [1.0, None], "xx"), ("b", [None, None], "--"))
    for row in found[2:]:
        row["outcome"] = UNSCORED
    assert summarise("s", "sampled", found, Estimates())["eval/s/error_frac"] == 1 / 2


def test_unscored_eval_set_reports_only_length_and_truncation() -> None:
    found = [{**row, "outcome": UNSCORED} for row in rows(("a", [None, None], "--"))]
    assert set(summarise("s", "greedy", found, Estimates())) == {
        "eval/s/greedy_truncated_frac",
        "eval/s/greedy_response_tokens_mean",
    }
