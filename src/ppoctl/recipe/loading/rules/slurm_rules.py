"""Rules about `[slurm]`: each value of a batch script is one line, is set in one place, and contains no secret."""

import re
from collections.abc import Iterator

from ppoctl.core.errors import holds_secret, quoted
from ppoctl.core.finding import Finding, Level, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe.loading.explain import as_toml
from ppoctl.recipe.parallel import devices, nodes_of
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.slurm_table import Apptainer, Pyxis, SlurmTable, limit_s, memory_mib

_ENVIRONMENT = "`slurm.environment` or `slurm.pass_on`"
_ONE_TASK = "the script starts one task on each node"
_LOG = "Slurm writes the output of a job to `logs/slurm-ID.log` of the run"
_RUN = "the script runs in the run directory, which `--runs` and `name` set"
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
    "input": "no command reads standard input",
    "chdir": _RUN,
    **dict.fromkeys(("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-socket"), _ONE_TASK),
    "ntasks-per-gpu": _ONE_TASK,
    "array": "a run is one job",
    "wrap": "ppoctl generates the script from the recipe",
    "dependency": "`--chain` submits jobs that wait for one another",
    "clusters": "`status` and `stop` query the default cluster of the command line",
    **dict.fromkeys(("parsable", "quiet", "wait"), "the command parses the output of sbatch"),
    "test-only": "`ppoctl train RECIPE --on slurm --test-only`",
    **dict.fromkeys(("uid", "gid"), "a run belongs to the user who submits it"),
}
"""Option of sbatch that `slurm.options` must not set -> the key that sets it, or the reason."""

_OPTION = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)=[\"']?([^\s\"'$`;]+)", re.ASCII)
_SECRET_WORDS = {"TOKEN", "PASSWORD", "PASSWD", "SECRET", "KEY", "APIKEY", "CREDENTIAL", "CREDENTIALS"}
_PLACE_WORDS = {"PATH", "FILE", "DIR", "HOME"}
_SECRETS: KeyPath = ("slurm", "secrets")
_SECRET_HINT = "write it into a file that you own, `chmod 600 FILE`, and --set slurm.secrets=FILE"


def check_sbatch_options(recipe: Recipe) -> Iterator[Finding]:
    for name, value in recipe.slurm.options.items():
        key = ("slurm", "options", name)
        # Slurm accepts any unambiguous prefix of an option name.
        owned = name if name in OWNED else next((other for other in OWNED if other.startswith(name)), None)
        if not _OPTION.fullmatch(name):
            message = (
                f"`{name}` is not the long name of an option, such as `exclude`: lower-case letters, digits and `-`"
            )
            yield conflict(message, (key,), "man sbatch")
        elif owned is not None:
            hint = _moved(recipe, name, "", _instead(owned, value))
            yield conflict(f"`--{owned}` cannot be set here: {OWNED[owned]}", (key,), hint)
        elif name == "gres" and (gpus := re.findall(r"\bgpu\b[^,]*", value)):
            kept = ",".join(part for part in value.split(",") if part not in gpus)
            hint = _moved(recipe, name, kept, _instead("gpus-per-node", ",".join(gpus)))
            yield conflict(f"GPUs cannot be set here: {OWNED['gpus']}", (key,), hint)


def check_gpu_type(recipe: Recipe) -> Iterator[Finding]:
    table, key = recipe.slurm, ("slurm", "gpu_type")
    if table.gpu_type is None:
        return
    if not re.fullmatch(r"[\w.+-]+", table.gpu_type, re.ASCII):
        message = "not a GPU type: letters, digits and `_.+-`; the number of GPUs is `slurm.gpus_per_node`"
        yield conflict(message, (key,), "sinfo --format=%G")
    elif table.gpus_per_node is None:
        message = "a GPU type is set, but without `slurm.gpus_per_node` the job requests no GPUs"
        yield conflict(message, (key,), "--set slurm.gpus_per_node=8")


