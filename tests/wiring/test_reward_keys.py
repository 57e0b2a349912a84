"""A reward scores as its table specifies, with the function that its child processes run."""

import json
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import RewardError
from ppoctl.core.user_functions import digest_of
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.python_reward import PythonScorer
from ppoctl.rewards.scorer_table import ProcessScorer, no_models
from rewards.asking import request
from rewards.endpoint import ended, endpoint
from rewards.scoring_service import serving
from wiring.cases import holds
from wiring.harness import with_keys

EXACT = {"kind": "exact_match"}
GSM8K = {"kind": "gsm8k"}
MATH = {"kind": "math"}
DAPO = {"kind": "dapo_math"}
FORM = {"kind": "format", "pattern": "a+"}
WORDS = {"kind": "length", "unit": "words"}
CHOOSE = {"kind": "choose", "cases": {"bare": EXACT}, "otherwise": GSM8K}


class Here:
    """A scorer that runs its function in this process."""

    def __init__(self, spec: ScorerSpec) -> None:
        module, _, name = spec.entry.partition(":")
        entry = getattr(import_module(module), name)
        if spec.opens:
            function = entry(**spec.options)
            self.function = lambda request: function([request])[0]
        else:
            self.function = partial(entry, **spec.options)

    def submit(self, request: ScoreRequest) -> Future[Score]:
        future: Future[Score] = Future()
        scored = self.function(request)
        future.set_result(Score(float(scored.value), "ok", extras=scored.extras))
        return future

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def without_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessScorer, "open", lambda table, _=no_models: Here(table.scores_by))


def score(reward: dict[str, Any], response: str, truth: str, fields: dict[str, Any] | None = None) -> float:
    with closing(Recipe.model_validate(with_keys({"reward": reward})).reward.open()) as scorer:
        scored = scorer.submit(replace(request(response, truth), fields=fields or {})).result(timeout=10)
    assert scored.value is not None
    return scored.value


@holds(
    "reward.kind", "reward.strict", "reward.ignore_case", "reward.last_chars", "reward.rule", "reward.pattern",
    "reward.match", "reward.unit", "reward.at_least", "reward.at_most", "reward.fall",
)  # fmt: skip
@pytest.mark.parametrize(
    ("reward", "response", "truth", "expected"),
    [
        (EXACT, "Paris ", "Paris", 1.0),
        (EXACT, "thus #### 4", "4", 0.0),
        (GSM8K, "thus #### 4", "4", 1.0),
        (EXACT, "paris", "Paris", 0.0),
        ({**EXACT, "ignore_case": True}, "paris", "Paris", 1.0),
        (GSM8K, "it is 4", "4", 0.0),
        ({**GSM8K, "strict": False}, "it is 4", "4", 1.0),
        ({**GSM8K, "strict": True}, "it is 4", "4", 0.0),
        (GSM8K, "#### 4 is it", "4", 1.0),
        ({**GSM8K, "last_chars": 5}, "#### 4 is it", "4", 0.0),
        (MATH, "it is 2/4", "0.5", 1.0),
        ({**MATH, "last_chars": 1}, "it is 2/4", "0.5", 0.0),
        ({**MATH, "rule": "last_box"}, "it is 2/4", "0.5", 0.0),
        ({**MATH, "rule": "last_box"}, "it is \\boxed{2/4}", "0.5", 1.0),
        ({**MATH, "rule": "hendrycks"}, "it is \\boxed{2/4}", "0.5", 0.0),
        ({**MATH, "rule": "hendrycks"}, "it is \\boxed{1/2}", "0.5", 1.0),
        (DAPO, "Answer: 4 ways", "4", 1.0),
        ({**DAPO, "last_chars": 7}, "Answer: 4 ways", "4", 0.0),
        (FORM, "aa", "", 1.0),
        (FORM, "baa", "", 0.0),
        ({**FORM, "match": "search"}, "baa", "", 1.0),
        ({**FORM, "pattern": "a"}, "aa", "", 0.0),
        ({**WORDS, "at_most": 2}, "a b c", "", 0.0),
        ({**WORDS, "at_most": 2, "fall": 4}, "a b c", "", 0.75),
        ({**WORDS, "at_least": 2}, "a b c", "", 1.0),
        ({**WORDS, "at_least": 4}, "a b c", "", 0.0),
        ({**WORDS, "unit": "characters", "at_least": 4}, "a b c", "", 1.0),
    ],
)
def test_response_is_scored_with_the_kind_and_parsing_of_the_recipe(
    reward: dict[str, Any], response: str, truth: str, expected: float
) -> None:
    assert score(reward, response, truth) == expected


