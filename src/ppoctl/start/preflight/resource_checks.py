"""Whether this machine has what a recipe requires: GPUs, memory, disk and servers. A start raises the errors, and
`doctor` prints all findings. Only `joined_ray` and `mlflow` connect to a server, which only `doctor` calls."""

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from ppoctl.core.errors import PpoctlError, StorageError, quoted, without_secrets
from ppoctl.core.finding import Finding, from_error, ok, problem, warning, wrong
from ppoctl.core.machine import nvml
from ppoctl.core.machine.device import VISIBLE, visible
from ppoctl.core.machine.host_info import HostInfo
from ppoctl.core.units import size
from ppoctl.plan.disk_space import storage_of
from ppoctl.plan.memory.estimate import estimate_here, misfit
from ppoctl.recipe.parallel import devices, is_one_process
from ppoctl.recipe.paths import resolved_uri
from ppoctl.recipe.schema import Recipe
from ppoctl.recipe.tracking_table import MlflowTracking
from ppoctl.store.disk_errors import existing, size_of
from ppoctl.store.retention import LEAST_KEPT

ANSWER_S = 2.0
"""Timeout for the response of a server, in seconds."""
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


def gpu_gib_here() -> float | None:
    """Return the memory of the smallest GPU of this machine, in GiB; None if there is no GPU."""
    found = nvml.look()
    return smallest_gib(found.gpus) if isinstance(found, nvml.Driver) else None


def smallest_gib(gpus: Collection[nvml.Gpu]) -> float | None:
    """Return the memory of the smallest GPU, in GiB; None if there is no GPU, or no size is known."""
    return min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=0) / 2**30 or None


def memory(recipe: Recipe, gpu_gib: float | None, ray_bytes: int | None = None) -> Finding:
    """Check that each stage fits in the available memory. A model that is not on this machine is not checked.

    Available is the memory of a GPU of `gpu_gib` GiB. If `gpu_gib` is None, it is the memory of this machine, or of
    all nodes of the joined Ray cluster (`ray_bytes`).
    """
    estimated = estimate_here(recipe, gpu_gib, ray_bytes)
    if estimated is not None and (error := misfit(estimated)) is not None:
        return from_error(error, kind="memory")
    return ok("every stage fits, as estimated by `ppoctl plan --here`", "memory", kind="memory")


def disk(recipe: Recipe, folder: Path) -> Finding:
    """Check that the disk of a run's folder has the space that the run requires at one time.

    The run requires space for the kept checkpoints, one checkpoint that is being written, and the records of the
    steps since the last checkpoint. Space that the run already uses counts as free.
    """
    stored, above = storage_of(recipe), existing(folder)
    free, needed = shutil.disk_usage(above).free + size_of(folder), _needed_bytes(recipe)
    if stored.states_bytes is None or needed is None or needed <= free:
        return ok("the disk has space for the run", "space", kind="disk")
    smaller = _smaller(recipe, free)
    other = f"free space (df -h {quoted(above)}), or start anyway: --force"
    return problem(
        f"the disk of `{above}` has {size(free)} free, and the run needs {size(needed)} at one time "
        f"({size(stored.states_bytes)} of saved states, {size(stored.records_kept_bytes)} of records)",
        hint=other if smaller is None else f"--set {smaller}  # the run then fits; or {other}",
        kind="disk",
        error=StorageError,
    )


def _needed_bytes(recipe: Recipe) -> int | None:
    """Return the bytes that the run requires on disk at one time; None: its model is not known."""
    stored = storage_of(recipe)
    return None if stored.states_bytes is None else stored.states_bytes + stored.records_kept_bytes


def _smaller(recipe: Recipe, free: int) -> str | None:
    """Return a setting of `checkpoint` with which the run fits on the disk, but that changes no results; None: there
    is none."""
    table = recipe.checkpoint
    halves = (table.every_steps >> power for power in range(1, table.every_steps.bit_length()))
    for key, value in (("keep_last", LEAST_KEPT), *(("every_steps", half) for half in halves)):
        changed = recipe.model_copy(update={"checkpoint": table.model_copy(update={key: value})})
        if getattr(table, key) != value and (_needed_bytes(changed) or 0) <= free:
            return f"checkpoint.{key}={value}"
    return None


def compute_mode(gpus: Collection[nvml.Gpu]) -> Finding:
    """Check that several processes may use a GPU."""
    closed = [gpu for gpu in gpus if gpu.compute_mode != nvml.SHARED]
    if not closed:
        return ok(nvml.SHARED, "compute mode", kind="gpu")
    first, share = closed[0], f"({len(closed)} of {len(gpus)} GPUs)"
    message = f"GPU {first.index} is in compute mode `{first.compute_mode}` {share}: several processes of a run "
    return wrong(f"{message}share a GPU", "", f"sudo nvidia-smi -c {nvml.SHARED}", kind="gpu")


