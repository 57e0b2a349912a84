"""A reward that is a Python function of the user's own, in a file beside the recipe or in an installed package.

    def score(sample):                       sample: a `ScoreRequest`
        return float(sample.truth in sample.response)

The function runs in the child processes alone: this file is imported there too, so nothing heavy.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ppoctl.batch.scores import Scorer
from ppoctl.errors import MissingAssetError, RewardError, quoted
from ppoctl.recipe_table import RESULTS, SPEED, AtLeastOne
from ppoctl.rewards.function import ScorerSpec
from ppoctl.rewards.table import ProcessScorer, RewardModels, no_models


class PythonScorer(ProcessScorer):
    """Score that a Python function gives: a number; a mapping of numbers, of which `score` is the score and the
    others are reported, beside a text `answer`, with which the response votes (`eval.maj_at`); or one number for each
    token of the response."""

    kind: Annotated[Literal["python"], RESULTS]
    """A function of your own."""
    function: Annotated[str, RESULTS, Field(pattern=r"^.+:[A-Za-z_][A-Za-z0-9_]*$")]
    """`path.py:name`, a relative path starts at the recipe file; or `module:name` of an installed package. It is
    called with a sample (`prompt`, `messages`, `response`, `truth`, `fields`, `finish`, `token_ids`) and the
    `options` by name; it may be `async`."""
    options: Annotated[dict[str, Any], RESULTS] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    digest: Annotated[str, RESULTS] = ""
    """SHA-256 of the function's file, written when the recipe is read: a run does not go on with another function
    unnoticed. Writing `function` again accepts the file as it is. Empty for a function of a package."""
    batched: Annotated[bool, RESULTS] = False
    """Call the function with a list of samples, and expect a list of answers. An answer may not depend on the other
    samples of the list, which differ from run to run."""
    batch_samples: Annotated[int, SPEED, AtLeastOne] = 1
    """Most samples of one list; of an `async` function: samples that it works on side by side. `timeout_s` is for the
    whole list."""

    finds_answers: ClassVar[bool] = True

    @property
    def scores_by(self) -> ScorerSpec:
        options = {
            "function": self.function,
            "options": dict(self.options),
            "batched": self.batched,
            "limit_s": self.timeout_s,
        }
        file = file_of(self.function)
        return ScorerSpec(
            "ppoctl.rewards.user_function:opened",
            options,
            opens=True,
            batch_size=self.batch_samples,
            known_as=self.function,
            hint=f"python {quoted(file)}" if file else f"python -c 'import {self.function.partition(':')[0]}'",
        )

    def reports(self, figure: str) -> bool:  # noqa: ARG002 - only the function knows
        return True

    def require_there(self, key: str = "reward") -> None:
        """Raise MissingAssetError where the function's file is not there, RewardError where it is another than the
        one that the recipe was read with. `key` is that of this table."""
        require_function(self.function, self.digest, whose="reward's", key=key)

    def open(self, models: RewardModels = no_models) -> Scorer:
        self.require_there()
        return super().open(models)


def require_function(function: str, digest: str, *, whose: str, key: str) -> None:
    """Raise MissingAssetError where a function's file is not there, RewardError where its digest is not this one, if
    one was noted. `key` is that of the table that names it."""
    file = file_of(function)
    if file is None:
        return
    found = digest_of(function)
    if not found:
        raise MissingAssetError(
            f"the {whose} function is `{function}`, and there is no file `{file}`",
            hint=f"ls -l {quoted(file.parent)}",
        )
    if digest and found != digest:
        setting = f"{key}.function={function}"
        raise RewardError(
            f"the {whose} function has changed: `{file}` is not as it was when the recipe was read "
            f"(digest {found[:12]}, recorded {digest[:12]})",
            hint=f"put it back, or accept it: `ppoctl resume RUN --set {quoted(setting)}`",
        )


def file_of(function: str) -> Path | None:
    """The file of `path.py:name`; None for `module:name`."""
    place = function.rpartition(":")[0]
    return Path(place) if place.endswith(".py") else None


def digest_of(function: str) -> str:
    """SHA-256 (hex) of the file that a function is in; "" where it is in a module, or the file cannot be read."""
    file = file_of(function)
    try:
        return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
