"""Checks of whether this machine has what a recipe requires. They show the errors that a start would raise."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, InvalidURL
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ppoctl.errors import PpoctlError, quoted, without_secrets
from ppoctl.finding import Finding, from_error, ok, warning, wrong
from ppoctl.http_client import Connection, connected, time_limit
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
    try:
        connected(host, int(port), time_limit(ANSWER_S)).close()
    except (OSError, ValueError) as error:
        message = f"no response at `cluster.ray_address` `{run.joins}`: {error}"
        return wrong(message, "Ray's address", f"ray status --address {quoted(run.joins)}", kind="ray")
    return ok(f"`{run.joins}` responds", "Ray's address", kind="ray")


def mlflow(run: IntendedRun) -> Finding:
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
    try:
        _reach(uri)
    except (OSError, ValueError, HTTPException) as error:
        message = f"`tracking.uri` `{shown}` is not reachable: {_words(error)}; training continues without it"
        return warning(
            message, "MLflow", f"curl -sS -o /dev/null {quoted(shown)}" if "http" in uri[:5] else None, kind="mlflow"
        )
    return ok(f"`{shown}`", "MLflow", kind="mlflow")


def _reach(uri: str) -> None:
    """Connect to the server of a tracking URI.

    Raises OSError if there is no response, HTTPException if the response is not HTTP, and ValueError if the text is
    not a URI.
    """
    parts = urlsplit(uri)
    scheme = parts.scheme.split("+")[0]
    if scheme in ("http", "https"):
        _request(parts)
    elif scheme in _PORTS:
        port = parts.port or _PORTS[scheme]
        connected(parts.hostname or "localhost", port, time_limit(ANSWER_S)).close()
    elif scheme in ("sqlite", "file", ""):
        folder = Path(parts.path.removeprefix("/") if scheme == "sqlite" else parts.path).parent
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder `{folder}`")


def _request(parts: SplitResult) -> None:
    """Request the health page of MLflow, with the user, password and proxy that MLflow would use.

    Any response is enough: it shows that the server is running, even if the server requires another user.
    """
    host = parts.netloc.rpartition("@")[2]
    url = parts._replace(netloc=host, path=f"{parts.path.rstrip('/')}/health").geturl()
    name = parts.hostname or ""
    proxy = None if proxy_bypass(name) else getproxies().get(parts.scheme)
    if proxy is not None and "://" not in proxy:
        proxy = f"http://{proxy}"
    connection = Connection(proxy or url, limit_s=ANSWER_S, most_bytes=0)
    try:
        if proxy is None:
            connection.exchange("GET", headers=_user(parts, "Authorization"))
            return
        sent = _user(urlsplit(proxy), "Proxy-Authorization")
        if parts.scheme == "http":
            connection.exchange("GET", headers={**sent, **_user(parts, "Authorization")}, target=url)
            return
        through = connection.exchange("CONNECT", headers=sent, target=f"{name}:{parts.port or 443}")
        if through.status != HTTPStatus.OK:
            raise ConnectionError(f"the proxy returned {through.status}")
    finally:
        connection.close()


def _user(parts: SplitResult, header: str) -> dict[str, str]:
    """Return the HTTP header with the user and password of a URI; empty: the URI has no user."""
    user, _, _ = parts.netloc.rpartition("@")
    return {header: f"Basic {base64.b64encode(unquote(user).encode()).decode()}"} if user else {}


def _words(error: Exception) -> str:
    """Return why a URI is not reachable. The text does not quote the URI, which may contain a password."""
    if isinstance(error, InvalidURL) or not isinstance(error, OSError | HTTPException):
        return "it cannot be read as a URI"
    return str(error) if isinstance(error, OSError) else "the response is not HTTP"
