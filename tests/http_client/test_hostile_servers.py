"""Servers that misuse HTTP, for each user of the client: a try ends in time, with an error that names the cause."""

import re
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial

import pytest

from fakes.hostile import BROKEN, LONG, REFUSED, SLOW, WITHOUT_HEADERS, black_hole, closed_port, hostile
from ppoctl.core.http_client import Retries
from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.http import HttpScorer
from ppoctl.rewards.http_scorer import ServiceScorer
from ppoctl.rewards.sandbox.fusion import FusionEndpoint
from ppoctl.rewards.sandbox.job import Limits, SandboxJob, UnreachableError
from ppoctl.start.preflight.resource_checks import mlflow
from recipe.conftest import SMALLEST
from rewards.asking import request, scores

LIMIT_S, LONG_LIMIT_S = 0.2, 20.0
Server = Callable[[], AbstractContextManager[str]]


@contextmanager
def scorer_of(url: str, limit_s: float) -> Iterator[ServiceScorer]:
    """Yield a scorer that makes one try; afterwards its threads must have ended."""
    scorer = HttpScorer(kind="http", url=url, tries=1, try_timeout_s=limit_s).open()
    assert isinstance(scorer, ServiceScorer)
    with closing(scorer):
        yield scorer
    assert [thread for thread in threading.enumerate() if thread.name == "scorer"] == []


def reward_service(url: str, limit_s: float) -> str:
    with scorer_of(url, limit_s) as scorer:
        (score,) = scores(scorer, [request("1")])
    return f"{score.outcome}: {score.message}"


def sandbox_fusion(url: str, limit_s: float) -> str:
    limits = Limits(timeout_s=limit_s / 4, output_kib=64)
    endpoint = FusionEndpoint(url, "python", limits, retries=Retries(), slack_s=limit_s / 2, other_bytes=1 << 20)
    with closing(endpoint):
        try:
            return endpoint.run(SandboxJob("1", limits=limits)).outcome
        except UnreachableError as error:
            return str(error)


def doctor(url: str, limit_s: float) -> str:
    keys = {**tomllib.loads(SMALLEST), "tracking": {"kind": "mlflow", "uri": url}}
    found = mlflow(Recipe.model_validate(keys), limit_s)
    return f"{found.level}: {found.what}"


def late(step: str) -> tuple[str, str, str]:
    """Return the words about a step that exceeds `LIMIT_S`: of reward service, Sandbox Fusion and doctor."""
    return f"^timeout: no {step} within 0.2 s$", f"no {step} within 0.[23] s$", f"^warning.* no {step} within 0.2 s;"


LATE, LATE_CONNECTION = late("(answer|connection)"), late("connection")
TOO_LONG = ("^error: its answer is longer than 1048576 bytes$", "^output$", "^ok")
INVALID, NO_CONNECTION = (
    (f"^unreachable: ({errors}): .", f"endpoint: ({errors}): .", f"^warning.* ({errors}): .*;")
    for errors in ("RemoteProtocolError|ReadError|WriteError", "ConnectError")
)
SERVERS: dict[str, tuple[Server, tuple[str, str, str]]] = {
    **{name: (partial(hostile, answer), LATE) for name, answer in SLOW.items()},
    **{name: (partial(hostile, answer), TOO_LONG) for name, answer in LONG.items()},
    **{name: (partial(hostile, answer), INVALID) for name, answer in BROKEN.items()},
    **{f"{name}, reset": (partial(hostile, answer, reset=True), INVALID) for name, answer in BROKEN.items()},
    **{
        status: (partial(hostile, answer), (f"^error: it answered {status}: ", f"answers {status}$", "^ok"))
        for status, answer in REFUSED.items()
    },
    "black hole": (black_hole, LATE_CONNECTION),
    "closed port": (lambda: nullcontext(f"http://{closed_port()}/"), NO_CONNECTION),
    "unknown certificate": (lambda: hostile(REFUSED["500"], tls=True), NO_CONNECTION),
}
"""How a server answers, and the words of its users."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("user", [reward_service, sandbox_fusion, doctor])
@pytest.mark.parametrize("name", SERVERS)
def test_hostile_server_costs_its_user_one_time_limit(user: Callable[[str, float], str], name: str) -> None:
    server, words = SERVERS[name]
    expected = words[[reward_service, sandbox_fusion, doctor].index(user)]
    base = name.removesuffix(", reset")
    if user is doctor and base in SLOW | BROKEN and base not in WITHOUT_HEADERS:
        expected = "^ok"  # the doctor does not read the body
    with server() as url:
        began = time.monotonic()
        outcome = user(url, LIMIT_S if "within" in expected else LONG_LIMIT_S)
        took_s = time.monotonic() - began
    assert re.search(expected, outcome), outcome
    assert took_s < LONG_LIMIT_S / 4


@pytest.mark.parametrize("user", [reward_service, sandbox_fusion])
@pytest.mark.parametrize("body", ["[" * 100_000, '{"a":' * 100_000])
def test_deeply_nested_answer_is_not_a_result(user: Callable[[str, float], str], body: str) -> None:
    with hostile(lambda _: iter([b"HTTP/1.0 200 OK\r\n\r\n", body.encode()])) as url:
        assert re.search("error: its answer is not JSON|endpoint: maximum recursion depth", user(url, LONG_LIMIT_S))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["HTTP/1.0, slow body", "slow chunks", "slow headers", "no answer"])
def test_close_ends_running_http_request(name: str) -> None:
    with hostile(SLOW[name]) as url, scorer_of(url, limit_s=600) as scorer:
        pending = scorer.submit(request("1"))
        time.sleep(LIMIT_S)
        began = time.monotonic()
        scorer.close()
        assert time.monotonic() - began < 20
        assert pending.result(timeout=20).outcome == "unreachable"
