"""Trial of the loss and of an estimator of the user before a run (`validate --loss`)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ppoctl.algorithms.estimators.python import PythonAdvantages
from ppoctl.algorithms.stages.estimator_trial import PROMPTS, try_estimator
from ppoctl.algorithms.stages.loss_on_batch import COLUMNS, ROWS, try_loss
from ppoctl.algorithms.stages.loss_tables import PythonPolicyLoss
from ppoctl.core.errors import RecipeError
from ppoctl.core.finding import Finding
from ppoctl.recipe.schema import Recipe

MAX_SAMPLES = 8
"""Largest number of responses to a prompt in a trial of an estimator."""


@dataclass(frozen=True)
class LossTrial:
    """All findings on one function or loss."""

    key: str
    """Key of its recipe table."""
    name: str
    """Kind, or the function of the user."""
    inputs: str
    """The random inputs, in words."""
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the trial for `validate --json`."""
        return {**asdict(self), "findings": [finding.as_json() for finding in self.findings]}


def try_functions(recipe: Recipe) -> list[LossTrial]:
    """Try the recipe's policy loss on random responses, and its estimator if it is a function of the user."""
    loss, advantages = recipe.ppo.policy_loss, recipe.ppo.advantages
    name = loss.function if isinstance(loss, PythonPolicyLoss) else loss.kind
    inputs = f"{ROWS} random responses of at most {COLUMNS} tokens"
    trials = [LossTrial("ppo.policy_loss", name, inputs, try_loss(loss.build(), loss.aggregation))]
    if isinstance(advantages, PythonAdvantages):
        samples = min(recipe.rollout.samples_per_prompt, MAX_SAMPLES)
        checks = try_estimator(advantages.estimator(), samples=samples, has_values=advantages.reads_values)
        inputs = f"{samples} random responses to each of {PROMPTS} prompts"
        trials.append(LossTrial("ppo.advantages", advantages.function, inputs, checks))
    return trials


def require_right(trials: Sequence[LossTrial]) -> None:
    """Raise RecipeError with all findings of level `error`."""
    errors = [(trial, finding) for trial in trials for finding in trial.findings if finding.is_error]
    if errors:
        message = "\n".join(f"`{trial.key}` (`{trial.name}`): {finding.what}" for trial, finding in errors)
        raise RecipeError(message, hint="ppoctl recipes keys ppo.policy_loss.function")