def check_booked_gpus_are_used(recipe: Recipe) -> Iterator[Finding]:
    """Check that a job books no more GPUs than the layout uses: `slurm.gpus_per_node` books GPUs, and only the
    layouts of the roles and the engines use them."""
    table, used = recipe.slurm, devices(recipe)
    if table.gpus_per_node is None or nodes_of(recipe) * table.gpus_per_node <= used:
        return
    nodes, booked = nodes_of(recipe), nodes_of(recipe) * table.gpus_per_node
    per_node = max(count for count in range(1, table.gpus_per_node + 1) if used % count == 0)
    fewer = f"--set slurm.gpus_per_node={per_node}"
    what = f"a job books {booked} GPUs ({nodes} node{'s' if nodes > 1 else ''} of {table.gpus_per_node})"
    yield conflict(
        f"{what}, but the layout uses {used}; `actor.parallel` and `generator.engines` set how many it uses, and "
        f"`plan --fit 80 --gpus {booked}` proposes values for all of them",
        (("slurm", "gpus_per_node"), ("slurm", "nodes")),
        fewer if table.nodes is None else f"{fewer} --set slurm.nodes={used // per_node}",
        level=Level.WARNING,
    )


def check_single_line(recipe: Recipe) -> Iterator[Finding]:
    """Check that values are one line: a second line would be a command of the batch script, or would end the options
    of sbatch."""
    table = recipe.slurm
    names = ("partition", "account", "qos", "memory", "time", "constraint")
    values: list[tuple[KeyPath, str | None]] = [(("slurm", name), getattr(table, name)) for name in names]
    values += [(("slurm", "options", name), value) for name, value in table.options.items()]
    for key, value in values:
        if value is not None and re.search(r"[\n\r\0]", value):
            yield conflict(
                f"`{dotted(key)}` becomes one line of the batch script, but the value is not one line", (key,)
            )


def check_no_nul_bytes(recipe: Recipe) -> Iterator[Finding]:
    """Check for NUL bytes: a shell drops them silently, and a program cannot receive them."""
    for key, value in _texts(recipe.slurm):
        if "\0" in value:
            yield conflict(
                f"`{dotted(key)}` contains a NUL byte, which cannot be passed to a shell or a program", (key,)
            )


def check_variable_names(recipe: Recipe) -> Iterator[Finding]:
    named = [(("slurm", "environment", name), name) for name in recipe.slurm.environment]
    for key, name in [*named, *((("slurm", "pass_on"), name) for name in recipe.slurm.pass_on)]:
        if not _VARIABLE.fullmatch(name):
            yield conflict(
                f"`{name}` is not a variable name: letters, digits and `_`, not beginning with a digit", (key,)
            )


def check_no_secret_in_job(recipe: Recipe) -> Iterator[Finding]:
    """Check for secrets: the script is stored in the run, and Slurm shows it and the variables to other users."""
    for name, value in recipe.slurm.environment.items():
        if value and _names_a_secret(name):
            message = f"variable `{name}` looks like a secret, but the script would show it"
            yield conflict(message, (("slurm", "environment", name),), _SECRET_HINT, kind="secret")
    for name in recipe.slurm.pass_on:
        if _names_a_secret(name):
            message = f"variable `{name}` looks like a secret, but Slurm would store it with the job"
            yield conflict(message, (("slurm", "pass_on"),), _SECRET_HINT, kind="secret")
    for line in recipe.slurm.setup:
        secret = next((name for name, _ in _ASSIGNED.findall(line) if _names_a_secret(name)), None)
        if secret is not None or holds_secret(line):
            source = f"`{secret}`" if secret else "a URI"
            message = f"a line of `slurm.setup` contains a secret ({source}), but the script would show it"
            yield conflict(message, (("slurm", "setup"),), _SECRET_HINT, kind="secret")


