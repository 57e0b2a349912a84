"""Code: does the program in a response pass the tests of its row? It runs in a sandbox, never here."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ppoctl.batch.scores import Scorer, ScoreRequest
from ppoctl.errors import RewardError
from ppoctl.recipe_table import RESULTS, SPEED, AtLeastOne, Positive
from ppoctl.rewards.function import BatchFunction, NoScoreError, RewardValue, ScorerSpec
from ppoctl.rewards.programs import Test, program_of, tests_of
from ppoctl.rewards.sandbox import fusion
from ppoctl.rewards.sandbox.client import Sandbox, require
from ppoctl.rewards.sandbox.job import EXIT_SLACK_S, Limits, Ran, SandboxJob
from ppoctl.rewards.table import Candidates, ProcessScorer, RewardModels, no_models

Place = Literal["namespaces", "user", "fusion"]
FIGURES = ("passed", "programs", "late")
RunAll = Callable[[Sequence[Test], Sequence[SandboxJob]], Sequence[Ran]]
"""Function that runs a job for each test, in order; it may leave out the last ones once the score is known."""
_ASKED_AT_ONCE = 8
"""Tests of one response that an endpoint is asked together."""


class CodeScorer(ProcessScorer):
    """Score of the program in a response (its last block fenced as Python), by the tests that are its row's ground
    truth: `{"inputs": [...], "outputs": [...]}`, where `fn_name` names a function to call. No program, no score but
    0.

    Formula: score = tests passed / tests; where partial is false 1 if all pass, else 0
    Source: verl (`sandbox_fusion`, continuous)
    Default of: verl has the first 10 tests, 10 s and 1,024 MB each
    Figures: reward/passed_mean, reward/programs_mean, reward/late_mean
    """

    needs_truth: ClassVar[bool] = True

    kind: Annotated[Literal["code"], RESULTS]
    """Programs are run, and held to tests."""
    sandbox: Annotated[Place, RESULTS] = "namespaces"
    """Where programs run: in namespaces of Linux, as a user of their own behind Landlock (for root where namespaces
    are forbidden; no file can be written there), or at a Sandbox Fusion endpoint."""
    url: Annotated[str | None, SPEED] = None
    """Address of the endpoint, `http://HOST:PORT/run_code`."""
    language: Annotated[Literal["python", "cpp", "go", "java", "nodejs", "rust", "typescript", "bash"], RESULTS] = (
        "python"
    )
    """Language of the programs; all but Python need `fusion`."""
    partial: Annotated[bool, RESULTS] = True
    """Score the share of tests passed; false: all or nothing, and a program is given up with its first failure."""
    max_tests: Annotated[int, RESULTS, AtLeastOne] = 10
    """Most tests of a row that count: the first ones."""
    timeout_s: Annotated[float, RESULTS, Positive] = 10.0
    """Seconds for one test; then the program is killed, and the test is not passed."""
    memory_mib: Annotated[int, RESULTS, Field(ge=64)] = 1024
    """Address space of each process of a program."""
    processes: Annotated[int, RESULTS, AtLeastOne] = 4
    """Processes and threads that a program may have; not for `fusion`."""
    output_kib: Annotated[int, RESULTS, AtLeastOne] = 1024
    """Output at which a program is killed, and the test is not passed."""

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
        """Raise MissingAssetError where this machine gives programs no sandbox that holds. `key` is that of this
        table."""
        if self.sandbox != "fusion":
            require(self.sandbox, key=key)

    def open(self, models: RewardModels = no_models) -> Scorer:
        self.require_there()
        return super().open(models)

    def candidates(self, truth: str) -> Candidates | None:
        """A Python program that has looked up the outputs, and others that have not."""
        if self.language != "python":
            return None
        try:
            tests = tests_of(truth)[: self.max_tests]
        except ValueError as error:
            raise RewardError(str(error), hint="name the column of tests as `answer`") from error
        begins, ends, wrong = _looked_up(tests)
        fenced = "```python\n{}\n```".format
        return Candidates(fenced(f"{begins}\n{ends}"), fenced(f"{begins}\n{wrong}"), "", f"```python\n{begins}")


def opened(
    *, sandbox: Place, url: str | None, language: str, partial: bool, max_tests: int, limits: dict[str, Any]
) -> BatchFunction:
    """The scoring function, with a sandbox of its own, which ends with this process."""
    bounds = Limits(**limits)

    def scored(request: ScoreRequest) -> RewardValue | BaseException:
        try:
            return score(request, bounds, run_all, max_tests=max_tests, share=partial)
        except Exception as error:  # noqa: BLE001 - the sample's outcome, whatever it is
            return error

    if sandbox == "fusion":
        run_all = _at_endpoint(url or "", language)
    else:
        run_all = _one_by_one(Sandbox(sandbox), to_the_end=partial)
    return lambda requests: [scored(request) for request in requests]


def score(request: ScoreRequest, limits: Limits, run_all: RunAll, *, max_tests: int, share: bool) -> RewardValue:
    """The share of the first tests that the program of a response passes, or 1 where it passes all of them. Extras:
    `passed` (that share; of tests that were not run as of others), `programs` (1 where there is a program), `late`
    (share of tests that were stopped at their deadline).

    Raises ValueError on a truth without tests, and NoScoreError where programs cannot be run.
    """
    tests = tests_of(request.required_truth())[:max_tests]
    program = program_of(request.response)
    if program is None:
        return RewardValue(0.0, dict.fromkeys(FIGURES, 0.0))
    try:
        ran = run_all(tests, [test.job(program, limits) for test in tests])
    except fusion.UnreachableError as error:
        raise NoScoreError("unreachable", str(error)) from error
    passed = sum(map(_passes, tests, ran)) / len(tests)
    late = sum(each.outcome == "timeout" for each in ran) / len(tests)
    value = passed if share else float(passed == 1)
    return RewardValue(value, {"passed": passed, "programs": 1.0, "late": late})


def _passes(test: Test, ran: Ran) -> bool:
    return ran.outcome == "ok" and test.is_passed(ran.output)


def _one_by_one(sandbox: Sandbox, *, to_the_end: bool) -> RunAll:
    def run_all(tests: Sequence[Test], jobs: Sequence[SandboxJob]) -> list[Ran]:
        done: list[Ran] = []
        for test, job in zip(tests, jobs, strict=True):
            done.append(sandbox.run(job))
            if not to_the_end and not _passes(test, done[-1]):
                break
        return done

    return run_all


def _at_endpoint(url: str, language: str) -> RunAll:
    def run_all(_: Sequence[Test], jobs: Sequence[SandboxJob]) -> list[Ran]:
        with ThreadPoolExecutor(min(len(jobs), _ASKED_AT_ONCE)) as threads:
            return list(threads.map(partial(fusion.run, url, language), jobs))

    return run_all


def _looked_up(tests: Sequence[Test]) -> tuple[str, str, str]:
    """The beginning of a program that knows all outputs, its end, and an end that says something else."""
    name = tests[0].function
    if name is None:
        outputs = {test.given: test.expected for test in tests}
        begins = f"import sys\noutputs = {outputs!r}"
        return begins, "print(outputs[sys.stdin.read()])", "print('not', outputs[sys.stdin.read()])"
    results = json.dumps({json.dumps(test.given): test.expected for test in tests})
    begins = f"import json\nresults = json.loads({results!r})\ndef {name}(*given):"
    return (
        begins,
        "    return results[json.dumps(list(given))]",
        "    return ['not', results[json.dumps(list(given))]]",
    )
