"""All test algorithms, and dynamic sampling, by name: algorithms with rounds, selected rows, other roles, or a read
of the step before."""

from collections.abc import Callable
from dataclasses import dataclass

from fakes import dynamic_sampling
from fakes.algorithms import one_step_off, resampled_rows, two_critics
from ppoctl.algorithm.choose import StepFunctionAt, step_function_at
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class Algorithm:
    """A test algorithm."""

    choose: StepFunctionAt
    recipe: Callable[..., Recipe]
    """Recipe in which these tables are replaced."""


EVERY = {
    "dynamic sampling": Algorithm(step_function_at, dynamic_sampling.without_critic),
    "critic sees all": Algorithm(step_function_at, dynamic_sampling.critic_sees_all),
    "resampled rows": Algorithm(resampled_rows.choose, resampled_rows.recipe),
    "two critics": Algorithm(two_critics.choose, two_critics.recipe),
    "one step off": Algorithm(one_step_off.choose, one_step_off.recipe),
}
