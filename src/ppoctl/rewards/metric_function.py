"""A metric function of the user, which runs in a child process like a scorer.

def measure(samples):                    samples: list of mappings, from one set and pass of an evaluation
    return {"words_mean": mean(len(sample["response"].split()) for sample in samples)}
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from ppoctl.core.batch.scores import ScoreRequest
from ppoctl.core.errors import RewardError
from ppoctl.core.recipe_table import RESULTS, SPEED, Positive, Table
from ppoctl.core.user_functions import FUNCTION_PATTERN, import_command, require_function
from ppoctl.rewards.function import ScorerSpec

_KEY = "eval.metrics"


class MetricFunction(Table):
    """Custom metrics: a Python function receives the samples of each set and pass, and returns numbers by name, which
    are reported as `custom_NAME`."""

    function: Annotated[str, RESULTS, Field(pattern=FUNCTION_PATTERN)]
    """`path.py:name`, with a path relative to the recipe file, or `module:name` of an installed package. The function
    is called with a list of samples and with `options` as keyword arguments. A sample is a line of `samples.jsonl`,
    with the `fields` of its dataset row added."""
    options: Annotated[dict[str, Any], RESULTS] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    digest: Annotated[str, RESULTS] = ""
    """SHA-256 of the function's file, written when the recipe is read. A run does not continue with a changed file,
    unless `function` is set again. Empty for a function of an installed package."""
    timeout_s: Annotated[float, SPEED, Positive] = 60.0
    """Time limit in seconds for the samples of one set and pass. At the limit the process is killed, and the
    function's metrics are omitted."""

    def require_there(self) -> None:
        """Raise MissingFileError if the function's file does not exist, and RewardError if the file has changed
        since the recipe was read."""
        setting = f"{_KEY}.function={self.function}"
        require_function(self.function, self.digest, whose="evaluation's", setting=setting, changed=RewardError)

    def require_sound(self) -> None:
        """Raise RewardError if the function cannot be imported, or does not accept its arguments."""
        self._call({})

    def compute(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return the metrics that the function computes from these samples. Raises RewardError if the function fails,
        takes too long, or returns anything but finite numbers by name."""
        metrics = self._call({"samples": list(samples)})
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise self._fault(f"it returned `{value}` as `{name}`")
        return metrics

    def _call(self, fields: Mapping[str, Any]) -> dict[str, float]:
        from ppoctl.rewards.scorer_output import Dropped
        from ppoctl.rewards.scorer_process import ScorerProcess

        # A scorer process accepts only responses. So the samples are sent as the row fields of an empty response, and
        # the metrics come back as extras of a score that is not used.
        request = ScoreRequest("", "", (), "", None, fields, "terminated")
        dropped = Dropped(f"metric function `{self.function}`")
        process = ScorerProcess(self._spec, self.timeout_s, dropped)
        try:
            [score] = process.score([request])
        except RewardError as error:
            raise self._fault(f"it does not start: {error.message.partition(' does not start: ')[2]}") from error
        finally:
            process.close()
            process.reap()
            dropped.report()
        if score.outcome == "timeout":
            raise self._fault(f"no metrics within {self.timeout_s:g} s")
        if score.value is None:
            raise self._fault(score.message)
        return dict(score.extras)

    @property
    def _spec(self) -> ScorerSpec:
        options = {"function": self.function, "options": dict(self.options), "limit_s": self.timeout_s}
        return ScorerSpec("ppoctl.rewards.user_function:opened_metrics", options, opens=True, known_as=self.function)

    def _fault(self, reason: str) -> RewardError:
        return RewardError(f"`{_KEY}` is `{self.function}`: {reason}", hint=import_command(self.function))
