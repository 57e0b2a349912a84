"""A step that runs again under the profiler, on fakes: what it repeats, and what it leaves behind."""

import gzip
import hashlib
import json
import shutil
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from fakes.components import commands_on_fakes, fake_components, fake_recipe
from fakes.job import StopError
from ppoctl.cli.app import run as command
from ppoctl.core.errors import PpoctlError, StorageError
from ppoctl.core.machine.torch_profile import KernelTime, ProcessProfile
from ppoctl.engines.weights.engine_calls import CompletedReply
from ppoctl.run import new_run, session
from ppoctl.run.profiled_step import profile_step, steps_to_profile
from ppoctl.run.shutdown.signals import SignalGate
from ppoctl.show.tracking.screen import PlainScreen
from ppoctl.store import manifest as manifests
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.resume_plan import plan_resume
from ppoctl.store.run_paths import RunPaths

DIGESTS = {"model": "a" * 64, "data": "b" * 64}


@dataclass
class FakeProcesses:
    """Processes of a role or an engine, which keep the identity of each stage that the copied run has at the end."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    identities: dict[str, str] = field(default_factory=dict)

    def begin(self, method: str, *arguments: Any) -> CompletedReply:
        self.calls.append((method, *arguments))
        if method == "begin_profile":
            return CompletedReply([None])
        folder, name = arguments
        copied = RunPaths(folder / "run")
        self.identities |= identities(copied)
        slowest = (KernelTime("mm", 4, 3.0), KernelTime("add", 2, 1.0))
        return CompletedReply([None, ProcessProfile(f"{name}-1", "cuda", 8.0, slowest, folder / "trace.json.gz")])


def identities(paths: RunPaths) -> dict[str, str]:
    """Return the identity of each committed stage."""
    folders = sorted(paths.steps.glob("*/*-*"))
    found = {paths.inside(folder): manifests.read(folder) for folder in folders}
    return {name: manifest.identity for name, manifest in found.items() if manifest is not None}


def digests(root: Path) -> dict[str, str]:
    """Return the digest of each file below a folder."""
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def trained(tmp_path: Path) -> RecordedRun:
    """Return a run of three steps with all records and all states."""
    checkpoint = {"every_steps": 1, "keep_last": 4, "keep_rollouts_every_steps": 1}
    recipe = fake_recipe(checkpoint=checkpoint, tracking={"kind": "mlflow"}, eval={"every_steps": 100})
    paths = RunPaths(tmp_path / "fake")
    new_run.create(paths, recipe, DIGESTS, command="train")
    quiet = recipe.model_copy(update={"tracking": fake_recipe().tracking})
    plan = plan_resume(RecordedRun(paths))
    session.attempt_run(session.OpenedRun(paths, {1: quiet}, fake_components(quiet), plan))
    return RecordedRun(paths)


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeProcesses]:
    """Let commands run on fakes, with these other processes."""
    processes = {"actor": FakeProcesses(), "generator-0": FakeProcesses()}
    commands_on_fakes(monkeypatch, processes)
    return processes


def profiled(run: RecordedRun, step: int, out: Path) -> list[ProcessProfile]:
    return profile_step(run, step, out, SignalGate("ppoctl"), PlainScreen(StringIO()))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_step_is_repeated_exactly_and_the_run_does_not_change(
    trained: RecordedRun, others: dict[str, FakeProcesses], tmp_path: Path, step: int
) -> None:
    before, out = digests(trained.paths.root), tmp_path / "out"
    driver, actor, engine = profiled(trained, step, out)
    assert digests(trained.paths.root) == before
    recorded = {
        name: identity
        for name, identity in identities(trained.paths).items()
        if name.startswith((f"steps/{step:06d}/", f"steps/{step - 1:06d}/")) and not name.endswith("eval")
    }
    repeated = {name: id for name, id in others["generator-0"].identities.items() if not name.endswith("eval")}
    assert repeated == recorded
    assert any(name.endswith("70-actor_update") for name in repeated)
    assert [path.name for path in out.iterdir()] == ["trace-driver.json.gz"]  # of fakes, the driver alone writes
    assert others["actor"].calls == [("begin_profile",), ("end_profile", out, "actor")]
    assert others["generator-0"].calls == [("end_profile", out, "generator-0")]
    assert (driver.process, actor.process, engine.process) == ("driver", "actor-1", "generator-0-1")


def test_trace_has_the_calls_of_the_table(
    trained: RecordedRun, others: dict[str, FakeProcesses], tmp_path: Path
) -> None:
    driver, *_ = profiled(trained, 2, tmp_path / "out")
    assert driver.device == "cpu"
    assert len(driver.slowest) == 10
    assert [kernel.ms for kernel in driver.slowest] == sorted((each.ms for each in driver.slowest), reverse=True)
    assert sum(kernel.ms for kernel in driver.slowest) < driver.ms
    events = json.loads(gzip.decompress(driver.trace.read_bytes()))["traceEvents"]
    for kernel in driver.slowest:  # the table counts an operation that calls one of its name once
        assert 0 < kernel.calls <= sum(event.get("name") == kernel.name for event in events), kernel.name
    assert any("backward" in event.get("name", "").lower() for event in events)  # the update is in it


def test_command_prints_a_table_of_each_process(
    trained: RecordedRun, others: dict[str, FakeProcesses], capsys: pytest.CaptureFixture[str]
) -> None:
    root = trained.paths.root
    words = ["profile", str(root), "--step", "2", "--quiet"]
    assert command(words) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    assert blocks[0].splitlines()[0].endswith("cpu")
    assert len(blocks[0].splitlines()) == 12
    trace = root / "profile/step-000002/trace.json.gz"
    assert blocks[1].splitlines() == [
        "calls  ms   share  actor-1, 8 ms on cuda",
        "4      3.0  37.5%  mm",
        "2      1.0  12.5%  add",
        f"trace: {trace}",
    ]
    assert command(words) == 2
    assert f"`{trace.parent}` exists" in capsys.readouterr().err
    assert command([*words, "--out", str(root.parent / "again"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["processes"][1]["slowest"] == [
        {"name": "mm", "calls": 4, "ms": 3.0},
        {"name": "add", "calls": 2, "ms": 1.0},
    ]


def test_step_without_saved_states_before_it_is_refused(
    trained: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for role in ("actor", "critic"):
        shutil.rmtree(trained.paths.state(role, 1))
    trained.refresh()
    assert steps_to_profile(trained) == [1, 3]
    for step, nearest in ((2, 1), (4, 3), (0, 1)):
        assert command(["profile", str(trained.paths.root), "--step", str(step), "--quiet"]) == 2
        err = capsys.readouterr().err
        assert f"step {step} of `{trained.paths.root}` cannot run again" in err
        assert f"hint: ppoctl profile {trained.paths.root} --step {nearest}" in err
        assert not trained.paths.profile(step).exists()


def test_failed_step_leaves_no_folder_and_no_hint_to_the_copy(
    trained: RecordedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Failing(FakeProcesses):
        error: BaseException = StopError()

        def begin(self, method: str, *arguments: Any) -> CompletedReply:
            raise self.error

    failing = Failing()
    commands_on_fakes(monkeypatch, {"actor": failing})
    out = tmp_path / "out"
    with pytest.raises(StopError):
        profiled(trained, 2, out)
    assert not out.exists()
    failing.error = PpoctlError("x", hint="ppoctl resume RUN")
    with pytest.raises(PpoctlError) as caught:
        profiled(trained, 2, out)
    assert caught.value.hint == f"ppoctl profile {trained.paths.root} --step 2"


def test_existing_folder_is_not_deleted(
    trained: RecordedRun, others: dict[str, FakeProcesses], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(StorageError, match="File exists"):
        profiled(trained, 2, tmp_path / "out")
    assert (tmp_path / "out" / "mine").exists()


def test_copy_does_not_send_to_mlflow(trained: RecordedRun, others: dict[str, FakeProcesses], tmp_path: Path) -> None:
    profiled(trained, 1, tmp_path / "out")
    assert not (tmp_path / "mlflow.db").exists()
    assert not (tmp_path / "out" / "mlflow.db").exists()
