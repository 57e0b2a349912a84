"""The job that a process runs in."""

import json
import sys
import time
from pathlib import Path

from ppoctl.start.slurm.allocation import allocation
from slurm.lab import Lab, wait_for_text

TELL = """
import json
from ppoctl.start.slurm.allocation import allocation
job = allocation()
print(json.dumps([job.id, job.restarts, job.nodes, job.node_count, job.node, job.hosts, job.ends_at]), flush=True)
"""


def test_process_outside_a_job_has_no_allocation() -> None:
    assert allocation({}) is None
    assert allocation({"SLURM_JOB_ID": "7"}) is None


def test_process_on_a_node_finds_its_job_and_each_time_limit(lab: Lab, log: Path) -> None:
    program = log.with_name("tell.py")
    program.write_text(TELL)
    again = "[ ${SLURM_RESTART_COUNT:-0} = 1 ] || scontrol requeue $SLURM_JOB_ID; sleep 100"
    begun = time.time()
    id = lab.submit(f"{sys.executable} {program}; {again}", log, "-N2", "--time=3", "--requeue")
    wait_for_text(log, f'["{id}", 1, ')
    lab.cancel_all()
    printed = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("[")]
    assert [found for *found, _ in printed] == [
        [id, restart, "node[1-2]", 2, "node1", ["node1", "node2"]] for restart in (0, 1)
    ]
    first, second = (ends_at for *_, ends_at in printed)
    assert begun + 175 < first < second - 4 < time.time() + 180


def test_unknown_time_limit_is_none(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho Socket timed out >&2\nexit 1\n")
    (tmp_path / "squeue").write_text("#!/bin/sh\necho Socket timed out >&2\nexit 1\n")
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    job = allocation({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "PATH": str(tmp_path)})
    assert job is not None
    assert job.ends_at is None
