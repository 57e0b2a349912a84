"""Forty requeues of one run in a row, at random moments: `PYTHONPATH=src:tests python benchmarks/forty_requeues.py`.

A run on the tests' fake components is submitted to a Slurm that is started on this machine (Debian's packages, see
`tests/slurm`); everything else is real, from `ppoctl train --on slurm` to the end. After each start of its job, the
job is disturbed up to `--within` seconds later, or that long after the attempt has reached the run, so during
start-up as well as in any stage: it gets the warning before its time limit, is requeued by Slurm, preempted by a job
of higher priority, or its process is killed. Finally it is left alone; then ledger, states and the metrics of every
stage must equal those of the undisturbed run, to the bit. One integer seeds moments and kinds. Exit 1 if something
differs, if a process is left, or if the run ended before it was disturbed that often.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from slurm.drill import OVER, Drill, require_same, row_of
from slurm.lab import Lab

WAYS = ("told", "put back", "pushed out", "killed")
ON_THE_RUN = 0.75
"""Fraction of the disturbances whose delay counts from the moment that the attempt has reached the run."""
HEARS_S = 30.0
"""Seconds within which a command has ended after a signal."""
ENDED_FOR_GOOD = ("9:0", "0:10")
"""Exit codes of a job that a user must submit again, as this script does: three starts in a row made no progress; or
a signal came before the first line of its script."""


def strike(lab: Lab, drill: Drill, way: str) -> None:
    id = drill.jobs[-1]
    match way:
        case "told":
            lab.run_program("scancel", "--batch", "--signal=USR1", id)
        case "put back":
            lab.run_program("scontrol", "requeue", id)
        case "pushed out":
            lab.submit("true", drill.folder / "urgent.log", "-N2", "--exclusive", "--partition=urgent")
        case "killed":
            for process in lab.processes():
                with suppress(psutil.Error):
                    if str(drill.paths.root) in process.cmdline() and "python" in process.name():
                        process.kill()


def starts(lab: Lab, drill: Drill) -> int:
    """Return how often its jobs have been started."""
    return sum(int(lab.job(id)["Restarts"]) + 1 for id in drill.jobs)


def wait_for_start(lab: Lab, drill: Drill, seen: int) -> bool:
    """Wait for a new start; return False if the run has ended instead."""
    while True:
        job = lab.job(drill.jobs[-1])
        if job["JobState"] == "RUNNING" and starts(lab, drill) > seen:
            return True
        if job["JobState"] in OVER and job["ExitCode"] in ENDED_FOR_GOOD:
            drill.resume()
        elif job["JobState"] in OVER:
            return False
        time.sleep(0.05)


def wait_for_attempt(lab: Lab, drill: Drill, seen: int) -> None:
    """Wait until a new attempt works on the run, or the job has stopped running."""
    while _attempts(drill) == seen and lab.job(drill.jobs[-1])["JobState"] == "RUNNING":
        time.sleep(0.05)


def is_struck(lab: Lab, drill: Drill, seen: int) -> bool:
    """Disturb the job; return whether this start ends. A signal that comes before the script's first line is lost."""
    until = time.monotonic() + HEARS_S
    while starts(lab, drill) == seen and lab.job(drill.jobs[-1])["JobState"] == "RUNNING":
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _attempts(drill: Drill) -> int:
    return len(drill.attempts()) if drill.paths.journal.exists() else 0


def where(drill: Drill) -> str:
    """Return the position of the run, from its journal."""
    lines = drill.lines if drill.paths.journal.exists() else []
    stages = [line for line in lines if "stage" in line]
    begun = lines and lines[-1].get("event") != "attempt_ended"
    last = f"after {stages[-1]['stage']} of step {stages[-1]['step']}" if stages else "before the first stage"
    return last if begun else f"starting, {last}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requeues", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--within", type=float, default=3.0, metavar="SECONDS")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="requeues-") as name, Lab(2) as lab:
        whole = Drill(lab, Path(name) / "whole")
        untouched = ThreadPoolExecutor(1).submit(whole.train_locally, "--set", f"steps={args.steps}")
        drill = Drill(lab, Path(name) / "struck", stage_s=0.05)
        drill.submit(f"steps={args.steps}")
        ways: Counter[str] = Counter()
        begun = time.monotonic()
        seen = 0
        while ways.total() < args.requeues and wait_for_start(lab, drill, seen):
            seen = starts(lab, drill)
            after_s, way = rng.uniform(0, args.within), rng.choice(WAYS)
            attempts = _attempts(drill)
            if rng.random() < ON_THE_RUN:
                wait_for_attempt(lab, drill, attempts)
            time.sleep(after_s)
            position = where(drill)
            strike(lab, drill, way)
            while not is_struck(lab, drill, seen):
                print(f"     {way:<10} {after_s:4.1f} s later, {position}: not heard, and again", flush=True)
                strike(lab, drill, way)
            if lab.job(drill.jobs[-1])["JobState"] == "COMPLETED":  # before it received the signal
                break
            ways[way] += 1
            print(f"{ways.total():>3}  {way:<10} {after_s:4.1f} s later, {position}", flush=True)
        last = drill.ended(seconds=3600)
        took_s = time.monotonic() - begun
        print(f"last: {last['JobState']} {last['ExitCode']}, jobs {len(drill.jobs)}, starts {starts(lab, drill)}")
        if last["JobState"] != "COMPLETED":
            print(drill.log[-3000:])
            return 1
        untouched.result()
        require_same(drill, whole)
        row = row_of("", drill, whole.paths)
        left = lab.left()
        kinds = ", ".join(f"{count} {way}" for way, count in sorted(ways.items()))
        print(f"{ways.total()} requeues ({kinds}) of a run of {args.steps} steps in {took_s:.0f} s: bit-identical")
        print(
            f"{row.attempts} attempts got to the run; {len(row.replayed)} updates replayed; left: {left or 'nothing'}"
        )
        return 0 if ways.total() == args.requeues and not left else 1


if __name__ == "__main__":
    sys.exit(main())
