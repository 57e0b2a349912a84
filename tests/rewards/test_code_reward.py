"""Code reward: a program is scored by the tests that it passes, even if it reads, prints or breaks other things."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from fakes.hostile import closed_port
from ppoctl.core.batch.scores import Score
from ppoctl.core.errors import MissingAssetError, RewardError
from ppoctl.core.http_client import Retries
from ppoctl.rewards import programs
from ppoctl.rewards.code import CodeScorer, opened
from ppoctl.rewards.function import BatchFunction, NoScoreError, RewardValue
from ppoctl.rewards.sandbox.fusion import FusionEndpoint
from ppoctl.rewards.sandbox.job import Limits, Ran, SandboxJob, UnreachableError
from rewards.asking import request, scores_of
from rewards.endpoint import ended, endpoint

DOUBLES = json.dumps({"inputs": ["1\n", "2\n", "3\n", "4\n"], "outputs": ["2\n", "4\n", "6\n", "8\n"]})
ADDS = json.dumps({"inputs": [[100, 200], [[1], [2]]], "outputs": [300, [[1, 2]]], "fn_name": "add"})
LIMITS = {"timeout_s": 60.0, "memory_mib": 256, "processes": 4, "output_kib": 64}


def scorer(**keys: Any) -> BatchFunction:
    defaults = {"sandbox": "namespaces", "url": None, "language": "python", "partial": True, "max_tests": 10}
    return opened(**{**defaults, "limits": LIMITS, **keys})


@pytest.fixture(scope="module")
def function() -> BatchFunction:
    return scorer()


def scored(function: BatchFunction, program: str, truth: str = DOUBLES) -> RewardValue:
    (value,) = function([request(f"So:\n```python\n{program}\n```", truth)])
    assert isinstance(value, RewardValue), value
    return value


@pytest.mark.parametrize(
    ("program", "value"),
    [
        ("print(2 * int(input()))", 1.0),
        ("print(2 * int(input()), end=' \\n\\n')", 1.0),
        ("n = int(input())\nprint(2 * n if n % 2 else n)", 0.5),
        ("print(2 * int(input())); 1 / 0", 0.0),
        ("print(2 * int(input())); import os; os._exit(0)", 0.0),
        ("print(", 0.0),
        ("", 0.0),
    ],
)
def test_program_score_is_fraction_of_passed_tests(program: str, value: float, function: BatchFunction) -> None:
    assert scored(function, program) == RewardValue(value, {"passed": value, "programs": 1.0, "late": 0.0})


@pytest.mark.parametrize(
    ("program", "value"),
    [
        ("def add(a, b):\n    print('aside')\n    return a + b", 1.0),
        ("class Solution:\n    def add(self, a: List[int], b):\n        return a + b", 1.0),
        ("def add(a, b): return a if isinstance(a, int) else a + b", 0.5),
        ("def add(a, b): return (*a, *b) if isinstance(a, list) else 300", 1.0),
        ("def sub(a, b): return a + b", 0.0),
        ("def add(a, b): return {a + b}", 0.0),
        ("if __name__ == '__main__': 1 / 0\ndef add(a, b): return a + b", 1.0),
    ],
)
def test_function_program_receives_test_arguments(program: str, value: float, function: BatchFunction) -> None:
    assert scored(function, program, ADDS).value == value


@pytest.mark.parametrize(
    "program",
    [
        "class Any:\n    def __eq__(self, _): return True\ndef add(a, b): return Any()",
        "class Any(int):\n    def __eq__(self, _): return True\ndef add(a, b): return Any(7)",
        "import json\njson.dumps = lambda _: 'true'\ndef add(a, b): return 1",
        "import os\nos.write(3, b'{\"outcome\": \"ok\"}')\nprint('passed')\ndef add(a, b): return 0",
        "import os\ndef add(a, b):\n    for number in range(64):\n"
        "        try: os.write(number, b'true')\n        except OSError: pass\n    os._exit(0)",
        "import sys\nsys.modules['builtins'].isinstance = lambda *_: True\nsys.exit(0)",
        "import sys\nframe = sys._getframe()\nwhile frame.f_back: frame = frame.f_back\n"
        "expected = [each for each in frame.f_globals.values() if each in (300, [[1, 2]])]\n"
        "def add(a, b): return expected[0]",
        "def add(a, b): return '300'",
        "def add(a, b):\n    print('300', flush=True)\n    return [300, 300]",
    ],
)
def test_tampered_equality_does_not_pass_tests(program: str, function: BatchFunction) -> None:
    assert scored(function, program, ADDS).value == 0


def test_partial_false_stops_at_first_failed_test() -> None:
    function = scorer(partial=False)
    assert scored(function, "print(2 * int(input()))").value == 1
    half = scored(function, "n = int(input())\nprint(2 * n if n < 3 else 0)")
    assert half == RewardValue(0.0, {"passed": 0.5, "programs": 1.0, "late": 0.0})


def test_hanging_program_is_late_and_keeps_passed_tests() -> None:
    function = scorer(limits={**LIMITS, "timeout_s": 0.2}, max_tests=2)
    # The first of two tests is passed if it starts within 0.2 s; the second never.
    value = scored(function, "n = int(input())\nwhile n > 1: pass\nprint(2 * n)", DOUBLES)
    assert value.extras["late"] >= 0.5
    assert value.value == 1 - value.extras["late"]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nold\n```\n```python\nnew\n```", "\nnew\n"),
        ("```\nbare\n```", "\nbare\n"),
        ("```py\nnamed\n```", "named\n"),
        ("```x = 1```", "x = 1"),
        ("```python\nnever closed", "\nnever closed"),
        ("print(1)", None),
    ],
)
def test_program_is_extracted_like_verl(response: str, program: str | None) -> None:
    assert programs.program_of(response) == program


def test_response_without_program_scores_0(function: BatchFunction) -> None:
    nothing = RewardValue(0.0, {"passed": 0.0, "programs": 0.0, "late": 0.0})
    assert function([request("print(2)", DOUBLES)]) == [nothing]


@pytest.mark.parametrize(
    ("truth", "why"),
    [
        ("42", "not an object with `inputs`"),
        ("{", "not JSON with tests"),
        ("[" * 100_000, "not JSON with tests"),
        ('{"inputs": [], "outputs": []}', "not arrays with tests"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs and 0 outputs"),
    ],
)
def test_truth_without_tests_raises(truth: str, why: str, function: BatchFunction) -> None:
    (result,) = function([request("```python\n1\n```", truth)])
    assert isinstance(result, ValueError)
    assert why in str(result)
    with pytest.raises(RewardError, match=why):
        CodeScorer(kind="code").candidates(truth)


def test_tests_are_parsed_from_published_formats() -> None:
    (lines,) = programs.tests_of(json.dumps({"inputs": [["1", "2"]], "outputs": [["3", "4"]]}))
    assert (lines.given, lines.expected) == ("1\n2", "3\n4")
    (call,) = programs.tests_of(json.dumps({"inputs": ['[1, 2]\n"a"'], "outputs": ["[3]"], "fn_name": "f"}))
    assert (call.given, call.expected) == ([[1, 2], "a"], [3])


@pytest.mark.parametrize("truth", [DOUBLES, ADDS])
def test_gold_program_scores_above_other_candidates(truth: str) -> None:
    table = CodeScorer(kind="code", max_tests=2)
    candidates = table.candidates(truth)
    assert candidates is not None
    responses = [candidates.gold, candidates.wrong, candidates.empty, candidates.truncated]
    results = scores_of(table, *(request(response, truth) for response in responses))
    assert [(score.value, score.outcome) for score in results] == [(1, "ok"), (0, "ok"), (0, "ok"), (0, "ok")]
    assert isinstance(results[0], Score)


def test_program_deadline_covers_all_its_tests() -> None:
    one_test, four_tests = (CodeScorer(kind="code", max_tests=count, timeout_s=3.0).deadline_s for count in (1, 4))
    assert four_tests == 4 * one_test > 12


def test_code_reward_requires_sandbox_before_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(MissingAssetError, match=r"\(`reward.parts.code.sandbox` is `namespaces`\)"):
        CodeScorer(kind="code").require_there("reward.parts.code")
    with pytest.raises(MissingAssetError):
        CodeScorer(kind="code").open()
    CodeScorer(kind="code", sandbox="fusion", url="http://nowhere/run_code").require_there()


# --- an endpoint --------------------------------------------------------------------------------------------------


@contextmanager
def fusion(url: str, retries: Retries = Retries(tries=3, backoff_s=0.01)) -> Iterator[Callable[[SandboxJob], Ran]]:
    """Yield a function that runs programs at this endpoint."""
    with closing(FusionEndpoint(url, "python", Limits(), retries=retries)) as opened_endpoint:
        yield opened_endpoint.run


@pytest.mark.parametrize(
    ("answer", "value", "late"),
    [
        (ended("2\n"), 1.0, 0.0),
        (ended("3\n"), 0.0, 0.0),
        (ended("2\n", code=1), 0.0, 0.0),
        (ended("2\n", "TimeLimitExceeded"), 0.0, 1.0),
        ({"status": "Failed", "compile_result": {"status": "Finished", "return_code": 1}}, 0.0, 0.0),
        ({"status": "Failed"}, 0.0, 0.0),
        (ended("2\n" + " " * (65 << 10)), 0.0, 0.0),
    ],
)
def test_fusion_endpoint_runs_program_and_output_is_compared_locally(answer: Any, value: float, late: float) -> None:
    with endpoint([(200, answer)]) as (url, received):
        function = scorer(sandbox="fusion", url=url, language="cpp", max_tests=1)
        (result,) = function([request("```\nint main() {}\n```", DOUBLES)])
    assert result == RewardValue(value, {"passed": value, "programs": 1.0, "late": late})
    assert received == [
        {
            "code": "\nint main() {}\n",
            "stdin": "1\n",
            "language": "cpp",
            "compile_timeout": 60.0,
            "run_timeout": 60.0,
            "memory_limit_MB": 256,
            "files": {},
            "fetch_files": [],
        }
    ]


@pytest.mark.parametrize(
    ("answers", "why", "tries"),
    [
        ([(504, {})], "answers 504", 3),
        ([(500, {})], "answers 500", 3),
        ([(404, {})], "answers 404", 1),
        ([(200, "no object")], "no answer", 1),
        ([(200, {"status": "SandboxError", "message": "no room"})], "failed: no room", 1),
    ],
)
def test_failing_fusion_endpoint_gives_no_score(answers: list[tuple[int, Any]], why: str, tries: int) -> None:
    with endpoint(answers) as (url, received), fusion(url) as run, pytest.raises(UnreachableError, match=why):
        run(SandboxJob("1"))
    assert len(received) == tries


def test_fusion_endpoint_that_is_down_loses_responses_until_it_answers() -> None:
    # The pause before the next try is longer than the breaker's, so only the limit of the downtime ends the tries.
    retries = Retries(tries=1, backoff_s=1.5, breaker_failures=2, breaker_pause_s=1.0, give_up_s=0.8)
    with endpoint([*[(500, {})] * 3, (200, ended("2\n"))]) as (url, received), fusion(url, retries) as run:
        for why in ("answers 500", "answers 500", r"has not answered for 0\.8 s; last error: it answered 500"):
            with pytest.raises(UnreachableError, match=why):
                run(SandboxJob("1"))
        assert len(received) == 3
        assert run(SandboxJob("1")).output == "2\n"


def test_unreachable_endpoint_is_outcome_of_code_reward() -> None:
    (result,) = scorer(sandbox="fusion", url=f"http://{closed_port()}", max_tests=1)(
        [request("```\n1\n```", DOUBLES)]
    )
    assert isinstance(result, NoScoreError)
    assert result.outcome == "unreachable"
    assert str(result).startswith("no answer from the Sandbox Fusion endpoint: ConnectError: ")
