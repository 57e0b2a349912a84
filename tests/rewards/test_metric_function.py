"""A user's metric function runs in another process; its faults are reported with their location."""

from pathlib import Path
from typing import Any

import pytest

from ppoctl.core.errors import RewardError
from ppoctl.rewards.metric_function import MetricFunction

FILE = Path(__file__).with_name("users_metrics.py")
SAMPLES: list[dict[str, Any]] = [{"response": "one two three"}, {"response": "four"}]


def function(name: str, **keys: Any) -> MetricFunction:
    return MetricFunction(function=f"{FILE}:{name}", **keys)


def test_metric_function_returns_metrics_with_options() -> None:
    assert function("measure").compute(SAMPLES) == {"words": 2.0}
    assert function("measure", options={"unit": 4.0}).compute(SAMPLES) == {"words": 0.5}


def test_metric_function_is_found_by_module() -> None:
    with pytest.raises(RewardError, match=r"`statistics:mean`: TypeError: .* \(statistics.py:") as caught:
        MetricFunction(function="statistics:mean").compute(SAMPLES)
    assert caught.value.hint == "python -m ppoctl.core.user_functions statistics:mean"


WRONG = {
    "raises": r"ZeroDivisionError: division by zero \(users_metrics.py:\d+, in `raises`: `return ",
    "alone": r"returned a int \(`2`\), not a mapping of metrics such as `\{\"words_mean\": 12.5\}`",
    "misnamed": r"returned a metric named `words / sample`: a name consists of letters, digits and underscores",
    "infinite": r"it returned `inf` as `words`",
    "text": r"returned a str as `words`, not a number",
    "leaves": r"SystemExit: ",
    "missing": r"it does not start: AttributeError: .* has no `missing`; it defines ",
    "takes_nothing": r"it does not start: TypeError: `takes_nothing\(\).* is called with a list of samples",
}


@pytest.mark.parametrize("name", WRONG)
def test_metric_function_errors_name_the_function(name: str) -> None:
    with pytest.raises(RewardError, match=WRONG[name]) as caught:
        function(name).compute(SAMPLES)
    assert caught.value.message.startswith(f"`eval.metrics` is `{FILE}:{name}`: ")
    assert caught.value.hint == f"python -m ppoctl.core.user_functions {FILE}:{name}"


def test_hanging_metric_function_times_out() -> None:
    with pytest.raises(RewardError, match=r"no metrics within 0.3 s"):
        function("hangs", timeout_s=0.3).compute(SAMPLES)


@pytest.mark.parametrize("name", ["raises", "missing", "takes_nothing"])
def test_require_sound_does_not_call_metric_function(name: str) -> None:
    if name == "raises":
        function(name).require_sound()
        return
    with pytest.raises(RewardError, match="does not start"):
        function(name).require_sound()
