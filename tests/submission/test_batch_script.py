"""The batch script, run by a real bash: its options for Slurm, forwarded signals, and requeueing."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ppoctl.start.slurm.job_start import is_resumable
from ppoctl.start.slurm.script import RESUMABLE_CODES, Work, batch_script
from submission.conftest import Programs, recipe_with

ODD = "a b'c\"d$e\\f\ng"
"""A name with everything that confuses shells."""


def script(folder: Path, *sets: str, words: tuple[str, ...] = ("resume",), is_run: bool = True) -> str:
    recipe = recipe_with(*sets)
    return batch_script(recipe, Work(words, folder, "logs/slurm-%j.log", is_run=is_run), ["work"])


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def started(text: str, folder: Path, **environ: str) -> "subprocess.Popen[str]":
    """Start the script in its folder, as Slurm does."""
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    there = {**os.environ, "SLURM_JOB_ID": "17", **environ}
    file = folder.parent / f"script-{len(list(folder.parent.iterdir()))}.sh"  # bash reads it while it runs
    file.write_text(text, "utf-8")
    return subprocess.Popen(["bash", str(file)], env=there, stdout=subprocess.PIPE, text=True, cwd=folder.parent)


def ready(folder: Path) -> "subprocess.Popen[str]":
    """Start the script, and wait until its command is ready."""
    job = started(script(folder), folder)
    assert job.stdout is not None
    assert job.stdout.readline() == "ready\n"
    return job


def in_queue(
    programs: Programs, folder: Path, *, restart: int = 0, now: str | None = None, reason: str = "None"
) -> None:
    """Set up a Slurm that reports why the job ends and which start is the newest, and a run that this start began."""
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    (folder / "jobs" / "17.started").write_text(f"{restart} 5 100 60\n")
    count = str(restart) if now is None else now
    programs.make("squeue", f'case "$*" in *Reason*) echo "{reason} " ;; *RestartCnt*) echo "{count} " ;; esac')
    programs.make("scontrol")


def requeued(programs: Programs) -> bool:
    return "scontrol requeue 17" in programs.calls


def test_script_options_follow_the_recipe(tmp_path: Path) -> None:
    sets = (
        'slurm.partition="long"',
        "slurm.account=alice",
        "slurm.qos=high",
        "slurm.gpus_per_node=8",
        "actor.parallel={data=12}",
        "slurm.cpus_per_node=96",
        "slurm.memory=900G",
        "slurm.time=1-02:00:00",
        "slurm.constraint=h100&ib",
        "slurm.warn_s=240",
        'slurm.options={exclude="node7", exclusive="", comment="say \\"hi\\" \\\\ to $all"}',
        'slurm.pass_on=["MLFLOW_URI"]',
    )
    assert options(script(tmp_path, *sets)) == [
        "--job-name=quickstart",
        "--partition=long",
        "--account=alice",
        "--qos=high",
        "--nodes=2",  # 12 devices, 8 per node
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--cpus-per-task=96",
        "--mem=900G",
        "--time=1-02:00:00",
        '--constraint="h100&ib"',
        "--signal=B:USR1@240",
        "--output=logs/slurm-%j.log",
        "--open-mode=append",
        "--export=HOME,PATH,HF_HOME,HF_HUB_CACHE,HF_HUB_OFFLINE,XDG_CACHE_HOME,MLFLOW_URI",
        "--requeue",
        "--exclude=node7",
        "--exclusive",
        '--comment="say \\"hi\\" \\\\ to $all"',
    ]


def test_typed_gpus_are_requested_by_type(tmp_path: Path) -> None:
    sets = ("slurm.gpus_per_node=4", "slurm.gpu_type=h100")
    assert "--gpus-per-node=h100:4" in options(script(tmp_path, *sets))


def test_job_that_is_not_a_run_is_never_requeued(tmp_path: Path) -> None:
    text = script(tmp_path, is_run=False)
    assert "--no-requeue" in options(text)
    assert "-lt 0 ]" in text
    assert "--no-requeue" in options(script(tmp_path, "slurm.requeue=false"))


def test_setup_environment_and_secrets_precede_the_command(tmp_path: Path, programs: Programs) -> None:
    secrets = tmp_path / "secret s"
    secrets.write_text("export TOKEN=of-mlflow\n")
    programs.make("work", 'echo "$COLOUR|$TOKEN|$LOADED|$PPOCTL_SITE|$SLURM_EXPORT_ENV|$1|$PWD"')
    text = script(
        tmp_path / "run",
        "slurm.environment={COLOUR=\"'r e$d'\"}",
        f'slurm.secrets="{secrets}"',
        'slurm.setup=["LOADED=$TOKEN-too", "export LOADED"]',
        words=(ODD,),
    )
    assert "of-mlflow" not in text
    (tmp_path / "run").mkdir()
    done = started(text, tmp_path / "run", PPOCTL_SITE="x", SLURM_EXPORT_ENV="HOME")
    assert done.communicate()[0] == f"'r e$d'|of-mlflow|of-mlflow-too|||{ODD}|{tmp_path}/run\n"
    assert done.returncode == 0


def test_failing_setup_line_ends_the_job(tmp_path: Path, programs: Programs) -> None:
    programs.make("work")
    done = started(script(tmp_path / "run", 'slurm.setup=["false"]'), tmp_path / "run")
    done.communicate()
    assert (done.returncode, programs.calls) == (1, [])


@pytest.mark.parametrize("name", [ODD, "run"])
def test_run_folder_may_have_any_name(tmp_path: Path, programs: Programs, name: str) -> None:
    programs.make("work", 'printf %s "$PWD"')
    done = started(script(tmp_path / name), tmp_path / name)
    assert done.communicate()[0] == str(tmp_path / name)
    assert (tmp_path / name / "jobs" / "17.ended").read_text().split()[:2] == ["0", "0"]


def test_job_without_its_run_folder_exits_at_once(tmp_path: Path, programs: Programs) -> None:
    programs.make("work")
    (tmp_path / "run").mkdir()
    done = started(script(tmp_path / "gone"), tmp_path / "run")
    done.communicate()
    assert (done.returncode, programs.calls) == (8, [])


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 75, 130, 134, 137, 139, 140])
def test_job_is_requeued_after_resumable_exit_codes(tmp_path: Path, programs: Programs, code: int) -> None:
    programs.make("work", f"exit {code}")
    in_queue(programs, tmp_path / "run", restart=4)
    done = started(script(tmp_path / "run"), tmp_path / "run", SLURM_RESTART_COUNT="4")
    done.communicate()
    assert done.returncode == code
    assert requeued(programs) == is_resumable(code)
    restart, ended, at, calls = (tmp_path / "run" / "jobs" / "17.ended").read_text().split()
    assert (restart, ended, calls) == ("4", str(code), "-")
    assert abs(int(at) - time.time()) < 60


def test_script_and_job_start_use_the_same_exit_codes() -> None:
    printed = subprocess.run(
        ["bash", "-c", f"for c in {{0..255}}; do case $c in {RESUMABLE_CODES}) echo $c ;; esac; done"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert list(map(int, printed.split())) == [code for code in range(256) if is_resumable(code)]


@pytest.mark.parametrize(("most", "restart", "is_requeued"), [(3, 2, True), (3, 3, False)])
def test_job_is_requeued_up_to_the_limit(
    tmp_path: Path, programs: Programs, most: int, restart: int, is_requeued: bool
) -> None:
    programs.make("work", "exit 75")
    in_queue(programs, tmp_path / "run", restart=restart)
    text = script(tmp_path / "run", f"slurm.requeues={most}")
    started(text, tmp_path / "run", SLURM_RESTART_COUNT=str(restart)).communicate()
    assert requeued(programs) == is_requeued


@pytest.mark.parametrize(("earlier", "is_requeued"), [(1, True), (2, False)])
def test_job_failing_before_its_run_begins_is_tried_three_times(
    tmp_path: Path, programs: Programs, earlier: int, is_requeued: bool
) -> None:
    programs.make("work")
    now = 8 + earlier
    in_queue(programs, tmp_path / "run", restart=now)
    (tmp_path / "run" / "jobs" / "17.started").write_text("6 4 70 60\n7 5 80 60\n")
    # Two starts failed before one began, one was preempted, and the others ended by themselves.
    ends = ["4 3 60 -", "5 3 65 -", "7 3 90 -", "8 75 95 TERM", *(f"{8 + n} 3 100 -" for n in range(earlier))]
    (tmp_path / "run" / "jobs" / "17.ended").write_text("".join(f"{line}\n" for line in ends))
    text = script(tmp_path / "run", 'slurm.setup=["exit 3"]')
    started(text, tmp_path / "run", SLURM_RESTART_COUNT=str(now)).communicate()
    assert requeued(programs) == is_requeued


def test_job_that_was_already_restarted_is_not_requeued(tmp_path: Path, programs: Programs) -> None:
    """The node's network was cut and Slurm gave the job other nodes: requeueing it now would end the running
    start."""
    programs.make("work", "exit 3")
    in_queue(programs, tmp_path / "run", restart=0, now="1")
    started(script(tmp_path / "run"), tmp_path / "run").communicate()
    assert not requeued(programs)


LISTENS = """
trap 'kill $!; echo told {name}; exit 75' {name}
echo ready
sleep 30 & wait $!
"""


@pytest.mark.parametrize(
    ("name", "reason", "is_requeued"), [("USR1", "None", True), ("TERM", "None", False), ("TERM", "TimeLimit", True)]
)
def test_signal_is_passed_to_the_command(
    tmp_path: Path, programs: Programs, name: str, reason: str, is_requeued: bool
) -> None:
    programs.make("work", LISTENS.format(name=name))
    in_queue(programs, tmp_path / "run", reason=reason)
    job = ready(tmp_path / "run")
    job.send_signal(getattr(signal, f"SIG{name}"))
    assert f"told {name}\n" in job.communicate(timeout=20)[0]
    assert job.returncode == 75
    assert requeued(programs) == is_requeued
    assert (tmp_path / "run" / "jobs" / "17.ended").read_text().split()[3] == name


def test_later_warning_during_shutdown_changes_nothing(tmp_path: Path, programs: Programs) -> None:
    told = "trap 'echo told' TERM; trap : USR1"
    programs.make("work", f"{told}; echo ready; for n in {{1..30}}; do sleep 0.05; done; exit 75")
    in_queue(programs, tmp_path / "run")
    job = ready(tmp_path / "run")
    assert job.stdout is not None
    job.send_signal(signal.SIGTERM)
    assert job.stdout.readline() == "told\n"  # two signals at once would arrive in any order
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=20)
    assert not requeued(programs)


def test_signal_during_script_startup_is_not_lost(tmp_path: Path, programs: Programs) -> None:
    programs.make("work", "trap 'exit 75' USR1; for n in {1..1200}; do sleep 0.05; done")
    in_queue(programs, tmp_path / "run")
    text = script(tmp_path / "run")
    last_trap = "trap 'forward TERM' TERM\n"
    jobs = []
    for moment in range(20):
        after = (
            f"kill -s USR1 $$\nsleep 0.0{moment}\n" if moment < 2 else f"(sleep 0.0{moment:02d}; kill -s USR1 $$) &\n"
        )
        jobs.append(started(text.replace(last_trap, last_trap + after), tmp_path / "run"))
        time.sleep(0.05)
    for job in jobs:
        job.communicate(timeout=50)
        assert job.returncode == 75


def test_script_waits_for_a_command_that_finishes_after_a_signal(tmp_path: Path, programs: Programs) -> None:
    """Bash leaves its `wait` at every signal; the command's own exit code counts."""
    trap = "trap 'n=$((n+1)); echo $n; [ $n -lt 2 ] || exit 0' USR1"
    programs.make("work", f"{trap}; echo ready; while :; do sleep 0.05; done")
    job = ready(tmp_path / "run")
    assert job.stdout is not None
    job.send_signal(signal.SIGUSR1)
    assert job.stdout.readline() == "1\n"
    time.sleep(0.3)  # a shell that ends on the first signal would be gone
    assert job.poll() is None
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=20)
    assert job.returncode == 0


