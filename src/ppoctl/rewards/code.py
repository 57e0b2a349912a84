"""Code: does the program in a response pass the tests of its row? Programs run only in a sandbox."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ppoctl.core.batch.scores import Scorer, ScoreRequest
from ppoctl.core.errors import RewardError
from ppoctl.core.recipe_table import RESULTS, SPEED, AtLeastOne, Positive
from ppoctl.rewards.function import BatchFunction, NoScoreError, RewardValue, ScorerSpec
from ppoctl.rewards.programs import Test, program_of, tests_of
from ppoctl.rewards.sandbox.job import EXIT_SLACK_S, Limits, Ran, SandboxJob, UnreachableError
from ppoctl.rewards.sandbox.sandbox_client import Sandbox, require
from ppoctl.rewards.scorer_table import Candidates, ProcessScorer, RewardModels, no_models

if TYPE_CHECKING:
    from ppoctl.rewards.sandbox.fusion import FusionEndpoint

Place = Literal["namespaces", "user", "fusion"]
FIGURES = ("passed", "programs", "late")
RunAll = Callable[[Sequence[Test], Sequence[SandboxJob]], Sequence[Ran]]
"""Function that runs a job for each test, in order. It may skip the remaining jobs once the score is known."""
_ENDPOINT_THREADS = 8
"""Number of tests of one response that are sent to an endpoint in parallel."""


class CodeScorer(ProcessScorer):
    """Score of the program in a response: the last block of the response that is fenced as Python. The ground truth
    of the row holds the tests: `{"inputs": [...], "outputs": [...]}`, with `fn_name` if the tests call a function. A
    response without a program scores 0.

    Formula: score = tests passed / tests; if partial is false, 1 if all pass, else 0
    Source: verl (`sandbox_fusion`, continuous)
    Default of: verl has the first 10 tests, 10 s and 1,024 MB each
    Figures: reward/passed_mean, reward/programs_mean, reward/late_mean
    """

    needs_truth: ClassVar[bool] = True

    kind: Annotated[Literal["code"], RESULTS]
    """Run programs against tests."""
    sandbox: Annotated[Place, RESULTS] = "namespaces"
    """Sandbox of the programs. namespaces: Linux namespaces; user: a separate Linux user restricted by Landlock
    (requires root; for machines that forbid namespaces; programs cannot write files); fusion: a Sandbox Fusion
    endpoint."""
    url: Annotated[str | None, SPEED] = None
    """Address of the endpoint, `http://HOST:PORT/run_code`."""
    language: Annotated[Literal["python", "cpp", "go", "java", "nodejs", "rust", "typescript", "bash"], RESULTS] = (
        "python"
    )
    """Language of the programs. All languages except Python require the sandbox `fusion`."""
    partial: Annotated[bool, RESULTS] = True
    """Score the fraction of passed tests. False: the score is 1 or 0, and no test is run after the first failed
    test."""
    max_tests: Annotated[int, RESULTS, AtLeastOne] = 10
    """Maximum number of tests per row; only the first ones are used."""
    timeout_s: Annotated[float, RESULTS, Positive] = 10.0
    """Time limit of one test in seconds. At the limit the program is killed, and the test fails."""
    memory_mib: Annotated[int, RESULTS, Field(ge=64)] = 1024
    """Limit of the address space of each process of a program."""
    processes: Annotated[int, RESULTS, AtLeastOne] = 4
    """Maximum number of processes and threads of a program; not used by `fusion`."""
    output_kib: Annotated[int, RESULTS, AtLeastOne] = 1024
    """Limit of a program's output. At the limit the program is killed, and the test fails."""

    @property
    def deadline_s(self) -> float:
        return self.max_tests * (self.timeout_s + EXIT_SLACK_S)

    @property
    def scores_by(self) -> ScorerSpec:
        keys = ("sandbox", "url", "language", "partial", "max_tests")
        limits = ("timeout_s", "memory_mib", "processes", "output_kib")
        options: dict[str, Any] = {key: getattr(self, key) for key in keys}
        options["limits"] = {key: getattr(self, key) for key in limits}
        return ScorerSpec("ppoctl.rewards.code:opened", options, opens=True)

    def reports(self, figure: str) -> bool:
        return figure in FIGURES

    def require_there(self, key: str = "reward") -> None:
        """Raise MissingAssetError if this machine has no safe sandbox. `key` is the key of this table."""
        if self.sandbox != "fusion":
            require(self.sandbox, key=key)

    def open(self, models: RewardModels = no_models) -> Scorer:
        self.require_there()
        return super().open(models)

    def require_truth(self, truth: str) -> None:
        try:
            tests_of(truth)
        except ValueError as error:
            raise RewardError(str(error), hint="name the column of tests as `answer`") from error

    def candidates(self, truth: str) -> Candidates | None:
        """Return a Python program that contains the expected outputs, and programs that do not."""
        if self.language != "python":
            return None
        self.require_truth(truth)
        tests = tests_of(truth)[: self.max_tests]
        start, end, wrong_end = _lookup_program(tests)
        fenced = "```python\n{}\n```".format
        return Candidates(fenced(f"{start}\n{end}"), fenced(f"{start}\n{wrong_end}"), "", f"```python\n{start}")


