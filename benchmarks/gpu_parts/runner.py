"""Starts each part in a child process with a time limit; prints one line per part, and a table at the end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_verdicts import wrong

from gpu_parts.lines import VARIABLE, Job, write
from gpu_parts.table import TINY_S, Part

HERE = Path(__file__).resolve()
PATHS = [str(HERE.parents[1]), str(HERE.parents[2] / "src")]
"""Folders in which a child finds these modules and ppoctl."""
LEAST_S = 5.0
"""Least seconds that must be left to start a part."""
END_S = 10.0
"""Most seconds for a killed child to end: a process that waits for a driver may never end."""
MOST_SHOWN = 150
"""Characters of a reason on the screen; `lines.jsonl` has all of it."""

Child = Callable[[Job, float], str]
"""Function that runs a job in a process of its own, with a limit in seconds. It returns an empty text if the process
ended by itself, successfully or with an error that it reported; otherwise the reason."""


@dataclass(frozen=True)
class Options:
    """Options of the command."""

    out: Path
    tiny: bool = False
    part_limit_s: float | None = None
    """Time limit of every part; None: each has its own."""
    budget_s: float = float("inf")
    """Time of the complete command: parts that do not fit into the rest of it are skipped."""


@dataclass(frozen=True)
class Result:
    """Result of one part."""

    name: str
    verdict: str
    """One of `ok`, `not ok`, `skipped: REASON`."""
    seconds: float
    figures: str = ""
    wrong: tuple[str, ...] = ()

    def row(self) -> str:
        return f"{self.name:<10} {self.seconds:>6.1f} s  {self.verdict:<8}  {self.figures or '; '.join(self.wrong)}"


def run(parts: Sequence[Part], options: Options, child: Child | None = None) -> int:
    """Run these parts, one after the other; return 1 if anything is wrong with one of them. `child` replaces the
    start of a new interpreter for each part."""
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="gpu_first_models_") as models:
        for part in parts:
            left = options.budget_s - (time.monotonic() - began)
            needs = max(LEAST_S, min(part.expected_s, TINY_S) if options.tiny else part.expected_s)
            if left < needs:
                result = _skipped(part, f"takes about {needs:.0f} s, {max(0.0, left):.0f} s are left", options)
            else:
                limit = part.limit_s if options.part_limit_s is None else options.part_limit_s
                result = _run(part, options, models, child or _child, min(limit, left))
            results.append(result)
            print(_cut(result.row()), flush=True)
    _print_table(results, options.out)
    return 1 if any(result.wrong for result in results) else 0


def _skipped(part: Part, reason: str, options: Options) -> Result:
    write(options.out / "lines.jsonl", {"part": part.name, "verdict": "skipped", "skipped": reason})
    return Result(part.name, f"skipped: {reason}", 0.0)


def _run(part: Part, options: Options, models: str, child: Child, limit_s: float) -> Result:
    """Run one part in a child process, with a limit in seconds, and check its report."""
    out = str(options.out.resolve())
    job = Job(part.name, part.entry, options.tiny, out, models, time.time() + limit_s, part.needs_vllm, part.on_cpu)
    begins = job.file.stat().st_size if job.file.exists() else 0
    started = time.monotonic()
    end = child(job, limit_s)
    seconds = round(time.monotonic() - started, 1)
    lines = _lines(job.file, begins)
    _drop_empty(job.traceback, job.output)
    skipped = next((line["skipped"] for line in lines if "skipped" in line), None)
    if skipped is not None:
        found: list[str] = []
        verdict = f"skipped: {skipped}"
    else:
        on_gpu = any(line.get("device") == "cuda" for line in lines) and not options.tiny
        found = ([end] if end else []) + wrong(part.name, _measured(lines), on_gpu=on_gpu)
        verdict = "not ok" if found else "ok"
    write(job.file, {"part": part.name, "done_s": seconds, "verdict": verdict, "wrong": found})
    return Result(part.name, verdict, seconds, "" if found or skipped else _figures(part, lines), tuple(found))


def _child(job: Job, limit_s: float) -> str:
    """Run the child until it ends or its time is over. Return an empty text if it ended by itself, successfully or
    with an error that it reported; otherwise the reason."""
    paths = [*PATHS, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    settings = {VARIABLE: job.as_json(), "PYTHONPATH": os.pathsep.join(paths), "PYTHONFAULTHANDLER": "1"}
    with job.output.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "gpu_parts.child"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **settings},
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"it took longer than its limit of {limit_s:.0f} s, and was ended: {job.traceback.name}"
        finally:
            _end(child)
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}: {job.traceback.name}"
    return "" if code in (0, 1) else f"its process ended with code {code}: {job.output.name}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child with all processes of its group, and wait for their end: the next part needs their memory."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    until = time.monotonic() + END_S
    while _is_any_alive(child.pid) and time.monotonic() < until:
        time.sleep(0.05)
    child.poll()  # only now: a child that has ended is a zombie until it is waited for


def _is_any_alive(group: int) -> bool:
    """Return whether the group has a process other than a zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, its_group = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _drop_empty(*files: Path) -> None:
    for file in files:
        if file.exists() and file.stat().st_size == 0:
            file.unlink()


def _lines(file: Path, begins: int) -> list[dict[str, Any]]:
    """Return the lines of a file from this byte on. A killed child may have left half a line, which is completed."""
    if not file.exists():
        return []
    with file.open("r+b") as content:
        content.seek(begins)
        found = content.read()
        if found and not found.endswith(b"\n"):
            content.write(b"\n")
    lines = []
    for line in found.splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def _measured(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines about more than the device."""
    return [line for line in lines if line.keys() - {"part", "device"}]


def _figures(part: Part, lines: Sequence[dict[str, Any]]) -> str:
    """Return the metrics that the table of parts names, each from the last line that has it."""
    last = {key: line[key] for line in lines for key in part.figures if line.get(key) is not None}
    return ", ".join(f"{key} {last[key]}" for key in part.figures if key in last)


def _cut(text: str) -> str:
    """Return a text shortened to one line of the screen."""
    text = " ".join(text.splitlines())
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def _print_table(results: Sequence[Result], out: Path) -> None:
    print(f"\n{'part':<10} {'seconds':>8}  verdict")
    for result in results:
        print(f"{result.name:<10} {result.seconds:>8.1f}  {result.verdict}")
        for reason in result.wrong:
            print(f"{'':<20} {_cut(reason)}")
    print(f"all lines, output and tracebacks: {out}", flush=True)
