"""Response times of the lightweight commands: `python benchmarks/startup.py`.

Each command is started in a new process; the best of several runs counts, because other work on the machine can only
add time. Wall and CPU seconds are shown next to `python -c pass` on the same machine. Bytecode is first written to a
separate folder, as in an installed package: compiling 300 modules is not measured. Exit 1 if a limit is missed.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = str(ROOT / "recipes" / "quickstart.toml")
LIMIT_S = 0.5
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "ppoctl --help": ["-m", "ppoctl", "--help"],
    "ppoctl validate": ["-m", "ppoctl", "validate", RECIPE],
    "ppoctl plan": ["-m", "ppoctl", "plan", RECIPE],
}


def once(words: Sequence[str], env: dict[str, str]) -> tuple[float, float]:
    """Return wall and CPU seconds of one start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], env=env, check=True, capture_output=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description="How soon the light commands answer.")
    parser.add_argument("--repeat", type=int, default=10)
    repeat = parser.parse_args().repeat
    with tempfile.TemporaryDirectory() as cache:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        env |= {"PYTHONPATH": str(ROOT / "src"), "PYTHONPYCACHEPREFIX": cache}
        best: dict[str, tuple[float, float]] = {}
        for name, words in COMMANDS.items():
            once(words, env)
            runs = [once(words, env) for _ in range(repeat)]
            best[name] = min(wall for wall, _ in runs), min(cpu for _, cpu in runs)
    bare = best["python -c pass"]
    print(f"{'command':<16} {'wall s':>8} {'cpu s':>8} {'cpu ratio':>10}   best of {repeat}")
    for name, (wall, cpu) in best.items():
        print(f"{name:<16} {wall:>8.3f} {cpu:>8.3f} {cpu / bare[1]:>10.1f}")
    slow = [name for name, (wall, _) in best.items() if wall > LIMIT_S]
    print(f"limit {LIMIT_S} s wall: " + (f"missed by {', '.join(slow)}" if slow else "kept"))
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
