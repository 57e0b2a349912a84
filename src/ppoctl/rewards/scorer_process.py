"""The parent's side of one scorer process: requests and scores. Imports no torch."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ppoctl.core.batch.scores import Score, ScoreRequest
from ppoctl.core.errors import RewardError
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_output import Dropped
from ppoctl.rewards.user_process import NoReplyError, UserProcess


class ScorerProcess(UserProcess):
    """A child process that scores responses."""

    module = "ppoctl.rewards.scorer_main"
    role = "scorer"
    reply_bytes = 1 << 28
    """The limit is generous: a reply has a value for each token of each response of a batch."""

    def __init__(self, spec: ScorerSpec, timeout_s: float, dropped: Dropped) -> None:
        super().__init__(spec, dropped)
        self._timeout_s = timeout_s

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return the child's score of each response. A child that hangs is killed; if it hangs or dies, only these
        requests are lost.

        Raises RewardError when no child can be started.
        """
        self.start_if_ended()
        payload = [request.as_json() for request in requests]
        began = time.monotonic()
        try:
            reply = self.call({"requests": payload}, self._timeout_s)
        except NoReplyError as error:
            if error.reason == "timeout":
                late = f"no score within {self._timeout_s:g} s"
                return [Score(None, "timeout", late, seconds=self._timeout_s)] * len(requests)
            return [Score(None, "error", str(error))] * len(requests)
        seconds = (time.monotonic() - began) / len(requests)
        return [replace(_parsed(fields), seconds=seconds) for fields in reply["scores"]]

    def refused(self, why: str) -> RewardError:
        module = self.spec.entry.partition(":")[0]
        return RewardError(why, hint=self.spec.hint or f"python -m {module} shows why it cannot be imported")


def _parsed(fields: dict[str, Any]) -> Score:
    if "error" in fields:
        return Score(None, fields.get("outcome", "error"), str(fields["error"]))
    tokens = tuple(fields["tokens"]) if "tokens" in fields else None
    return Score(
        float(fields["value"]), "ok", extras=dict(fields["extras"]), token_values=tokens, answer=fields.get("answer")
    )
