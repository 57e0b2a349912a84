"""One attempt: the runs that it refuses to resume, and the ending that it records."""

import errno
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.components import EvenScorer, fake_components, fake_recipe
from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import InterruptedByUserError, NonFiniteError, PreemptedError, RecipeError, StorageError
from ppoctl.recipe.schema import Recipe
from ppoctl.run import new_run, run_commands, session
from ppoctl.run.changed_settings import change
from ppoctl.run.shutdown.signals import SignalGate
from ppoctl.run.shutdown.time_left import TimeLeft
from ppoctl.run.wire.sources import require_same_sources
from ppoctl.show.report.expectations import RunResult
from ppoctl.show.tracking.console import RunConsole
from ppoctl.show.tracking.screen import PlainScreen
from ppoctl.show.tracking.view import RunView
from ppoctl.store.jobs import JobRecord, record
from ppoctl.store.journal import read_lines
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths
from ppoctl.store.stop_request import request_stop
from ppoctl.store.time_use import attempt_times

QUICKSTART = Path(__file__).parents[2] / "recipes/quickstart/model"
DIGESTS = {"model": "a" * 64, "data": "b" * 64}


@pytest.fixture
def made(tmp_path: Path) -> RunPaths:
    """Return a run directory as `train` makes it."""
    paths = RunPaths(tmp_path / "fake")
    new_run.create(paths, fake_recipe(), DIGESTS, command="train")
    return paths


