"""All test algorithms, dynamic sampling and PF-PPO by name: algorithms with rounds, selected rows, other roles, or a
read of the step before."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fakes import dynamic_sampling
from fakes.algorithms import two_critics
from fakes.components import FEW_ROWS, fake_recipe
from ppoctl.algorithms.choose import StepFunctionAt, step_function_at
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class Algorithm:
    """A test algorithm."""

    choose: StepFunctionAt
    recipe: Callable[..., Recipe]
    """Recipe in which these tables are replaced."""


GENERATORS_EXPERTS = {"optimizer": {"lr": 0.05}, "router_replay": "generator"}


def _resampling(order: str, **changes: Any) -> Recipe:
    """Return a recipe of PF-PPO: three steps of four rows."""
    resample = {"kind": "pow", "power": 1.5, "order": order}
    ppo = {"epochs": 2, "minibatch_seqs": 2, "kl": {"place": "reward", "coef": 0.05}, "resample": resample}
    tables = {"rollout": FEW_ROWS, "ppo": ppo, "actor": GENERATORS_EXPERTS}
    return fake_recipe(**{**tables, **changes})


PARTIAL = {**FEW_ROWS, "max_new_tokens": 5, "tokens_per_step": 2}
"""Table `rollout` of responses of up to three segments."""


def _stale(rollout: dict[str, Any], **changes: Any) -> Recipe:
    """Return a recipe of three steps without a critic that corrects for old responses."""
    ppo = {
        "epochs": 2,
        "minibatch_seqs": 2,
        "kl": {"place": "loss", "coef": 0.05},
        "advantages": {"kind": "grpo"},
        "rollout_correction": {"kind": "tis"},
    }
    tables = {"critic": None, "rollout": rollout, "ppo": ppo, **changes}
    if "tokens_per_step" not in rollout:
        tables["actor"] = GENERATORS_EXPERTS
    return fake_recipe(**tables)


EVERY = {
    "dynamic sampling": Algorithm(step_function_at, dynamic_sampling.without_critic),
    "critic sees all": Algorithm(step_function_at, dynamic_sampling.critic_sees_all),
    "resampled rows": Algorithm(step_function_at, partial(_resampling, "after_whitening")),
    "resampled, then whitened": Algorithm(step_function_at, partial(_resampling, "before_whitening")),
    "two critics": Algorithm(two_critics.choose, two_critics.recipe),
    "one step off": Algorithm(step_function_at, partial(_stale, {**FEW_ROWS, "ahead": 1})),
    "dynamic sampling, one step off": Algorithm(
        step_function_at,
        partial(
            _stale,
            {**FEW_ROWS, "ahead": 1, "groups": {"max_rounds": 4, "when_short": "use_fewer"}},
            seed=13,
        ),
    ),
    "partial rollouts": Algorithm(step_function_at, partial(_stale, {**PARTIAL, "prompts_per_step": 3})),
    "partial rollouts, one step off": Algorithm(step_function_at, partial(_stale, {**PARTIAL, "ahead": 1})),
}
