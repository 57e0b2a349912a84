"""CPU seconds of a process with all that it has started, and what the CPU is. Standard library only: TRL's side of
`vs_trl.py` imports it too."""

import os
from pathlib import Path

PROC = Path("/proc")


def cpu_seconds_with_children() -> float:
    """CPU seconds, user and system, of this process and of every process below it, also of those that have ended and
    that their parent has waited for. An engine in a process of its own counts as a thread of this one would."""
    ticks: dict[int, int] = {}
    below: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            try:
                # The name of the program, in brackets, may have blanks.
                fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:  # it has ended meanwhile
                continue
            pid = int(folder.name)
            below.setdefault(int(fields[1]), []).append(pid)
            ticks[pid] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    found, waiting = 0, [os.getpid()]
    while waiting:
        pid = waiting.pop()
        found += ticks.get(pid, 0)
        waiting += below.get(pid, [])
    return found / os.sysconf("SC_CLK_TCK")


def cpu_model() -> str:
    """Model of this machine's CPU, and how many of its cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {len(os.sched_getaffinity(0))} cores"
