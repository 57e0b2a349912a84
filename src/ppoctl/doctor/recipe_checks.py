"""Checks of whether this machine has what a recipe requires. They show the errors that a start would raise."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ppoctl.errors import PpoctlError, quoted, without_secrets
from ppoctl.finding import Finding, from_error, ok, warning, wrong
from ppoctl.loading.load import Loaded
from ppoctl.machine.device import VISIBLE
from ppoctl.machine.host_info import HostInfo
from ppoctl.preflight.check import check
from ppoctl.preflight.fit import require_fit
from ppoctl.preflight.space import require_space
from ppoctl.recipe.parallel import devices, is_one_process
from ppoctl.recipe.paths import resolved_uri
from ppoctl.recipe.schema import MlflowTracking, Recipe

ANSWER_S = 2.0
"""Timeout for the response of a server, in seconds."""
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


@dataclass(frozen=True)
class IntendedRun:
    """A recipe that is to run on this machine."""

    loaded: Loaded
    found: tuple[Finding, ...] = ()
    """Findings of loading, such as data that the recipe names and that are missing on this machine."""

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def joins(self) -> str | None:
        """Address of the running Ray that the recipe joins. None: the run starts Ray, or requires no Ray."""
        return None if is_one_process(self.recipe) else self.recipe.cluster.ray_address


def model(run: IntendedRun, machine: HostInfo) -> Iterator[Finding]:
    """Check that model and tokenizer are on this machine and can be trained.

    Rows are not checked, because that takes long; `validate` reads all rows.
    """
    found = [*run.found, *check(run.recipe, run.loaded.place, rows=False, device="gpu" if machine.gpus else "cpu")]
    yield from found
    if not any(finding.is_error for finding in found):
        yield ok(f"`{run.recipe.model.path}`, with its tokenizer", "model", kind="model")


def layout(run: IntendedRun, machine: HostInfo) -> Finding:
    """Check that there are enough GPUs for the layout."""
    needed, count = devices(run.recipe), len(machine.gpus)
    if run.joins is not None:
        return ok(f"{needed} devices of the Ray at `{run.joins}`", "layout", kind="gpu")
    if not machine.gpus:
        return ok(f"{needed} processes on CPUs" if needed > 1 else "one process on CPUs", "layout", kind="gpu")
    if needed > count:
        shown = "" if count == machine.gpu_count else f" of {machine.gpu_count} (`{VISIBLE}`)"
        message = f"the recipe needs {needed} GPUs, but this machine offers {count}{shown}"
        return wrong(
            message, "layout", "ray start --head --port=6379  # on more nodes: docs/many-nodes.md", kind="gpu"
        )
    return ok(f"{needed} of {count} GPUs", "layout", kind="gpu")


def memory(run: IntendedRun, machine: HostInfo) -> Finding:
    """Check that the run fits in memory, as `plan --here` estimates. The nodes of a running Ray are not checked."""
    if run.joins is not None:
        return ok(f"not checked: ppoctl train queries the Ray at `{run.joins}`", "memory", kind="memory")
    sizes = [gpu.memory_bytes for gpu in machine.gpus if gpu.memory_bytes is not None]
    try:
        require_fit(run.recipe, min(sizes) / 2**30 if sizes else None)
    except PpoctlError as error:
        return from_error(error, "memory", kind="memory")
    return ok("every stage fits, as estimated by `ppoctl plan --here`", "memory", kind="memory")


def saves(run: IntendedRun, runs: Path) -> Finding:
    """Check that the disk has space for the states and records of the run, as estimated by `plan`."""
    try:
        require_space(run.recipe, runs / run.recipe.name)
    except PpoctlError as error:
        return from_error(error, "saves", kind="disk")
    return ok("the disk has space for the run", "saves", kind="disk")


def joined_ray(run: IntendedRun) -> Finding:
    """Check that a process listens at `cluster.ray_address`. The check does not join Ray, because that takes long."""
    if run.joins is None:
        return ok("not used", "Ray's address", kind="ray")
    host, _, port = run.joins.rpartition(":")
    from ppoctl.http_client import NoAnswerError, require_listener

    try:
        require_listener(host, int(port), ANSWER_S)
    except (NoAnswerError, ValueError) as error:
        message = f"no response at `cluster.ray_address` `{run.joins}`: {error}"
        return wrong(message, "Ray's address", f"ray status --address {quoted(run.joins)}", kind="ray")
    return ok(f"`{run.joins}` responds", "Ray's address", kind="ray")


def mlflow(run: IntendedRun, answer_s: float = ANSWER_S) -> Finding:
    """Check that MLflow is reachable. If it is not, training continues and uploads the missing parts later."""
    tracking = run.recipe.tracking
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
    from ppoctl.http_client import HttpClient, HttpLimits, NoAnswerError, require_listener

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
