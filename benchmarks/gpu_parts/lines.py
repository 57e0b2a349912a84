"""Reports of a part: lines of JSON in one file, which the runner reads."""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "GPU_FIRST_JOB"
"""Environment variable that has the job as JSON: processes that a part starts read it, too."""


class Skipped(Exception):  # noqa: N818 - it is not an error
    """A part cannot run on this machine; the message is the reason."""


@dataclass(frozen=True)
class Job:
    """One part as a child process runs it."""

    part: str = ""
    entry: str = ""
    """Function of the part, written as `module:function`."""
    tiny: bool = False
    """Whether models and tensors are tiny, so that a CPU can run the part."""
    out: str = "."
    """Folder of all files that the command writes."""
    models: str = "."
    """Folder of the models with random weights, which parts share."""
    ends: float = float("inf")
    """When the runner ends the child, in seconds since the epoch."""
    needs_vllm: bool = False
    on_cpu: str = "yes"
    """Whether the part runs without CUDA: yes, tiny (only then) or no."""

    @classmethod
    def of_this_process(cls) -> "Job":
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def file(self) -> Path:
        """File of the lines."""
        return Path(self.out) / "lines.jsonl"

    @property
    def traceback(self) -> Path:
        """File of an error's traceback, and of the stack dump before the limit."""
        return Path(self.out) / f"traceback-{self.part}.txt"

    @property
    def output(self) -> Path:
        """File of the output of the child and its processes."""
        return Path(self.out) / f"output-{self.part}.txt"

    def seconds_left(self) -> float:
        """Return the time until the runner ends the child."""
        return self.ends - time.time()


JOB = Job.of_this_process()


def notify(part: str, **what: Any) -> None:
    """Write one line, or print it without a job. The line survives if the process is killed afterwards."""
    if JOB.part:
        write(JOB.file, {"part": part} | what)
    else:
        print(json.dumps({"part": part} | what, default=str))


def write(file: Path, line: dict[str, Any]) -> None:
    """Append one line of JSON to a file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line, default=str) + "\n")
