"""Submission: files that it leaves in the run directory, calls of Slurm, and refused submissions."""

import json
import shlex
from datetime import datetime
from pathlib import Path

import pytest

from conventions.test_lightweight_imports import HEAVY, front
from ppoctl.cli.app import run
from ppoctl.store.jobs import jobs
from ppoctl.store.recorded_run import RecordedRun
from ppoctl.store.run_paths import RunPaths
from submission.conftest import MODEL, Programs, write_short_quickstart

RECIPE = "quickstart.toml"
TESTED = '[ "$1" = --test-only ] && exec cat >"$0.got"'
REFUSES = '[ "$1" = --test-only ] && grep -q "%s" && { echo "allocation failure: %s" >&2; exit 1; }'
TAKES = f'{TESTED}; cat >"$0.got"; n=$(cat "$0.n" 2>/dev/null || echo 40); n=$((n + 1)); echo $n >"$0.n"; echo $n'


@pytest.fixture
def cluster(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """A cluster of 64 nodes that accepts everything, as job 41 and up."""
    nodes = "long*|up|infinite|10:00|1-infinite|64|idle|96|900000|gpu:8|ib"
    programs.make("sinfo", f"case $* in *--all*) echo '{nodes}';; *) echo long;; esac")
    programs.make("sacct", "exit 1")
    programs.make("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    programs.make("sbatch", TAKES)
    programs.make("scancel")
    write_short_quickstart(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return programs


def submit(*words: str) -> int:
    return run(["train", RECIPE, "--on", "slurm", *words])


def test_submitted_run_has_all_required_files(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--set", "steps=50") == 0
    paths = RunPaths(Path("runs/quickstart"))
    assert capsys.readouterr().out == (
        "submitted: job 41 (1 node)\n"
        "run:     runs/quickstart\n"
        "state:   ppoctl status runs/quickstart\n"
        "follow:  ppoctl logs runs/quickstart -f\n"
        "stop:    ppoctl stop runs/quickstart\n"
        "resume:  ppoctl resume runs/quickstart --on slurm\n"
    )
    assert RecordedRun(paths).recipes[1]["steps"] == 50
    assert set(RecordedRun(paths).facts["sources"]) == {
        "model",
        "model.companions",
        "data.train",
        "data.eval.heldout",
    }
    (job,) = jobs(paths)
    assert (job.id, job.command, job.after, job.restarts_max) == ("41", "train", None, 100)
    assert paths.attempts() == []
    assert not paths.saved_states()


def test_submitted_script_is_the_printed_script(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("--set", "slurm.time=2:00:00", "--set", "slurm.options.exclude=node7", "--runs", "odd 'run$'")
    assert run(["plan", RECIPE, "--sbatch", *sets]) == 0
    printed, note = capsys.readouterr()
    command = note.partition("creates the run and submits the script: ")[2].strip()
    assert shlex.split(command) == ["ppoctl", "train", str(RECIPE), *sets[:4], "--on", "slurm", *sets[4:]]
    assert submit(*sets) == 0
    assert run(["plan", RECIPE, "--sbatch", *sets]) == 0
    assert "note:" not in capsys.readouterr().err, "the run exists"
    assert (cluster.folder / "sbatch.got").read_text("utf-8") == printed
    assert RunPaths(Path("odd 'run$'/quickstart")).job_script("41").read_text("utf-8") == printed


def test_chained_jobs_each_depend_on_the_previous_job(cluster: Programs) -> None:
    assert submit("--chain", "3") == 0
    submitted = [line.removeprefix("sbatch --parsable").strip() for line in cluster.calls if "--parsable" in line]
    assert submitted == ["", "--dependency=afterany:41", "--dependency=afterany:42"]
    assert [(job.id, job.after) for job in jobs(RunPaths(Path("runs/quickstart")))] == [
        ("41", None),
        ("42", "41"),
        ("43", "42"),
    ]


def test_name_of_a_submitted_run_is_taken(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit() == 0
    for where in ("slurm", "here"):
        assert run(["train", RECIPE, "--on", where]) == 2
        stderr = capsys.readouterr().err
        assert "quickstart` exists: submitted as job 41" in stderr
        assert stderr.endswith("/quickstart --on slurm\n")


def test_train_refuses_rollouts_whose_job_is_pending(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rollout", RECIPE, "--on", "slurm"]) == 0
    cluster.make("squeue", 'echo "41|PENDING|Resources||0|0|N/A|N/A|"')
    assert run(["train", RECIPE]) == 8
    assert "has a job in Slurm: 41 is PENDING" in capsys.readouterr().err


def test_submission_imports_no_engine(cluster: Programs) -> None:
    words = ("train", RECIPE, "--on", "slurm")
    found = front(words)[words]
    assert found["code"] == 0
    assert isinstance(found["loaded"], list)
    assert not set(HEAVY) & set(found["loaded"])


def test_refused_submission_leaves_no_files(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.make("sbatch", f'{TESTED}; echo "sbatch: error: Invalid account" >&2; exit 1')
    assert submit() == 3
    assert "`sbatch` refused: Invalid account" in capsys.readouterr().err
    assert list(Path("runs").iterdir()) == []


def test_impossible_cluster_requests_are_refused(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--set", "slurm.partition=lang")
    cluster.make("sbatch", f"{REFUSES % ('lang', 'Invalid partition name specified')}; {TAKES}")
    runs = ([command, RECIPE, "--on", "slurm"] for command in ("train", "rollout"))
    evaluation = ["eval", RECIPE, "--ckpt", str(MODEL), "--on", "slurm"]
    for words in (*runs, evaluation):
        assert run([*words, *wrong]) == 2
        assert "partitions: `long`; nearest: `--set slurm.partition=long`" in capsys.readouterr().err
    assert not [line for line in cluster.calls if "--parsable" in line]
    assert not Path("runs").exists()


def test_force_skips_cluster_limit_checks(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--set", "slurm.memory=2T")
    cluster.make("sbatch", f"{REFUSES % ('mem=[23]T', 'Requested node configuration is not available')}; {TAKES}")
    assert submit(*wrong) == 2
    assert "the most is 900000M" in capsys.readouterr().err
    assert submit(*wrong, "--force") == 0
    assert run(["resume", "runs/quickstart", "--on", "slurm", "--set", "slurm.memory=3T"]) == 2
    assert run(["resume", "runs/quickstart", "--on", "slurm", "--set", "slurm.memory=3T", "--force"]) == 0
    assert "#SBATCH --mem=3T" in RunPaths(Path("runs/quickstart")).job_script("42").read_text("utf-8")


def test_broken_chain_is_cancelled(cluster: Programs) -> None:
    cluster.make("sbatch", f'[ "$2" = "--dependency=afterany:41" ] && {{ echo no >&2; exit 1; }}; {TAKES}')
    assert submit("--chain", "2") == 3
    assert cluster.calls[-1] == "scancel 41"
    assert list(Path("runs").iterdir()) == []


def test_submission_inside_a_job_is_refused(
    cluster: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    assert submit() == 2
    stderr = capsys.readouterr().err
    assert "`--on slurm` inside job 17" in stderr
    assert stderr.endswith("env -u SLURM_JOB_ID ppoctl ...\n")
    assert cluster.calls == []


def test_variable_missing_from_the_job_is_named(
    cluster: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOW", "http://u:p@host")
    assert submit("--set", "tracking.uri=$FLOW") == 2
    assert "a job does not receive `FLOW` from this shell" in capsys.readouterr().err
    assert submit("--set", "tracking.uri=$FLOW", "--set", 'slurm.pass_on=["FLOW"]') == 0
    assert "u:p@host" not in (cluster.folder / "sbatch.got").read_text("utf-8")


def test_test_only_shows_the_start_time_and_creates_nothing(
    cluster: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    noon = int(datetime(2026, 11, 23, 12, 30).timestamp())
    cluster.make("sbatch", f'cat >/dev/null; echo "sbatch: Job 5 to start at {noon} using 2 processors" >&2')
    assert submit("--test-only") == 0
    accepted = "Slurm would accept the job: Job 5 to start at 2026-11-23 12:30 using 2 processors\n"
    assert capsys.readouterr().out == accepted
    assert {line for line in cluster.calls if "sbatch" in line} == {"sbatch --test-only"}
    assert not Path("runs").exists()


def test_run_is_resubmitted_with_changed_keys(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["jobs"] == ["41"]
    forgotten = (cluster.folder / "squeue").read_text("utf-8")
    cluster.make("squeue", 'echo "41|PENDING|Resources||0|0|N/A|N/A|"')
    assert run(["resume", printed["run"], "--on", "slurm"]) == 8
    assert "has a job in Slurm: 41 is PENDING" in capsys.readouterr().err
    (cluster.folder / "squeue").write_text(forgotten, "utf-8")
    assert run(["resume", printed["run"], "--on", "slurm", "--set", "steps=70", "--set", "slurm.time=60"]) == 0
    script = RunPaths(Path(printed["run"])).job_script("42").read_text("utf-8")
    assert f"resume {printed['run']} --set steps=70 --set 'slurm.time=\"60\"' --on here" in script
    assert "#SBATCH --time=60" in script


def test_relative_paths_in_options_are_absolute_in_the_job(cluster: Programs, tmp_path: Path) -> None:
    assert submit() == 0
    sets = ("--set", "data.train.path=rows.jsonl")
    assert run(["resume", "runs/quickstart", "--on", "slurm", "--test-only", *sets]) == 0
    script = (cluster.folder / "sbatch.got").read_text("utf-8")
    assert f"'data.train.path=\"{tmp_path}/rows.jsonl\"'" in script


def test_resume_options_are_passed_to_the_job_or_done_locally(cluster: Programs) -> None:
    assert submit("--force") == 0
    paths = RunPaths(Path("runs/quickstart"))
    assert "quickstart --force --on here" in paths.job_script("41").read_text("utf-8")
    again = ["resume", "runs/quickstart", "--on", "slurm"]
    assert run([*again, "--rollout-only", "--force"]) == 0
    assert "--force --rollout-only --on here" in paths.job_script("42").read_text("utf-8")
    assert run([*again, "--save-only"]) == 0
    assert "quickstart --save-only --on here" in paths.job_script("43").read_text("utf-8")
    num_calls = len(cluster.calls)
    assert run([*again, "--plan"]) == 0
    assert run([*again, "--take-over"]) == 2
    assert run([*again, "--back-to", "4"]) != 0, "there is no such step to go back to"
    assert len([line for line in cluster.calls[num_calls:] if "--parsable" in line]) == 0


def test_possibly_queued_job_keeps_its_run(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.make(
        "sbatch", f'{TESTED}; echo "sbatch: error: Batch job submission failed: Socket timed out" >&2; exit 1'
    )
    assert submit() == 3
    stderr = capsys.readouterr().err
    assert "unknown whether Slurm accepted a job" in stderr
    assert "squeue --me --name=quickstart" in stderr
    assert submit() == 2, "its name is taken: the job may come"
    assert "--on slurm" in capsys.readouterr().err
    cluster.make("sbatch", TAKES)
    assert run(["resume", "runs/quickstart", "--on", "slurm"]) == 0


def test_sbatch_output_with_a_greeting_is_parsed(cluster: Programs) -> None:
    cluster.make("sbatch", f'{TESTED}; cat >/dev/null; echo "---- Welcome, 12 users ----"; echo "4711;north"')
    assert submit() == 0
    assert [job.id for job in jobs(RunPaths(Path("runs/quickstart")))] == ["4711"]


def test_shell_variables_do_not_override_the_script(cluster: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")  # set in a desktop's job
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    cluster.make("sbatch", f'env >"$0.env"; {TAKES}')
    assert submit() == 0
    found = (cluster.folder / "sbatch.env").read_text("utf-8")
    assert "SBATCH_" not in found
    assert "SLURM_MEM_PER_CPU" not in found
    assert "SLURM_CONF=/etc/slurm.conf" in found


def test_or_resume_submits_only_the_recorded_recipe(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit() == 0
    assert submit("--or-resume") == 0
    assert submit("--or-resume", "--set", "steps=70") == 2
    assert "--on slurm --set steps=70" in capsys.readouterr().err


def test_rollouts_and_evaluations_can_be_submitted(cluster: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rollout", RECIPE, "--on", "slurm"]) == 0
    paths = RunPaths(Path("runs/quickstart"))
    assert "--rollout-only --on here" in paths.job_script("41").read_text("utf-8")
    assert jobs(paths)[0].command == "rollout"
    capsys.readouterr()
    assert run(["eval", RECIPE, "--ckpt", str(MODEL), "--out", "samples.jsonl", "--on", "slurm"]) == 0
    here = Path.cwd()
    assert capsys.readouterr().out == (
        f"submitted: job 42 (1 node)\nfollow:  tail -F {here}/slurm-eval-42.log\nstop:    scancel 42\n"
    )
    script = (cluster.folder / "sbatch.got").read_text("utf-8")
    assert f"eval {here}/{RECIPE} --ckpt {MODEL} --out {here}/samples.jsonl --on here" in script
    assert "--no-requeue" in script
