"""CPU seconds of a process and all its descendants, and the CPU model. Standard library only: TRL's side of
`vs_trl.py` imports it, too."""

import os
from pathlib import Path

PROC = Path("/proc")


def cpu_seconds_with_children() -> float:
    """Return user and system CPU seconds of this process and every process below it, including ended processes that
    their parent has waited for. An engine in a child process counts like a thread of this process."""
    ticks: dict[int, int] = {}
    below: dict[int, list[int]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            try:
                # The name of the program, in parentheses, may contain spaces.
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
    """Return this machine's CPU model, and how many of its cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {len(os.sched_getaffinity(0))} cores"
