"""Rules on the `[slurm]` table: what goes into a batch script is one option a line, is set in one place, and holds no
secret."""

import re
from collections.abc import Iterator

from ppoctl.errors import holds_secret, quoted
from ppoctl.loading.problems import Conflict, rules_of
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.slurm import Apptainer, Pyxis, SlurmTable, limit_s, memory_mib

_ENVIRONMENT = "`slurm.environment` or `slurm.pass_on`"
_ONE_TASK = "the script starts one task on each node"
_LOG = "Slurm's own output of a job goes into the run, `logs/slurm-ID.log`"
_RUN = "the script works in the run directory, which `--runs` and `name` say"
OWNED = {
    "partition": "`slurm.partition`",
    "account": "`slurm.account`",
    "qos": "`slurm.qos`",
    "nodes": "`slurm.nodes`",
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"), "`slurm.gpus_per_node`"),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu", "mincpus"), "`slurm.cpus_per_node`"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), "`slurm.memory`"),
    "time": "`slurm.time`",
    "constraint": "`slurm.constraint`",
    "signal": "`slurm.warn_s`",
    **dict.fromkeys(("requeue", "no-requeue"), "`slurm.requeue`"),
    **dict.fromkeys(("container-image", "container-mounts"), "`[slurm.container]`"),
    **dict.fromkeys(("export", "export-file", "get-user-env"), _ENVIRONMENT),
    "job-name": "`name`",
    **dict.fromkeys(("output", "error", "open-mode"), _LOG),
    "input": "nothing reads it",
    "chdir": _RUN,
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket"), _ONE_TASK),
    "ntasks-per-gpu": _ONE_TASK,
    "array": "a run is one job",
    "wrap": "the script is made from the recipe",
    "dependency": "`--chain` submits jobs that wait for one another",
    "clusters": "`status` and `stop` ask the cluster that the command line speaks to",
    **dict.fromkeys(("parsable", "quiet", "wait"), "the command reads what sbatch answers"),
    "test-only": "`ppoctl train RECIPE --on slurm --test-only`",
    **dict.fromkeys(("uid", "gid"), "a run is its owner's"),
}
"""Options of sbatch that are set elsewhere or that the script owns, with where they are set, or why."""

_OPTION = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)=[\"']?([^\s\"'$`;]+)", re.ASCII)
_SECRET_WORDS = {"TOKEN", "PASSWORD", "PASSWD", "SECRET", "KEY", "APIKEY", "CREDENTIAL", "CREDENTIALS"}
_PLACE_WORDS = {"PATH", "FILE", "DIR", "HOME"}
_SECRETS: KeyPath = ("slurm", "secrets")
_SECRET_HINT = "write it into a file of your own, `chmod 600 FILE`, and --set slurm.secrets=FILE"


def check_sbatch_options(recipe: Recipe) -> Iterator[Conflict]:
    for name, value in recipe.slurm.options.items():
        key = ("slurm", "options", name)
        # Slurm takes an option by any beginning of its name that no other one has.
        owned = name if name in OWNED else next((other for other in OWNED if other.startswith(name)), None)
        if not _OPTION.fullmatch(name):
            says = f"`{name}` is no long name of an option, such as `exclude`: small letters, digits and `-`"
            yield Conflict(says, (key,), "man sbatch")
        elif owned is not None:
            yield Conflict(f"`--{owned}` is not set here: {OWNED[owned]}", (key,), _instead(owned, value))
        elif name == "gres" and (gpus := re.findall(r"\bgpu\b[^,]*", value)):
            yield Conflict(
                f"GPUs are not set here: {OWNED['gpus']}", (key,), _instead("gpus-per-node", ",".join(gpus))
            )


def check_gpu_type(recipe: Recipe) -> Iterator[Conflict]:
    table, key = recipe.slurm, ("slurm", "gpu_type")
    if table.gpu_type is None:
        return
    if not re.fullmatch(r"[\w.+-]+", table.gpu_type, re.ASCII):
        says = "no type of GPUs: letters, digits and `_.+-`; how many is `slurm.gpus_per_node`"
        yield Conflict(says, (key,), "sinfo --format=%G")
    elif table.gpus_per_node is None:
        says = "a type of GPUs, and a job without `slurm.gpus_per_node` asks for none"
        yield Conflict(says, (key,), "--set slurm.gpus_per_node=8")


def check_single_line(recipe: Recipe) -> Iterator[Conflict]:
    """A second line would be a command of the script, or end its options."""
    table = recipe.slurm
    names = ("partition", "account", "qos", "memory", "time", "constraint")
    values: list[tuple[KeyPath, str | None]] = [(("slurm", name), getattr(table, name)) for name in names]
    values += [(("slurm", "options", name), value) for name, value in table.options.items()]
    for key, value in values:
        if value is not None and re.search(r"[\n\r\0]", value):
            yield Conflict(f"`{dotted(key)}` is one line of the batch script, and this is not one line", (key,))


def check_no_nul_bytes(recipe: Recipe) -> Iterator[Conflict]:
    """A shell would drop it without a word, and a program would not get past it."""
    for key, value in _texts(recipe.slurm):
        if "\0" in value:
            yield Conflict(f"`{dotted(key)}` has a zero byte, which no shell and no program can be given", (key,))


def check_variable_names(recipe: Recipe) -> Iterator[Conflict]:
    named = [(("slurm", "environment", name), name) for name in recipe.slurm.environment]
    for key, name in [*named, *((("slurm", "pass_on"), name) for name in recipe.slurm.pass_on)]:
        if not _VARIABLE.fullmatch(name):
            yield Conflict(f"`{name}` is no name of a variable: letters, digits and `_`, no digit first", (key,))