def opened(
    *, sandbox: Place, url: str | None, language: str, partial: bool, max_tests: int, limits: dict[str, Any]
) -> BatchFunction:
    """Return the scoring function with its own sandbox, which ends with this process."""
    bounds = Limits(**limits)

    def scored(request: ScoreRequest) -> RewardValue | BaseException:
        try:
            return score(request, bounds, run_all, max_tests=max_tests, share=partial)
        except Exception as error:  # noqa: BLE001 - any error becomes the sample's outcome
            return error

    if sandbox == "fusion":
        from ppoctl.rewards.sandbox.fusion import FusionEndpoint

        run_all = _at_endpoint(FusionEndpoint(url or "", language, bounds))
    else:
        run_all = _one_by_one(Sandbox(sandbox), to_the_end=partial)
    return lambda requests: [scored(request) for request in requests]


def score(request: ScoreRequest, limits: Limits, run_all: RunAll, *, max_tests: int, share: bool) -> RewardValue:
    """Return the fraction of the first `max_tests` tests that the program of a response passes. Without `share`,
    return 1 if the program passes all of these tests, else 0. Extras: `passed` (fraction of passed tests; tests that
    were not run count as failed), `programs` (1 if the response has a program), `late` (fraction of tests stopped at
    their deadline).

    Raises ValueError if the ground truth has no tests, and NoScoreError if programs cannot be run.
    """
    tests = tests_of(request.required_truth())[:max_tests]
    program = program_of(request.response)
    if program is None:
        return RewardValue(0.0, dict.fromkeys(FIGURES, 0.0))
    try:
        ran = run_all(tests, [test.job(program, limits) for test in tests])
    except UnreachableError as error:
        raise NoScoreError("unreachable", str(error)) from error
    passed = sum(map(_passes, tests, ran)) / len(tests)
    late = sum(result.outcome == "timeout" for result in ran) / len(tests)
    value = passed if share else float(passed == 1)
    return RewardValue(value, {"passed": passed, "programs": 1.0, "late": late})


def _passes(test: Test, ran: Ran) -> bool:
    return ran.outcome == "ok" and test.is_passed(ran.output)


def _one_by_one(sandbox: Sandbox, *, to_the_end: bool) -> RunAll:
    def run_all(tests: Sequence[Test], jobs: Sequence[SandboxJob]) -> list[Ran]:
        results: list[Ran] = []
        for test, job in zip(tests, jobs, strict=True):
            results.append(sandbox.run(job))
            if not to_the_end and not _passes(test, results[-1]):
                break
        return results

    return run_all


def _at_endpoint(endpoint: "FusionEndpoint") -> RunAll:
    def run_all(_: Sequence[Test], jobs: Sequence[SandboxJob]) -> list[Ran]:
        with ThreadPoolExecutor(min(len(jobs), _ENDPOINT_THREADS)) as threads:
            return list(threads.map(endpoint.run, jobs))

    return run_all


def _lookup_program(tests: Sequence[Test]) -> tuple[str, str, str]:
    """Return three texts: the start of a program that contains all expected outputs, an end that returns the expected
    output, and an end that returns another output."""
    name = tests[0].function
    if name is None:
        outputs = {test.given: test.expected for test in tests}
        start = f"import sys\noutputs = {outputs!r}"
        return start, "print(outputs[sys.stdin.read()])", "print('not', outputs[sys.stdin.read()])"
    results = json.dumps({json.dumps(test.given): test.expected for test in tests})
    start = f"import json\nresults = json.loads({results!r})\ndef {name}(*given):"
    return (
        start,
        "    return results[json.dumps(list(given))]",
        "    return ['not', results[json.dumps(list(given))]]",
    )
