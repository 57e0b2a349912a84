"""The batch script of a recipe: `slurm/batch.sh` with the values of the recipe.

A pure function creates the script, so that `plan --sbatch` prints exactly the script that is submitted.
"""

import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ppoctl.core.errors import quoted
from ppoctl.recipe.parallel import nodes_of
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.slurm_table import Apptainer, BareNodes, Pyxis

PASSED_ON = ("HOME", "PATH", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "XDG_CACHE_HOME")
"""Variables of the submitting shell that every job gets if they are set: locations of programs and models."""

RESUMABLE_CODES = "75 | 3 | 6 | 13[4-9]"
"""Exit codes after which the job is requeued: preempted; a process or node lost; a hang; killed by a signal."""

_PLAIN = re.compile(r"[\w.,:%@/+=-]+")


@dataclass(frozen=True)
class Work:
    """The command that a job runs, and the folder in which it runs."""

    words: tuple[str, ...]
    """Arguments of `ppoctl`."""
    folder: Path
    """Working directory of the job. Paths of Slurm's output and of the job's record are relative to it."""
    log: str
    """Name of the file in `folder` for Slurm's output; Slurm replaces `%j` by the job's id."""
    is_run: bool
    """Whether the job works on a run directory, so that a requeued job can resume it."""


def batch_script(recipe: Recipe, work: Work, program: Sequence[str]) -> str:
    """Return the script that Slurm runs on the first node.

    `program` is the submitting shell's command for `ppoctl`.
    """
    table = recipe.slurm
    return _template().substitute(
        title=f"Run `{recipe.name}` of ppoctl: {described_nodes(recipe)}.",
        options="\n".join(f"#SBATCH {option}" for option in _options(recipe, work)),
        folder=quoted(work.folder),
        setup="\n".join(f"    {line}" for line in _setup(recipe)),
        command=" ".join(map(quoted, _words(recipe, work, program))),
        record='"jobs/$SLURM_JOB_ID.ended"' if work.is_run else "/dev/null",
        resumable=RESUMABLE_CODES,
        # srun ends its job step at once when it receives TERM, so the script sends USR1 to srun. Slurm itself sends
        # TERM to the processes of the job step.
        term="USR1" if isinstance(table.container, Pyxis) else "TERM",
        requeues=table.requeues if work.is_run and table.requeue else 0,
    )


def in_container(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return the options of `srun` for a job step in the recipe's container, and the words before its command."""
    match recipe.slurm.container:
        case Pyxis() as pyxis:
            # Job steps of a node share files in /tmp, but enroot gives each container a separate /tmp.
            is_shared = any(mount.split(":")[1:2] == ["/tmp"] for mount in pyxis.mounts)
            shared = pyxis.mounts if is_shared else ("/tmp:/tmp", *pyxis.mounts)
            return [f"--container-image={pyxis.image}", f"--container-mounts={','.join(shared)}"], []
        case Apptainer() as apptainer:
            gpus = ["--nv"] if recipe.slurm.gpus_per_node else []
            mounts = [word for mount in apptainer.mounts for word in ("--bind", mount)]
            return [], ["apptainer", "exec", *gpus, *mounts, apptainer.image]
        case BareNodes():
            return [], []


def _words(recipe: Recipe, work: Work, program: Sequence[str]) -> list[str]:
    """Return the command of the job. With container options, it is a job step: only `srun` has these options."""
    options, before = in_container(recipe)
    # Some versions of srun do not take this number from the job.
    cpus = [f"--cpus-per-task={recipe.slurm.cpus_per_node}"] if recipe.slurm.cpus_per_node else []
    step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", *cpus, *options] if options else []
    return [*step, *before, *([recipe.slurm.command] if recipe.slurm.command else program), *work.words]


def _options(recipe: Recipe, work: Work) -> Iterator[str]:
    table = recipe.slurm
    options = {
        "job-name": recipe.name,
        "partition": table.partition,
        "account": table.account,
        "qos": table.qos,
        "nodes": nodes_of(recipe),
        "ntasks-per-node": 1,
        "gpus-per-node": ":".join(str(part) for part in (table.gpu_type, table.gpus_per_node) if part) or None,
        "cpus-per-task": table.cpus_per_node,
        "mem": table.memory,
        "time": table.time,
        "constraint": table.constraint,
        # `B:` sends the signal to the script, which passes it on. Otherwise only job steps would get it.
        "signal": f"B:USR1@{table.warn_s}",
        "output": work.log,
        # A requeued job must not truncate its log.
        "open-mode": "append",
        "export": ",".join(dict.fromkeys((*PASSED_ON, *table.pass_on))),
    }
    yield from (f"--{name}={_option(str(value))}" for name, value in options.items() if value is not None)
    yield "--requeue" if work.is_run and table.requeue else "--no-requeue"
    yield from (f"--{name}={_option(value)}" if value else f"--{name}" for name, value in table.options.items())


def _option(value: str) -> str:
    """Return the value, quoted for sbatch, which does not follow the rules of a shell."""
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _setup(recipe: Recipe) -> Iterator[str]:
    yield "export PPOCTL_SITE=  # the recipe of the run contains the settings of the site file"
    yield from (f"export {name}={quoted(value)}" for name, value in recipe.slurm.environment.items())
    if recipe.slurm.secrets is not None:
        yield f". {quoted(Path(recipe.slurm.secrets).expanduser())}"
    yield from (line for text in recipe.slurm.setup for line in text.splitlines())


def described_nodes(recipe: Recipe) -> str:
    """Return the requested nodes in words, such as `2 nodes of 8 GPUs`."""
    count, gpus = nodes_of(recipe), recipe.slurm.gpus_per_node
    nodes = "1 node" if count == 1 else f"{count} nodes"
    return f"{nodes} of {gpus} GPUs" if gpus else nodes


class _Template(string.Template):
    delimiter = "@"


@cache
def _template() -> _Template:
    package = Path(__file__).parents[2]
    files = (package / "_slurm" / "batch.sh", package.parents[1] / "slurm" / "batch.sh")
    return _Template(next(file for file in files if file.is_file()).read_text("utf-8"))