def check_no_secret_in_job(recipe: Recipe) -> Iterator[Conflict]:
    """The script is kept in the run, and Slurm shows it and the job's variables to whoever may look."""
    for name, value in recipe.slurm.environment.items():
        if value and _names_a_secret(name):
            says = f"variable `{name}` looks like a secret, and the script would show it"
            yield Conflict(says, (("slurm", "environment", name),), _SECRET_HINT, hides_values=True)
    for name in recipe.slurm.pass_on:
        if _names_a_secret(name):
            says = f"variable `{name}` looks like a secret, and Slurm would keep it with the job"
            yield Conflict(says, (("slurm", "pass_on"),), _SECRET_HINT)
    for line in recipe.slurm.setup:
        found = next((name for name, _ in _ASSIGNED.findall(line) if _names_a_secret(name)), None)
        if found is not None or holds_secret(line):
            what = f"`{found}`" if found else "a URI"
            says = f"a line of `slurm.setup` holds a secret ({what}), and the script would show it"
            yield Conflict(says, (("slurm", "setup"),), _SECRET_HINT, hides_values=True)


def check_time_limit(recipe: Recipe) -> Iterator[Conflict]:
    if recipe.slurm.time is not None and _limit_s(recipe.slurm) is None:
        says = "no time limit of Slurm: `minutes`, `minutes:seconds`, `HH:MM:SS`, `days-HH` or `days-HH:MM:SS`"
        yield Conflict(says, (("slurm", "time"),), "--set slurm.time=04:00:00")


def check_warning_time(recipe: Recipe) -> Iterator[Conflict]:
    table = recipe.slurm
    limit = None if table.time is None else _limit_s(table)
    if limit is not None and table.warn_s >= limit:
        longer = f"--set slurm.time={2 * table.warn_s // 60 + 1}"
        yield Conflict(
            f"a job of {limit:g} s would be told {table.warn_s} s before its end, which is before it begins",
            (("slurm", "warn_s"), ("slurm", "time")),
            f"--set slurm.warn_s={int(limit) // 2}" if limit >= 60 else longer,
        )


def check_memory(recipe: Recipe) -> Iterator[Conflict]:
    if recipe.slurm.memory is not None:
        try:
            memory_mib(recipe.slurm.memory)
        except ValueError:
            says = "no amount of memory of Slurm: a whole number and K, M, G or T; `0`: all that a node has"
            yield Conflict(says, (("slurm", "memory"),), "--set slurm.memory=200G")


def check_requeues(recipe: Recipe) -> Iterator[Conflict]:
    table = recipe.slurm
    if not table.requeue and table.requeues not in (0, SlurmTable.model_fields["requeues"].default):
        yield Conflict(
            f"a job that may not go back into the queue would do so {table.requeues} times",
            (("slurm", "requeues"), ("slurm", "requeue")),
            "--set slurm.requeue=true",
        )


def check_mounts(recipe: Recipe) -> Iterator[Conflict]:
    """Programs of containers read a comma as the end of a mount."""
    container = recipe.slurm.container
    for mount in container.mounts if isinstance(container, Pyxis | Apptainer) else ():
        sides = mount.split(":")
        if len(sides) not in (2, 3) or not all(side.startswith("/") for side in sides[:2]) or "," in mount:
            says = f"`{mount}` is no mount: `/HOST/FOLDER:/FOLDER/INSIDE`, without a comma"
            yield Conflict(says, (("slurm", "container", "mounts"),))


SLURM_RULES = rules_of(globals())

_SAME_VALUE = ("partition", "account", "qos", "nodes", "cpus-per-task", "mem", "time", "constraint")
"""Options whose value is that of the key."""


def _instead(option: str, value: str) -> str | None:
    if option in ("requeue", "no-requeue"):
        return f"--set slurm.requeue={'true' if option == 'requeue' else 'false'}"
    if option == "gpus-per-node":
        words = re.fullmatch(
            r"(?:gpu\b:?)?(?:([^:,]*[^\d:,][^:,]*):?)?(\d*)", value
        )  # `gpu:TYPE:N`, each part or none
        typed = f" --set slurm.gpu_type={quoted(words[1])}" if words and words[1] else ""
        return f"--set slurm.gpus_per_node={words[2] or 1}{typed}" if words else None
    return f"--set {OWNED[option].strip('`')}={quoted(value)}" if option in _SAME_VALUE else None


def _names_a_secret(name: str) -> bool:
    """Whether a variable's name is that of a secret; a path is none, and no word within another is one
    (`TOKENIZERS_PARALLELISM`)."""
    words = name.upper().removeprefix("PG").split("_")  # PGPASSWORD
    return not _SECRET_WORDS.isdisjoint(words) and words[-1] not in _PLACE_WORDS


def _limit_s(table: SlurmTable) -> float | None:
    try:
        return None if table.time is None else limit_s(table.time)
    except ValueError:
        return None


def _texts(table: SlurmTable) -> Iterator[tuple[KeyPath, str]]:
    yield from ((("slurm", "environment", name), value) for name, value in table.environment.items())
    yield from ((("slurm", "setup"), line) for line in table.setup)
    yield from ((_SECRETS, text) for text in (table.secrets,) if text is not None)
    yield from ((("slurm", "command"), text) for text in (table.command,) if text is not None)
    if isinstance(table.container, Pyxis | Apptainer):
        yield ("slurm", "container", "image"), table.container.image
        yield from ((("slurm", "container", "mounts"), mount) for mount in table.container.mounts)