@holds("reward.url")
def test_http_reward_calls_the_service_of_the_recipe() -> None:
    with serving() as first, serving() as second:
        for service in (second, first):
            assert score({"kind": "http", "url": service.url}, "200 0.5", "") == 0.5
            assert len(service.asked) == 1
        assert len(second.asked) == 1


@holds(
    "reward.partial",
    "reward.max_tests",
    "reward.timeout_s",
    "reward.memory_mib",
    "reward.processes",
    "reward.output_kib",
)
@pytest.mark.parametrize(
    ("keys", "program", "expected"),
    [
        ({}, "print(input() * 2)", 0.5),
        ({"partial": False}, "print(input() * 2)", 0.0),
        ({"max_tests": 1}, "print(input() * 2)", 1.0),
        ({"timeout_s": 0.05}, "import time; time.sleep(0.3); print('aa')", 0.0),
        ({"timeout_s": 9.0}, "import time; time.sleep(0.3); print('aa')", 0.5),
        ({"memory_mib": 128}, "many = bytearray(200 << 20); print('aa')", 0.0),
        ({"memory_mib": 512}, "many = bytearray(200 << 20); print('aa')", 0.5),
        ({"processes": 1}, "import threading; threading.Thread(target=print, args=['aa']).start()", 0.0),
        ({"processes": 2}, "import threading; threading.Thread(target=print, args=['aa']).start()", 0.5),
        ({"output_kib": 1}, "print('aa' + ' ' * 2000)", 0.0),
        ({"output_kib": 2}, "print('aa' + ' ' * 2000)", 0.5),
    ],
)
def test_program_is_run_with_the_tests_and_limits_of_the_recipe(
    keys: dict[str, Any], program: str, expected: float
) -> None:
    truth = json.dumps({"inputs": ["a", "b"], "outputs": ["aa", "wrong"]})
    assert score({"kind": "code", **keys}, f"```python\n{program}\n```", truth) == expected


@holds("reward.sandbox", "reward.language")
def test_program_runs_in_the_sandbox_and_language_of_the_recipe() -> None:
    truth = json.dumps({"inputs": ["a"], "outputs": ["from afar"]})
    response = "```python\nprint('here')\n```"
    assert score({"kind": "code"}, response, truth) == 0
    with endpoint([(200, ended("from afar"))]) as (url, requests):
        there = {"kind": "code", "sandbox": "fusion", "url": url}
        assert score(there, response, truth) == 1
        assert score({**there, "language": "rust"}, response, truth) == 1
    assert [each["language"] for each in requests] == ["python", "rust"]


@holds("reward.parts.*.weight")
@pytest.mark.parametrize(("weight", "expected"), [(1.0, 2.0), (-0.5, 0.5)])
def test_sum_adds_its_parts_by_weight(weight: float, expected: float) -> None:
    parts = {"number": GSM8K, "bare": {**EXACT, "weight": weight}}
    assert score({"kind": "sum", "parts": parts}, "#### 4", "#### 4") == expected


@holds("reward.by")
@pytest.mark.parametrize(("by", "expected"), [("data_source", 0.0), ("source", 1.0)])
def test_row_is_scored_by_the_case_of_its_field(by: str, expected: float) -> None:
    assert score({**CHOOSE, "by": by}, "thus #### 4", "4", {"data_source": "bare", "source": "other"}) == expected


@holds("reward.function", "reward.options.*", "reward.batched")
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"function": "contains"}, 1.0),
        ({"function": "contains", "options": {"scale": 2.0}}, 2.0),
        ({"function": "told"}, 7.0),
        ({"function": "many", "batched": True}, 1.0),
    ],
)
def test_custom_function_is_called_with_the_recipe_settings(keys: dict[str, Any], expected: float) -> None:
    file = Path(__file__).parents[1] / "rewards" / "users_functions.py"
    assert score({"kind": "python", **keys, "function": f"{file}:{keys['function']}"}, "so 4 ok", "4") == expected


@holds("reward.digest")
def test_reward_function_with_another_digest_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(sample): return 1.0\n")
    reward = {"kind": "python", "function": f"{file}:score"}
    table = Recipe.model_validate(with_keys({"reward": {**reward, "digest": digest_of(reward["function"])}})).reward
    other = Recipe.model_validate(with_keys({"reward": {**reward, "digest": "0" * 64}})).reward
    assert isinstance(table, PythonScorer)
    assert isinstance(other, PythonScorer)
    table.require_there()
    with pytest.raises(RewardError, match="has changed"):
        other.require_there()
