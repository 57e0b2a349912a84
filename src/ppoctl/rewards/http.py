"""A reward that a service computes: one POST for each response. The client is in `http_scorer`.

Request, and the three forms of the answer:

    {"prompt_id": ..., "prompt": ..., "messages": [{"role": ..., "content": ...}], "response": ..., "truth": ...,
     "fields": {...}, "finish": "terminated" | "truncated", "token_ids": [...]}

    0.7   or   {"score": 0.7, "helpful": 0.9}   or   {"error": "why it would not score this"}
"""

from dataclasses import fields
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from ppoctl.core.batch.scores import Scorer
from ppoctl.core.recipe_table import RESULTS, SPEED, AtLeastOne, NotNegative, Positive
from ppoctl.rewards.scorer_table import RewardModels, ScorerTable, no_models


def _readable(url: str) -> str:
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ValueError(f"cannot be read as a URL: {error}") from None
    return url


class HttpScorer(ScorerTable):
    """Score that a service returns for a response sent as JSON: a number, or a mapping of numbers. In a mapping,
    `score` is the score, and the other numbers are reported."""

    kind: Annotated[Literal["http"], RESULTS]
    """An HTTP service scores the responses."""
    url: Annotated[str, RESULTS, Field(pattern=r"^https?://[^/\s]+"), AfterValidator(_readable)]
    """Address to which responses are posted."""
    token_env: Annotated[str | None, SPEED] = None
    """Name of an environment variable whose value is sent as a bearer token; absent: no token is sent."""
    concurrent: Annotated[int, SPEED, AtLeastOne] = 16
    """Number of responses that are sent to the service in parallel."""
    try_timeout_s: Annotated[float, SPEED, Positive] = 30.0
    """Seconds within which the service must answer one try, from the connection to the last byte."""
    tries: Annotated[int, SPEED, AtLeastOne] = 4
    """Maximum number of tries for a response. A try without an answer, or with status 408, 425, 429 or 5xx, is
    repeated; after the last try the response has no score. All other answers are final."""
    backoff_s: Annotated[float, SPEED, NotNegative] = 0.5
    """Seconds before the second try. The time doubles before each further try, and a random factor from 0.5 to 1.5
    applies. A `Retry-After` header of the service replaces this time."""
    breaker_failures: Annotated[int, SPEED, AtLeastOne] = 8
    """Number of consecutive failed tries, over all responses, after which the service is considered down. While it is
    down, one try is made at a time, every `breaker_pause_s`, and the other responses wait without losing tries."""
    breaker_pause_s: Annotated[float, SPEED, Positive] = 5.0
    """Seconds between two tries while the service is down."""
    give_up_s: Annotated[float, SPEED, Positive] = 300.0
    """Stop the run (exit 4) after the service has been down for this many seconds. The run can be resumed."""

    def open(self, models: RewardModels = no_models) -> Scorer:  # noqa: ARG002 - no model
        """Return a client. The first requests start its threads."""
        from ppoctl.core.http_client import Retries
        from ppoctl.rewards.http_scorer import ServiceScorer

        retries = Retries(**{key.name: getattr(self, key.name) for key in fields(Retries)})
        return ServiceScorer(
            self.url, self.try_timeout_s, retries, token_env=self.token_env, concurrent=self.concurrent
        )
