"""Runs in a real Slurm, on fake components: they end as the undisturbed run for every disturbance of their jobs.

Verified: ledger and states to the byte, metrics of every stage, each once; no process of any attempt left. Not
verified here: the same for real engines (`test_slurm_engines.py`).
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from slurm.drill import TABLE, Drill, require_same, row_of
from slurm.lab import Lab, wait_for_text

STAGES = ("rollout", "reward", "values", "logprobs", "advantages", "critic_update", "actor_update", "eval")


@pytest.fixture(scope="session")
def whole(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Drill:
    """Return the undisturbed run, outside Slurm."""
    drill = Drill(lab, tmp_path_factory.mktemp("whole") / "drill")
    drill.train_locally()
    return drill


def require_complete(name: str, drill: Drill, whole: Drill, codes: Sequence[int]) -> None:
    """Require that the run ended complete, and its scripts with these codes."""
    assert drill.ended()["JobState"] == "COMPLETED", drill.log
    assert drill.codes() == list(codes), drill.log
    require_same(drill, whole)
    TABLE.append(row_of(name, drill, whole.paths))
    assert drill.lab.left() == []


def warn_in_the_middle_of(stages: Sequence[str], lab: Lab, folder: Path, whole: Drill) -> None:
    """Run jobs side by side, each of which gets the warning before its time limit in the middle of another stage."""
    drills = {stage: Drill(lab, folder / stage) for stage in stages}
    for stage, drill in drills.items():
        drill.pause(f"2-{stage}")
        drill.submit()
    for stage, drill in drills.items():
        drill.reached(f"2-{stage}")
        lab.run_program("scancel", "--batch", "--signal=USR1", drill.jobs[0])
        drill.let_go(f"2-{stage}")
    for drill in drills.values():
        drill.ended()  # all jobs, before anything checks that no process of the cluster is left
    for stage, drill in drills.items():
        require_complete(f"told in the middle of {stage}", drill, whole, [75, 0])


@pytest.mark.slow
@pytest.mark.one_each_time("Slurm jobs")
@pytest.mark.minutes(1)
def test_run_continues_after_a_time_limit_warning(lab: Lab, tmp_path: Path, whole: Drill) -> None:
    warn_in_the_middle_of(["actor_update"], lab, tmp_path, whole)


@pytest.mark.slow
@pytest.mark.minutes(2)
def test_run_continues_after_a_warning_in_any_stage(lab: Lab, tmp_path: Path, whole: Drill) -> None:
    warn_in_the_middle_of(STAGES, lab, tmp_path, whole)


@pytest.mark.slow
@pytest.mark.minutes(1)
def test_preempted_run_continues_after_the_preempting_job(lab: Lab, tmp_path: Path, whole: Drill) -> None:
    drills = {name: Drill(lab, tmp_path / name) for name in ("graced", "main")}
    for name, drill in drills.items():
        drill.pause("2-critic_update")
        drill.submit(f"slurm.partition={name}")
    for drill in drills.values():
        drill.reached("2-critic_update")
    urgent = lab.submit("sleep 1", tmp_path / "urgent.log", "-N2", "--exclusive", "--partition=urgent")
    for drill in drills.values():  # the scheduler decides within a second; the run would need less to finish
        wait_for_text(drill.paths.job_log(drill.jobs[0]), ": stopping")
        drill.let_go("2-critic_update")
    lab.wait_for(urgent, "COMPLETED", seconds=60)
    require_complete("pushed out, with 20 s of grace", drills["graced"], whole, [75, 0])
    require_complete("pushed out at once", drills["main"], whole, [75, 0])


@pytest.mark.slow
@pytest.mark.minutes(2)
def test_cancelled_run_continues_when_submitted_again(lab: Lab, tmp_path: Path, whole: Drill) -> None:
    cancelled, killed = Drill(lab, tmp_path / "cancelled"), Drill(lab, tmp_path / "killed")
    for drill in (cancelled, killed):
        drill.pause("2-values")
        drill.submit()
        drill.reached("2-values")
    lab.run_program("scancel", cancelled.jobs[0])
    cancelled.let_go("2-values")
    command = psutil.Process(killed.waited("2-values"))
    for process in (command.parent(), command):
        assert process is not None
        process.kill()
    assert cancelled.ended()["JobState"] == "CANCELLED"
    assert killed.ended()["ExitCode"] == "0:9"
    for drill in (cancelled, killed):
        drill.resume()
    require_complete("cancelled, resumed by hand", cancelled, whole, [75, 0])
    require_complete("killed with its script, resumed by hand", killed, whole, [0])


@pytest.mark.slow
@pytest.mark.minutes(3)
@pytest.mark.usefixtures("may_make_hosts")
def test_run_on_a_lost_node_continues_elsewhere_unharmed(whole: Drill) -> None:
    """Slurm loses two nodes, and gives their jobs to others, while both attempts there are alive. They continue
    during the new attempts, and then find themselves superseded."""
    with Lab(4, kind="namespaces", cpus=1) as hosts:
        ways = {"slurmd killed": (hosts.kill, hosts.start), "network of the node cut": (hosts.cut, hosts.restore)}
        drills = {name: Drill(hosts, hosts.shared / name.replace(" ", "-")) for name in ways}
        for drill in drills.values():
            drill.pause("2-values", "2-logprobs")
            drill.submit()
        lost = {name: drill.reached("2-values") for name, drill in drills.items()}
        for name, (lose, _) in ways.items():
            lose(lost[name])
        for drill in drills.values():
            drill.reached("2-logprobs")
            drill.let_go("2-values")
            wait_for_end(drill.waited("2-values"))
            drill.let_go("2-logprobs")
        for drill in drills.values():
            assert drill.ended()["NodeList"] not in lost.values(), drill.log
        for name, (_, give_back) in ways.items():
            give_back(lost[name])
        hosts.wait_idle(seconds=60)
        for name, drill in drills.items():
            require_complete(name, drill, whole, [8, 0])


def wait_for_end(pid: int) -> None:
    until = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the old attempt goes on"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.one_each_time("Slurm jobs")
@pytest.mark.minutes(1)
def test_controller_restart_does_not_affect_a_run(lab: Lab, tmp_path: Path, whole: Drill) -> None:
    drill = Drill(lab, tmp_path / "drill")
    drill.pause("2-values")
    drill.submit()
    drill.reached("2-values")
    lab.kill("slurmctld", signal.SIGTERM)
    lab.start("slurmctld")
    drill.let_go("2-values")
    require_complete("slurmctld restarted", drill, whole, [0])


@pytest.mark.slow
@pytest.mark.minutes(2)
def test_requeue_waits_for_an_unreachable_controller(lab: Lab, tmp_path: Path, whole: Drill) -> None:
    drill = Drill(lab, tmp_path / "drill")
    drill.pause("2-values")
    drill.submit()
    drill.reached("2-values")
    lab.kill("slurmctld", signal.SIGTERM)
    os.kill(psutil.Process(drill.waited("2-values")).ppid(), signal.SIGUSR1)
    drill.let_go("2-values")
    time.sleep(20)  # the job is requeued meanwhile, and finds no controller
    lab.start("slurmctld")
    require_complete("slurmctld away when the job goes back", drill, whole, [75, 0])


@pytest.mark.slow
@pytest.mark.minutes(2)
def test_repeated_warnings_during_startup_are_survived(lab: Lab, tmp_path: Path, whole: Drill) -> None:
    single, repeated = Drill(lab, tmp_path / "once"), Drill(lab, tmp_path / "always")
    for drill, starts in ((single, 1), (repeated, 3)):
        drill.pause(*(f"start-{restart}" for restart in range(starts)))
        drill.submit()
    for restart in range(3):
        for drill in (single, repeated) if restart == 0 else (repeated,):
            drill.reached(f"start-{restart}")
            lab.run_program("scancel", "--batch", "--signal=USR1", drill.jobs[0])
            drill.let_go(f"start-{restart}")
    require_complete("told in start-up", single, whole, [75, 0])
    # A preempted job is not at fault; a time limit that is too short is (tests/submission/test_job_start.py).
    require_complete("told in start-up three times", repeated, whole, [75, 75, 75, 0])


@pytest.mark.slow
@pytest.mark.minutes(5)
def test_run_longer_than_its_time_limit_continues_by_itself(lab: Lab, tmp_path: Path, whole: Drill) -> None:
    drill = Drill(lab, tmp_path / "drill", stage_s=6.0)
    drill.submit("slurm.time='2'", "slurm.warn_s=30")
    drill.ended(seconds=550)
    assert set(drill.codes()) == {75, 0}
    require_complete("time limit of two minutes", drill, whole, drill.codes())
