"""All test algorithms by name."""

from collections.abc import Callable
from dataclasses import dataclass

from fakes.algorithms import dynamic_sampling, one_step_off, resampled_rows, two_critics
from ppoctl.algorithm.choose import StepFunctionAt
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class Algorithm:
    """A test algorithm."""

    choose: StepFunctionAt
    recipe: Callable[..., Recipe]
    """Recipe in which these tables are replaced."""


EVERY = {
    "dynamic sampling": Algorithm(dynamic_sampling.choose, dynamic_sampling.recipe),
    "resampled rows": Algorithm(resampled_rows.choose, resampled_rows.recipe),
    "two critics": Algorithm(two_critics.choose, two_critics.recipe),
    "one step off": Algorithm(one_step_off.choose, one_step_off.recipe),
}
