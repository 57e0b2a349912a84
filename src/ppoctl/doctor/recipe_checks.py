"""Checks of what a recipe needs of this machine, in the words in which a start would refuse it."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, InvalidURL
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from ppoctl.doctor.finding import Finding, ok, refused, warning, wrong
from ppoctl.errors import PpoctlError, quoted, without_secrets
from ppoctl.http_client import Connection, connected, time_limit
from ppoctl.loading.problems import Problem
from ppoctl.machine.device import VISIBLE
from ppoctl.machine.host_info import HostInfo
from ppoctl.preflight.check import check
from ppoctl.preflight.fit import require_fit
from ppoctl.preflight.space import require_space
from ppoctl.recipe.parallel import devices, is_one_process
from ppoctl.recipe.paths import resolved_uri
from ppoctl.recipe.schema import MlflowTracking, Recipe

ANSWER_S = 2.0
"""Seconds that a server has to answer."""
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


@dataclass(frozen=True)
class IntendedRun:
    """What somebody wants to run here."""

    recipe: Recipe
    missing: tuple[Problem, ...] = ()
    """Things that the recipe names, and that are not on this machine."""

    @property
    def joins(self) -> str | None:
        """Address of the Ray that the recipe joins; None where it needs none, or starts its own."""
        return None if is_one_process(self.recipe) else self.recipe.cluster.ray_address


def model(asked: IntendedRun, here: HostInfo) -> Iterator[Finding]:
    """Whether model and tokenizer are here and can be trained. Rows of data are left to `validate`, which reads them
    all."""
    device = "gpu" if here.gpus else "cpu"
    problems = [*asked.missing, *check(asked.recipe, rows=False, device=device).problems]
    for problem in problems:
        yield wrong("model", problem.message, problem.hint or "ppoctl recipes keys")
    if not problems:
        yield ok("model", f"`{asked.recipe.model.path}`, with its tokenizer")


def layout(asked: IntendedRun, here: HostInfo) -> Finding:
    """Whether there are GPUs enough for the layout."""
    needed, found = devices(asked.recipe), len(here.gpus)
    if asked.joins is not None:
        return ok("layout", f"{needed} devices of the Ray at `{asked.joins}`")
    if not here.gpus:
        return ok("layout", f"{needed} processes on CPUs" if needed > 1 else "one process on CPUs")
    if needed > found:
        shown = "" if found == here.gpu_count else f" of {here.gpu_count} (`{VISIBLE}`)"
        says = f"the recipe needs {needed} GPUs, and this machine shows {found}{shown}"
        return wrong("layout", says, "ray start --head --port=6379  # on more nodes: docs/many-nodes.md")
    return ok("layout", f"{needed} of {found} GPUs")


def memory(asked: IntendedRun, here: HostInfo) -> Finding:
    """Whether the run fits, as `plan --here` says; nodes of a Ray that is joined are not judged from here."""
    if asked.joins is not None:
        return ok("memory", f"not judged from here: ppoctl train asks the Ray at `{asked.joins}`")
    sizes = [gpu.memory_bytes for gpu in here.gpus if gpu.memory_bytes is not None]
    try:
        require_fit(asked.recipe, min(sizes) / 2**30 if sizes else None)
    except PpoctlError as error:
        return refused("memory", error)
    return ok("memory", "every stage fits, as far as `ppoctl plan --here` knows")


def saves(asked: IntendedRun, runs: Path) -> Finding:
    """Whether the disk takes the saved states and records of the run, as `plan` counts them."""
    try:
        require_space(asked.recipe, runs / asked.recipe.name)
    except PpoctlError as error:
        return refused("saves", error)
    return ok("saves", "the disk has room for what the run keeps")


def joined_ray(asked: IntendedRun) -> Finding:
    """Whether something listens at `cluster.ray_address`. Ray itself is not asked: joining it takes long."""
    if asked.joins is None:
        return ok("Ray's address", "none is joined")
    host, _, port = asked.joins.rpartition(":")
    try:
        connected(host, int(port), time_limit(ANSWER_S)).close()
    except (OSError, ValueError) as error:
        says = f"nobody answers at `cluster.ray_address` `{asked.joins}`: {error}"
        return wrong("Ray's address", says, f"ray status --address {quoted(asked.joins)}")
    return ok("Ray's address", f"`{asked.joins}` answers")


def mlflow(asked: IntendedRun) -> Finding:
    """Whether MLflow can be reached; training goes on without, and sends what it lacks when it can."""
    tracking = asked.recipe.tracking
    if not isinstance(tracking, MlflowTracking):
        return ok("MLflow", "none is asked for")
    try:
        uri = resolved_uri(tracking.uri)
    except PpoctlError as error:
        return refused("MLflow", error)
    if uri is None:
        return ok("MLflow", "a sqlite file in the runs folder")
    shown = without_secrets(uri)
    try:
        _reach(uri)
    except (OSError, ValueError, HTTPException) as error:
        says = f"`tracking.uri` `{shown}` is not reached: {_words(error)}; training goes on without"
        return warning("MLflow", says, f"curl -sS -o /dev/null {quoted(shown)}" if "http" in uri[:5] else None)
    return ok("MLflow", f"`{shown}`")


def _reach(uri: str) -> None:
    """Raise OSError where nobody answers at a tracking URI, HTTPException where it is no web server that does, and
    ValueError where it is no URI."""
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
    """Request MLflow's word that it is there, with user and password as MLflow sends them, and through the proxy that
    it uses. Any answer is enough: the server is there, and may require another user."""
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
            raise ConnectionError(f"the proxy answers {through.status}")
    finally:
        connection.close()


def _user(parts: SplitResult, header: str) -> dict[str, str]:
    """The header that has user and password of a URI; no header where the URI has no user."""
    user, _, _ = parts.netloc.rpartition("@")
    return {header: f"Basic {base64.b64encode(unquote(user).encode()).decode()}"} if user else {}


def _words(error: Exception) -> str:
    """Why a URI is not reached, without words of it: a password that is misread stands in them."""
    if isinstance(error, InvalidURL) or not isinstance(error, OSError | HTTPException):
        return "it cannot be read as a URI"
    return str(error) if isinstance(error, OSError) else "what answers there does not speak HTTP"
