"""A metric function of the user's own, in a child process as scorers are.

def measure(samples):                    samples: of one set and pass of an evaluation, a list of mappings
    return {"words_mean": mean(len(sample["response"].split()) for sample in samples)}
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from ppoctl.batch.scores import ScoreRequest
from ppoctl.errors import RewardError, quoted
from ppoctl.recipe_table import RESULTS, SPEED, Positive, Table
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.python import file_of, require_function

_KEY = "eval.metrics"


class MetricFunction(Table):
    """Figures of one's own: a Python function gets the samples of each set and pass, and returns numbers by name,
    which are reported as `custom_NAME`."""

    function: Annotated[str, RESULTS, Field(pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$")]
    """`path.py:name`, a relative path starts at the recipe file; or `module:name` of an installed package. It is
    called with a list of samples, the rows of `samples.jsonl` with the `fields` of each row of the data beside them,
    and the `options` by name."""
    options: Annotated[dict[str, Any], RESULTS] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    digest: Annotated[str, RESULTS] = ""
    """SHA-256 of the function's file, written when the recipe is read: a run does not go on with another function
    unnoticed. Writing `function` again accepts the file as it is. Empty for a function of a package."""
    timeout_s: Annotated[float, SPEED, Positive] = 60.0
    """Seconds for the samples of one set and pass; then the process is killed, and the figures are left out."""

    def require_there(self) -> None:
        """Raise MissingAssetError where the function's file is not there, RewardError where it is another than the
        one that the recipe was read with."""
        require_function(self.function, self.digest, whose="evaluation's", key=_KEY)

    def require_sound(self) -> None:
        """Raise RewardError where the function cannot be imported, or does not take what it will be given."""
        self._asked({})

    def compute(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """What the function says of these samples. Raises RewardError where it fails, takes too long, or returns
        something else than finite numbers by name."""
        found = self._asked({"samples": list(samples)})
        for name, figure in found.items():
            if not math.isfinite(figure):
                raise self._fault(f"it returned `{figure}` as `{name}`")
        return found

    def _asked(self, fields: Mapping[str, Any]) -> dict[str, float]:
        from ppoctl.rewards.scorer_output import Dropped
        from ppoctl.rewards.scorer_process import ScorerProcess

        # A process that scores is asked about one response; here the samples travel as its row's fields, and the
        # figures come back beside a score that says nothing.
        request = ScoreRequest("", "", (), "", None, fields, "terminated")
        dropped = Dropped(self.function)
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
            raise self._fault(f"no figures within {self.timeout_s:g} s")
        if score.value is None:
            raise self._fault(score.message)
        return dict(score.extras)

    @property
    def _spec(self) -> ScorerSpec:
        options = {"function": self.function, "options": dict(self.options), "limit_s": self.timeout_s}
        return ScorerSpec("ppoctl.rewards.user_function:opened_metrics", options, opens=True, known_as=self.function)

    def _fault(self, says: str) -> RewardError:
        file = file_of(self.function)
        hint = f"python {quoted(file)}" if file else f"python -c 'import {self.function.partition(':')[0]}'"
        return RewardError(f"`{_KEY}` is `{self.function}`: {says}", hint=hint)
