"""Forty requeues of one run in a row, at random moments: `PYTHONPATH=src:tests python benchmarks/forty_requeues.py`.

A run on the tests' fake engines is submitted to a Slurm that is started here (Debian's packages, see `tests/slurm`);
the rest is the product, from `ppoctl train --on slurm` to the end. Each time that its job has started it is struck up
to `--within` seconds later, or so long after it has got to the run, so in start-up as well as in any stage: told that
its time is nearly over, put back by Slurm, pushed out by a job of higher priority, or its process killed. At last it
is left alone; then ledger, states and the figures of every stage must be those of the run that nobody touched, to the
bit. One integer draws moments and ways. Exit 1 when something differs, when a process is left, or when the run ended
before it was struck that often.
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
"""Share of the strikes whose delay counts from the moment that the attempt has got to the run."""
HEARS_S = 30.0
"""A command that is told has ended by then."""
ENDED_FOR_GOOD = ("9:0", "0:10")
"""Exit codes of a job that a person has to submit again, and does: it started three times in a row for nothing; it
was told before the first line of its script."""


def strike(lab: Lab, drill: Drill, way: str) -> None:
    id = drill.jobs[-1]
    match way:
        case "told":
            lab.ask("scancel", "--batch", "--signal=USR1", id)
        case "put back":
            lab.ask("scontrol", "requeue", id)
        case "pushed out":
            lab.submit("true", drill.folder / "urgent.log", "-N2", "--exclusive", "--partition=urgent")
        case "killed":
            for process in lab.processes():
                with suppress(psutil.Error):
                    if str(drill.paths.root) in process.cmdline() and "python" in process.name():
                        process.kill()


def starts(lab: Lab, drill: Drill) -> int:
    """How often its jobs have been started."""
    return sum(int(lab.job(id)["Restarts"]) + 1 for id in drill.jobs)


def wait_for_start(lab: Lab, drill: Drill, seen: int) -> bool:
    """Wait for a start that was not seen; False where the run has ended instead."""
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
    """Wait until a new attempt works on the run, or the job does not run any more."""
    while _attempts(drill) == seen and lab.job(drill.jobs[-1])["JobState"] == "RUNNING":
        time.sleep(0.05)


def is_struck(lab: Lab, drill: Drill, seen: int) -> bool:
    """Whether this start of the job comes to its end. A signal that comes before the script's first line is lost."""
    until = time.monotonic() + HEARS_S
    while starts(lab, drill) == seen and lab.job(drill.jobs[-1])["JobState"] == "RUNNING":
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _attempts(drill: Drill) -> int:
    return len(drill.attempts()) if drill.paths.journal.exists() else 0


def where(drill: Drill) -> str:
    """What the run is at, as its journal tells."""
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
        untouched = ThreadPoolExecutor(1).submit(whole.play_here, "--set", f"steps={args.steps}")
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
            told = where(drill)
            strike(lab, drill, way)
            while not is_struck(lab, drill, seen):
                print(f"     {way:<10} {after_s:4.1f} s later, {told}: not heard, and again", flush=True)
                strike(lab, drill, way)
            if lab.job(drill.jobs[-1])["JobState"] == "COMPLETED":  # before it heard
                break
            ways[way] += 1
            print(f"{ways.total():>3}  {way:<10} {after_s:4.1f} s later, {told}", flush=True)
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
