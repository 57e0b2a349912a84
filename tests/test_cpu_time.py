"""CPU seconds in the comparison with TRL: CPU time of an engine in a separate process is included."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from vs_trl import CpuClock

BURN_S = 0.6
BURN = f"""
import time
while time.process_time() < {BURN_S}:
    pass
print("done", flush=True)
"""
COMMITTED = {"stage": "actor_update"}


def burnt(script: str, *, waits: bool) -> float:
    """Return the CPU seconds of a step in which a child process computes. `waits`: the child ends before the step
    does."""
    clock = CpuClock()
    clock.on_committed(COMMITTED)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        if waits:
            child.wait()
        clock.on_committed(COMMITTED)
        child.kill()
    return clock.ends[1] - clock.ends[0]


def test_running_child_process_counts_toward_cpu_time() -> None:
    assert burnt(f"{BURN}\ninput()", waits=False) >= BURN_S - 0.05


def test_ended_child_process_counts_toward_cpu_time() -> None:
    assert burnt(BURN, waits=True) >= BURN_S - 0.05


def test_grandchild_process_counts_toward_cpu_time() -> None:
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN + chr(10) + 'input()'!r}])"
    assert burnt(inner, waits=False) >= BURN_S - 0.05
