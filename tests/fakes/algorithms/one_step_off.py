"""Training that is one step off: each step trains on the responses that the step before generated, with the weights
before its update. There is no critic."""

from collections.abc import Mapping
from typing import Any

from fakes.components import FEW_ROWS, fake_recipe
from ppoctl.algorithms.advantages_spec import ADVANTAGES
from ppoctl.algorithms.forward_specs import LOGPROBS
from ppoctl.algorithms.generation_specs import REWARD, ROLLOUT, RolloutSpec
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithms.update_specs import ACTOR_UPDATE
from ppoctl.core.batch.records import Rollouts
from ppoctl.recipe.schema import Recipe

NEXT_ROLLOUT = RolloutSpec("next_rollout")
"""Generation of the responses that the next step trains on."""


def _train(run_stage: RunStage, inputs: StepInputs, rollouts: Rollouts) -> StepOutputs:
    """Train on these responses, whose prompts are those of this step, and generate those of the next step."""
    actor = inputs.states["actor"]
    rewards = run_stage(REWARD, inputs.prompts, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, None, logprobs, inputs.carry)
    run_stage(NEXT_ROLLOUT, actor, inputs.prompts_of(2))
    actor = run_stage(ACTOR_UPDATE, actor, rollouts, logprobs, advantages)
    return StepOutputs({"actor": actor}, advantages.carry, ((rollouts, rewards),))


def _first(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
    return _train(run_stage, inputs, run_stage(ROLLOUT, inputs.states["actor"], inputs.prompts))


def _later(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
    return _train(run_stage, inputs, inputs.previous(NEXT_ROLLOUT))


FIRST_STEP = StepFunction("one_step_off_first", _first)
LATER_STEP = StepFunction("one_step_off", _later)


def choose(recipe: Recipe, step: int) -> StepFunction:
    return FIRST_STEP if step == 1 else LATER_STEP


def recipe(**changes: Any) -> Recipe:
    """Return a recipe of three steps of four rows."""
    tables: Mapping[str, Any] = {
        "critic": None,
        "rollout": FEW_ROWS,
        "ppo": {
            "epochs": 2,
            "minibatch_seqs": 2,
            "kl": {"place": "loss", "coef": 0.05},
            "advantages": {"kind": "grpo"},
        },
    }
    return fake_recipe(**{**tables, **changes})