def test_command_ended_by_an_unhandled_signal_is_requeued(tmp_path: Path, programs: Programs) -> None:
    programs.make("work", "echo ready; exec sleep 30")
    in_queue(programs, tmp_path / "run")
    job = ready(tmp_path / "run")
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=20)
    assert job.returncode == 75
    assert requeued(programs)


@pytest.mark.parametrize(
    ("container", "before"),
    [
        (
            '{kind="pyxis", image="reg#im age:1", mounts=["/a:/a", "/b:/c"]}',
            [
                *["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--cpus-per-task=64"],
                "--container-image=reg#im age:1",
                "--container-mounts=/tmp:/tmp,/a:/a,/b:/c",
            ],
        ),
        ('{kind="apptainer", image="/i.sif", mounts=["/a:/a"]}', ["apptainer", "exec", "--bind", "/a:/a", "/i.sif"]),
    ],
)
def test_container_wraps_the_command(tmp_path: Path, container: str, before: list[str]) -> None:
    text = script(tmp_path, f"slurm.container={container}", "slurm.command=/opt/bin/ppoctl", "slurm.cpus_per_node=64")
    command = [line for line in text.splitlines() if line.startswith("    exec ")][-1]
    assert shlex.split(command)[1:] == [*before, "/opt/bin/ppoctl", "resume"]