def check_time_limit(recipe: Recipe) -> Iterator[Finding]:
    if recipe.slurm.time is not None and _limit_s(recipe.slurm) is None:
        message = (
            "not a Slurm time limit; valid forms: `minutes`, `minutes:seconds`, `HH:MM:SS`, `days-HH` or "
            "`days-HH:MM:SS`"
        )
        yield conflict(message, (("slurm", "time"),), "--set slurm.time=04:00:00")


def check_warning_time(recipe: Recipe) -> Iterator[Finding]:
    table = recipe.slurm
    limit = None if table.time is None else _limit_s(table)
    if limit is not None and table.warn_s >= limit:
        longer = f"--set slurm.time={2 * table.warn_s // 60 + 1}"
        yield conflict(
            f"the warning, {table.warn_s} s before the end, would come before a job of {limit:g} s starts",
            (("slurm", "warn_s"), ("slurm", "time")),
            f"--set slurm.warn_s={int(limit) // 2}" if limit >= 60 else longer,
        )


def check_memory(recipe: Recipe) -> Iterator[Finding]:
    if recipe.slurm.memory is not None:
        try:
            memory_mib(recipe.slurm.memory)
        except ValueError:
            message = "not an amount of memory: a whole number and K, M, G or T; `0`: all memory of a node"
            yield conflict(message, (("slurm", "memory"),), "--set slurm.memory=200G")


def check_requeues(recipe: Recipe) -> Iterator[Finding]:
    table = recipe.slurm
    if not table.requeue and table.requeues not in (0, SlurmTable.model_fields["requeues"].default):
        yield conflict(
            f"requeuing is off, but `slurm.requeues` is {table.requeues}",
            (("slurm", "requeues"), ("slurm", "requeue")),
            "--set slurm.requeue=true",
        )


def check_mounts(recipe: Recipe) -> Iterator[Finding]:
    """Check container mounts: container runtimes read a comma as the end of a mount."""
    container = recipe.slurm.container
    for mount in container.mounts if isinstance(container, Pyxis | Apptainer) else ():
        sides = mount.split(":")
        if len(sides) not in (2, 3) or not all(side.startswith("/") for side in sides[:2]) or "," in mount:
            message = f"`{mount}` is not a mount: `/HOST/FOLDER:/FOLDER/INSIDE`, without a comma"
            yield conflict(message, (("slurm", "container", "mounts"),))


_SAME_VALUE = ("partition", "account", "qos", "nodes", "cpus-per-task", "mem", "time", "constraint")
"""Options of sbatch whose value has the same form as the value of the `[slurm]` key."""


def _moved(recipe: Recipe, name: str, kept: str, instead: str | None) -> str | None:
    """Return the settings that take an option out of `slurm.options`, except the part `kept`, and set `instead`."""
    rest = {option: kept if option == name else value for option, value in recipe.slurm.options.items()}
    text = as_toml({option: value for option, value in rest.items() if value or option != name})
    return None if instead is None else f"--set {quoted(f'slurm.options={text}')} {instead}"


def _instead(option: str, value: str) -> str | None:
    if option in ("requeue", "no-requeue"):
        return f"--set slurm.requeue={'true' if option == 'requeue' else 'false'}"
    if option == "gpus-per-node":
        match = re.fullmatch(
            r"(?:gpu\b:?)?(?:([^:,]*[^\d:,][^:,]*):?)?(\d*)", value
        )  # `gpu:TYPE:N`, in which each part is optional
        typed = f" --set slurm.gpu_type={quoted(match[1])}" if match and match[1] else ""
        return f"--set slurm.gpus_per_node={match[2] or 1}{typed}" if match else None
    return f"--set {OWNED[option].strip('`')}={quoted(value)}" if option in _SAME_VALUE else None


def _names_a_secret(name: str) -> bool:
    """Return whether the name of a variable suggests a secret.

    The name of a path variable (`..._FILE`) does not suggest a secret. Only complete words count, so
    `TOKENIZERS_PARALLELISM` does not suggest one.
    """
    words = name.upper().removeprefix("PG").split("_")  # for PGPASSWORD
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
