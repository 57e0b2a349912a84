"""A reward that is a Python function of the user, in a file next to the recipe or in an installed package.

    def score(sample):                       sample: a `ScoreRequest`
        return float(sample.truth in sample.response)

The function runs only in scorer processes, which import this module too. So this module imports only the standard
library and recipe tables.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ppoctl.core.batch.scores import Scorer
from ppoctl.core.errors import RewardError
from ppoctl.core.recipe_table import RESULTS, SPEED, AtLeastOne
from ppoctl.core.user_functions import FUNCTION_PATTERN, file_of, require_function
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.scorer_table import ProcessScorer, RewardModels, no_models


class PythonScorer(ProcessScorer):
    """Score that a Python function returns: a number; one number for each token of the response; or a mapping. In a
    mapping, `score` is the score, other numbers are reported, and an optional text `answer` is the response's vote
    (`eval.maj_at`)."""

    kind: Annotated[Literal["python"], RESULTS]
    """Your own Python function."""
    function: Annotated[str, RESULTS, Field(pattern=FUNCTION_PATTERN)]
    """`path.py:name`, with a path relative to the recipe file, or `module:name` of an installed package. The function
    is called with a sample (`prompt`, `messages`, `response`, `truth`, `fields`, `finish`, `token_ids`), and with
    `options` as keyword arguments. It may be `async`."""
    options: Annotated[dict[str, Any], RESULTS] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    digest: Annotated[str, RESULTS] = ""
    """SHA-256 of the function's file, written when the recipe is read. A run does not continue with a changed file,
    unless `function` is set again. Empty for a function of an installed package."""
    batched: Annotated[bool, RESULTS] = False
    """Call the function with a list of samples, and expect a list of answers. An answer must not depend on the other
    samples of the list, because lists differ from run to run."""
    batch_samples: Annotated[int, SPEED, AtLeastOne] = 1
    """Maximum number of samples per list; for an `async` function, number of samples it processes concurrently.
    `timeout_s` applies to the whole list."""

    finds_answers: ClassVar[bool] = True

    @property
    def scores_by(self) -> ScorerSpec:
        options = {
            "function": self.function,
            "options": dict(self.options),
            "batched": self.batched,
            "limit_s": self.timeout_s,
        }
        return ScorerSpec(
            "ppoctl.rewards.user_function:opened",
            options,
            opens=True,
            batch_size=self.batch_samples,
            known_as=self.function,
            hint="ppoctl validate RECIPE --reward",
        )

    def reports(self, figure: str) -> bool:  # noqa: ARG002 - only the function knows
        return True

    def accepted_by(self, key: str) -> str | None:
        return None if file_of(self.function) is None else f"{key}.function={self.function}"

    def require_there(self, key: str = "reward") -> None:
        """Raise MissingFileError if the function's file does not exist, and RewardError if the file has changed
        since the recipe was read. `key` is the key of this table."""
        setting = f"{key}.function={self.function}"
        require_function(self.function, self.digest, whose="reward's", setting=setting, changed=RewardError)

    def open(self, models: RewardModels = no_models) -> Scorer:
        self.require_there()
        return super().open(models)
