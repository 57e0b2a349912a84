"""Runs one part in this process: `python -m gpu_parts.child`, with the job in the environment (`lines.Job`).

The traceback of an error is written to `traceback-PART.txt`. `faulthandler` also writes the stacks of all threads
there, shortly before the runner ends this process and on a signal such as SIGSEGV.
"""

import faulthandler
import importlib
import importlib.util
import sys
import traceback
from typing import TextIO

from gpu_parts.lines import JOB, Job, Skipped, notify

DUMP_BEFORE_S = 5.0
"""Seconds between the stack dump and the limit; a quarter of a short limit."""


def main() -> int:
    """Run the part of the job; return 0 if it ended or was skipped."""
    with JOB.traceback.open("w", encoding="utf-8") as dump:
        faulthandler.enable(file=dump)
        left = JOB.seconds_left()
        if left != float("inf"):
            faulthandler.dump_traceback_later(max(0.1, left - min(DUMP_BEFORE_S, left / 4)), file=dump)
        try:
            return _run(JOB, dump)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _run(job: Job, dump: TextIO) -> int:
    try:
        if reason := _skipped(job):
            raise Skipped(reason)
        module, _, name = job.entry.partition(":")
        getattr(importlib.import_module(module), name)()
    except Skipped as reason:
        notify(job.part, skipped=str(reason))
    except Exception as error:  # noqa: BLE001 - any error of a part is a line of it
        notify(job.part, error=f"{type(error).__name__}: {str(error)[:400]}")
        traceback.print_exc(file=dump)
        dump.flush()
        if type(error).__name__ == "OutOfMemoryError":
            _dump_memory(job)
        return 1
    return 0


def _skipped(job: Job) -> str:
    """Return why the part does not run on this machine; empty if it does."""
    if job.needs_vllm and importlib.util.find_spec("vllm") is None:
        return "no vllm"
    if job.on_cpu == "yes" or (job.on_cpu == "tiny" and job.tiny):
        return ""
    from gpu_parts.measure import CUDA

    return "" if CUDA else "no cuda"


def _dump_memory(job: Job) -> None:
    """Write a snapshot of the GPU's memory, with the code that allocated it, for pytorch.org/memory_viz."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    file = f"{job.out}/memory-{job.part}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(file)
    except Exception as error:  # noqa: BLE001 - the error of the part is what matters
        notify(job.part, snapshot=f"{type(error).__name__}: {error}")
    else:
        notify(job.part, snapshot=file)


if __name__ == "__main__":
    sys.exit(main())