def shared_gpus(recipe: Recipe) -> Iterator[Finding]:
    """Check that the compute mode of the visible GPUs allows the processes of the recipe.

    Even if each role has a separate GPU, an engine that copies weights from a trainer's GPU is a second process on
    that GPU.
    """
    cluster = recipe.cluster
    if (cluster.placement == "colocated" or cluster.weights == "shared") and cluster.ray_address is None:
        yield compute_mode(visible(nvml.look(), os.environ))


def layout(recipe: Recipe, machine: HostInfo) -> Finding:
    """Check that there are enough GPUs for the layout."""
    needed, count = devices(recipe), len(machine.gpus)
    if (address := joined(recipe)) is not None:
        return ok(f"{needed} devices of the Ray at `{address}`", "layout", kind="gpu")
    if not machine.gpus:
        return ok(f"{needed} processes on CPUs" if needed > 1 else "one process on CPUs", "layout", kind="gpu")
    if needed <= count:
        return ok(f"{needed} of {count} GPUs", "layout", kind="gpu")
    shown = "" if count == machine.gpu_count else f" of {machine.gpu_count} (`{VISIBLE}`)"
    message = f"the recipe needs {needed} GPUs, but this machine offers {count}{shown}"
    return wrong(message, "", "ray start --head --port=6379  # on more nodes: docs/many-nodes.md", kind="gpu")


def joined(recipe: Recipe) -> str | None:
    """Return the address of the running Ray that the recipe joins. None: the run starts Ray, or requires no Ray."""
    return None if is_one_process(recipe) else recipe.cluster.ray_address


def joined_ray(recipe: Recipe) -> Finding:
    """Check that a process listens at `cluster.ray_address`. The check does not join Ray, because that takes long."""
    address = joined(recipe)
    if address is None:
        return ok("not used", "Ray's address", kind="ray")
    host, _, port = address.rpartition(":")
    from ppoctl.core.http_client import NoAnswerError, require_listener

    try:
        require_listener(host, int(port), ANSWER_S)
    except (NoAnswerError, ValueError) as error:
        message = f"no response at `cluster.ray_address` `{address}`: {error}"
        return wrong(message, "Ray's address", f"ray status --address {quoted(address)}", kind="ray")
    return ok(f"`{address}` responds", "Ray's address", kind="ray")


def mlflow(recipe: Recipe, answer_s: float = ANSWER_S) -> Finding:
    """Check that MLflow is reachable. If it is not, training continues and uploads the missing parts later."""
    tracking = recipe.tracking
    if not isinstance(tracking, MlflowTracking):
        return ok("not used", "MLflow", kind="mlflow")
    try:
        uri = resolved_uri(tracking.uri)
    except PpoctlError as error:
        return from_error(error, "MLflow", kind="mlflow")
    if uri is None:
        return ok("a sqlite file in the runs folder", "MLflow", kind="mlflow")
    shown = without_secrets(uri)
    if (why := _unreachable(uri, answer_s)) is not None:
        message = f"`tracking.uri` `{shown}` is not reachable: {why}; training continues without it"
        hint = f"curl -sS -o /dev/null {quoted(shown)}" if "http" in uri[:5] else None
        return warning(message, "MLflow", hint, kind="mlflow")
    return ok(f"`{shown}`", "MLflow", kind="mlflow")


def _unreachable(uri: str, answer_s: float) -> str | None:
    """Return why the server of a tracking URI is not reachable; None: it is. The text does not quote the URI, which
    may contain a password."""
    # Imported late, because httpcore costs a tenth of a second.
    from ppoctl.core.http_client import HttpClient, HttpLimits, NoAnswerError, require_listener

    try:
        parts = urlsplit(uri)
        scheme = parts.scheme.split("+")[0]
        if scheme in ("http", "https"):
            # Any response to the request for the health page is enough, even if the server requires another user. The
            # user, password and proxy are those that MLflow would use.
            url = parts._replace(path=f"{parts.path.rstrip('/')}/health").geturl()
            with closing(HttpClient(url, HttpLimits(answer_s, most_bytes=0), may_use_proxy=True)) as client:
                client.request("GET")
        elif scheme in _PORTS:
            require_listener(parts.hostname or "localhost", parts.port or _PORTS[scheme], answer_s)
        elif scheme in ("sqlite", "file", ""):
            folder = Path(parts.path.removeprefix("/") if scheme == "sqlite" else parts.path).parent
            return None if folder.is_dir() else f"no folder `{folder}`"
    except (NoAnswerError, OSError) as error:
        return str(error)
    except ValueError:
        return "it cannot be read as a URI"
    return None
