"""A reward that a service gives: one POST for each response. The client is in `http_scorer`.

It is asked, and may answer, so:

    {"prompt_id": ..., "prompt": ..., "messages": [{"role": ..., "content": ...}], "response": ..., "truth": ...,
     "fields": {...}, "finish": "terminated" | "truncated", "token_ids": [...]}

    0.7   or   {"score": 0.7, "helpful": 0.9}   or   {"error": "why it would not score this"}
"""

from dataclasses import fields
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from ppoctl.batch.scores import Scorer
from ppoctl.recipe_table import RESULTS, SPEED, AtLeastOne, NotNegative, Positive
from ppoctl.rewards.table import RewardModels, ScorerTable, no_models


def _readable(url: str) -> str:
    try:
        _ = urlsplit(url).port
    except ValueError as error:
        raise ValueError(f"cannot be read as a URL: {error}") from None
    return url


class HttpScorer(ScorerTable):
    """Score that a service answers when it is sent a response as JSON: a number, or a mapping of numbers, of which
    `score` is the score and the others are reported."""

    kind: Annotated[Literal["http"], RESULTS]
    """A service is asked."""
    url: Annotated[str, RESULTS, Field(pattern=r"^https?://[^/\s]+"), AfterValidator(_readable)]
    """Address that a response is posted to."""
    token_env: Annotated[str | None, SPEED] = None
    """Name of an environment variable whose value is sent as a bearer token; absent: none is sent."""
    concurrent: Annotated[int, SPEED, AtLeastOne] = 16
    """Responses that are asked about side by side."""
    try_timeout_s: Annotated[float, SPEED, Positive] = 30.0
    """Seconds within which a try must be answered, from the connection to the last byte."""
    tries: Annotated[int, SPEED, AtLeastOne] = 4
    """Tries of a response whose try was not answered, or with 408, 425, 429 or 5xx; then it has no score. Other
    answers are final."""
    backoff_s: Annotated[float, SPEED, NotNegative] = 0.5
    """Seconds before the second try, twice as many before each further one, each between half and one and a half
    times that. The service's `Retry-After` takes their place."""
    breaker_failures: Annotated[int, SPEED, AtLeastOne] = 8
    """Failures in a row, of all responses together, after which the service is taken for down: then one try is made
    at a time, every `breaker_pause_s`, and the other responses wait without losing tries."""
    breaker_pause_s: Annotated[float, SPEED, Positive] = 5.0
    """Seconds between two tries of a service that is down."""
    give_up_s: Annotated[float, SPEED, Positive] = 300.0
    """Seconds without any answer of a service that is down after which the run stops (exit 4); it can be resumed."""

    def open(self, models: RewardModels = no_models) -> Scorer:  # noqa: ARG002 - no model
        """A client, whose threads the first requests start."""
        from ppoctl.rewards.http_scorer import HttpClient, Service

        return HttpClient(Service(**{key.name: getattr(self, key.name) for key in fields(Service)}))