class BrokenScorer(EvenScorer):
    """Fails with the error that it was given."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.is_closed = False

    def submit(self, request: ScoreRequest) -> Future[Score]:
        raise self.error

    def close(self) -> None:
        self.is_closed = True


def ends(paths: RunPaths) -> list[tuple[str, int]]:
    lines = read_lines(paths.journal)
    return [(line["status"], line["exit_code"]) for line in lines if line.get("event") == "attempt_ended"]


def attempt(
    paths: RunPaths,
    scorer: EvenScorer | None = None,
    recipe: Recipe | None = None,
    gate: SignalGate | None = None,
) -> RunResult:
    chosen = recipe or fake_recipe()
    components = fake_components(chosen)
    components = replace(components, scorer=scorer or components.scorer)
    opened = session.OpenedRun(paths, {1: chosen}, components, plan=plan_resume(RecordedRun(paths)))
    return session.attempt_run(opened, gate=gate, screen=None if gate is None else PlainScreen(StringIO()))


def test_changed_sources_are_named(made: RunPaths) -> None:
    require_same_sources(RecordedRun(made), DIGESTS)
    for name in DIGESTS:
        with pytest.raises(StorageError, match=f"`{name}` is not what run"):
            require_same_sources(RecordedRun(made), {**DIGESTS, name: "c" * 64})


def test_model_path_of_a_run_cannot_change(made: RunPaths) -> None:
    assert change(RecordedRun(made), fake_recipe()) is None
    with pytest.raises(RecipeError, match=r"`model.path` is `\"other\"`, but the run was made from `\"bigram\"`"):
        change(RecordedRun(made), fake_recipe(model={"path": "other", "dtype": "float32"}))


def test_fixed_keys_are_refused_before_anything_is_opened(made: RunPaths) -> None:
    """The model of this run is not a folder: opening it would raise another error."""
    gate, screen = SignalGate("ppoctl resume"), PlainScreen(StringIO())
    sets = ["seed=7", "data.train.instruction='The bare number, please.'"]
    with pytest.raises(RecipeError, match="but the run was made from"):
        run_commands.resume(RecordedRun(made), plan_resume(RecordedRun(made)), sets, gate, only=None, screen=screen)
    assert made.attempts() == []


def test_complete_attempt_is_recorded_as_finished(made: RunPaths) -> None:
    half = made.stage(1, "rollout").with_name("10-rollout.attempt-0")
    half.mkdir(parents=True)
    ended = attempt(made)
    assert ends(made) == [("finished", 0)]
    assert ended.lines[0]["event"] == "attempt_started"
    assert not half.exists()


def test_attempt_records_its_slurm_job(made: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(made)
    job = {"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "node[1-2]", "PATH": "/nowhere"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    attempt(made)
    first, second = (line for line in read_lines(made.journal) if line.get("event") == "attempt_started")
    assert first["gpus"] == 0
    assert "job" not in first
    assert (second["job"], second["restart"], second["nodes"]) == ("17", 2, "node[1-2]")


def test_attempt_records_time_of_uncommitted_work(made: RunPaths) -> None:
    class Dawdles(BrokenScorer):
        def submit(self, request: ScoreRequest) -> Future[Score]:
            time.sleep(0.2)  # the work that is lost
            raise self.error

    with pytest.raises(NonFiniteError):
        attempt(made, Dawdles(NonFiniteError("x")))
    attempt(made)
    first, second = attempt_times(read_lines(made.journal))
    assert 0.2 <= first.lost_s < first.wall_s
    assert (second.lost_s, first.gpus) == (0.0, 0)
    assert 0 < second.kept_s < second.wall_s


def test_stop_request_reaches_the_running_attempt(made: RunPaths) -> None:
    class Asks(EvenScorer):
        def submit(self, request: ScoreRequest) -> Future[Score]:
            request_stop(made, "step")
            return super().submit(request)

    with pytest.raises(InterruptedByUserError, match="stopped by `ppoctl stop --after step` at `rollout` of step 1"):
        attempt(made, Asks())
    assert ends(made) == [("interrupted", 130)]
    assert attempt(made).lines[-1]["status"] == "finished"


def test_console_knows_which_steps_are_evaluated(made: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[bool]] = []

    class LookedAt(RunConsole):
        def __init__(self, view: RunView, *rest: Any, **more: Any) -> None:
            seen.append([view.evaluates(step) for step in range(4)])
            super().__init__(view, *rest, **more)

    monkeypatch.setattr(session, "RunConsole", LookedAt)
    attempt(made)
    evaluated = {line["step"] for line in read_lines(made.journal) if line.get("stage") == "eval"}
    assert seen == [[step in evaluated for step in range(4)]]
    assert evaluated


def test_full_disk_error_shows_free_and_required_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = fake_recipe(model={"path": str(QUICKSTART), "dtype": "float32"})
    paths = RunPaths(tmp_path / "fake")
    new_run.create(paths, recipe, DIGESTS, command="train")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**28))
    # The message of Megatron-Core's save, which names neither the free space nor the recipe.
    words = f"state cannot be written to `x`: [Errno 28] {os.strerror(errno.ENOSPC)}"
    with pytest.raises(StorageError) as caught:
        attempt(paths, BrokenScorer(StorageError(words)), recipe)
    first, second = caught.value.message.splitlines()
    assert first == words
    states = 2 * 3 * (QUICKSTART / "model.safetensors").stat().st_size / 2**20  # float32: weights, two moments
    found = re.fullmatch(
        r"  256 MiB are free on this disk; the run needs about .* KiB for the records of a step, "
        r"(.*) MiB for the next saved states",
        second,
    )
    assert found is not None, second
    assert float(found[1]) == pytest.approx(states, rel=0.1)
    assert caught.value.hint == f"nothing committed is lost; free disk space, then resume: df -h {paths.root}"


def test_read_only_disk_error_has_the_resume_command(made: RunPaths) -> None:
    with pytest.raises(StorageError) as caught:
        attempt(made, BrokenScorer(OSError(errno.EROFS, "Read-only file system", str(made.journal))))
    assert caught.value.message == f"cannot use `{made.journal}`: the file system is read-only"
    assert caught.value.hint == f"findmnt -T {made.root}  # mount it read-write, then: ppoctl resume {made.root}"


@pytest.mark.parametrize("is_broken", [False, True])
def test_ended_attempt_leaves_no_drafts(made: RunPaths, is_broken: bool) -> None:
    if is_broken:
        with pytest.raises(NonFiniteError):
            attempt(made, BrokenScorer(NonFiniteError("x")))
    else:
        attempt(made)
    assert list(made.drafts().iterdir()) == []


def test_other_storage_errors_do_not_mention_free_space(made: RunPaths) -> None:
    with pytest.raises(StorageError) as caught:
        attempt(made, BrokenScorer(StorageError("cannot write `x`: Permission denied")))
    assert caught.value.message == "cannot write `x`: Permission denied"


def test_hint_placeholder_is_replaced_by_the_run_path(made: RunPaths) -> None:
    with pytest.raises(NonFiniteError) as caught:
        attempt(made, BrokenScorer(NonFiniteError("x", hint="ppoctl resume RUN  # RUNS are many")))
    assert caught.value.hint == f"ppoctl resume {made.root}  # RUNS are many"


def test_hint_about_the_recipe_names_the_recipe_of_the_run(made: RunPaths) -> None:
    error = StorageError("x", hint="ppoctl validate RECIPE --reward")
    session.name_the_run(error, made)
    assert error.hint == f"ppoctl validate {made.recipe_toml} --reward"


def test_hint_of_a_submitted_run_resumes_on_slurm(made: RunPaths) -> None:
    record(made, JobRecord("12", 1.0, "train"))
    with pytest.raises(NonFiniteError) as caught:
        attempt(made, BrokenScorer(NonFiniteError("x", hint="see RUN, then `ppoctl resume RUN --set steps=2`")))
    assert caught.value.hint == f"see {made.root}, then `ppoctl resume {made.root} --on slurm --set steps=2`"


def test_met_expectations_use_results_of_this_attempt(made: RunPaths) -> None:
    (verdict,) = attempt(made, recipe=fake_recipe(expect={"reward/score_mean": {"min": 0.01}})).results
    assert (verdict.step, verdict.met) == (3, True)
    assert ends(made) == [("finished", 0)]


def test_unreachable_mlflow_costs_only_one_message(made: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    attempt(made, recipe=fake_recipe(tracking={"kind": "mlflow", "uri": "http://127.0.0.1:9"}))
    assert ends(made) == [("finished", 0)]
    assert "mlflow:" in capsys.readouterr().err


def test_unmet_expectations_end_the_attempt_as_unmet(made: RunPaths) -> None:
    ended = attempt(made, recipe=fake_recipe(expect={"reward/score_mean": {"min": 2.0}}))
    assert [verdict.met for verdict in ended.results] == [False]
    assert ends(made) == [("unmet", 5)]


class TwiceStopped(EvenScorer):
    """Receives two signals, and re-raises the error of the second under another name, as libraries do."""

    def submit(self, request: ScoreRequest) -> Future[Score]:
        try:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("nothing stopped it")
        except PreemptedError as error:
            raise RuntimeError(f"device gone: {error}") from error


def test_second_signal_is_recorded_even_if_a_library_raises_an_error(made: RunPaths) -> None:
    with pytest.raises(PreemptedError) as caught:
        attempt(made, TwiceStopped())
    assert caught.value.hint == f"ppoctl resume {made.root}"
    assert ends(made) == [("preempted", 75)]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (NonFiniteError("the reward of `a` is `nan`"), ("stopped", 5)),
        (ZeroDivisionError("our own bug"), ("failed", 1)),
        (MemoryError("cannot allocate"), ("failed", 7)),
    ],
    ids=["a named error", "our own bug", "no memory"],
)
def test_failed_attempt_is_recorded_and_closes_its_resources(
    made: RunPaths, error: BaseException, end: tuple[str, int]
) -> None:
    scorer = BrokenScorer(error)
    with pytest.raises(Exception, match=r"nan|bug|allocate"):
        attempt(made, scorer)
    assert ends(made) == [end]
    assert scorer.is_closed
    assert (made.attempt(1) / "traceback.txt").is_file() == isinstance(error, ZeroDivisionError)
    attempt(made)
    assert ends(made) == [end, ("finished", 0)]


def test_gate_knows_stage_times_of_the_current_attempt(made: RunPaths) -> None:
    known: list[TimeLeft] = []

    class Asked(SignalGate):
        def working(self, time_left: TimeLeft, asked: Callable[[], str | None]) -> AbstractContextManager[None]:
            known.append(time_left)
            return super().working(time_left, asked)

    attempt(made, gate=Asked("ppoctl resume"))
    assert known[0].stage_s("rollout") is not None
