"""PPO with a third trained role, `judge`: a second critic, whose values no other stage reads. The advantages are
those of the first critic."""

from collections.abc import Mapping
from typing import Any

from fakes.components import FEW_ROWS, fake_recipe
from ppoctl.algorithms.advantages_spec import ADVANTAGES
from ppoctl.algorithms.forward_specs import LOGPROBS, VALUES, ValuesSpec
from ppoctl.algorithms.generation_specs import REWARD, ROLLOUT
from ppoctl.algorithms.role_table import TrainedTable
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithms.update_specs import ACTOR_UPDATE, CRITIC_UPDATE, ValueUpdateSpec
from ppoctl.recipe.schema import Recipe


class TwoCriticsRecipe(Recipe):
    """A recipe with a third trained role."""

    judge: TrainedTable


JUDGE_VALUES = ValuesSpec("judge_values", role="judge")
JUDGE_UPDATE = ValueUpdateSpec("judge_update", role="judge")


def _two_critics(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
    actor, critic, judge = (inputs.states[role] for role in ("actor", "critic", "judge"))
    rollouts = run_stage(ROLLOUT, actor, inputs.prompts)
    rewards = run_stage(REWARD, inputs.prompts, rollouts)
    values = run_stage(VALUES, critic, rollouts)
    others = run_stage(JUDGE_VALUES, judge, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, values, logprobs, inputs.carry)
    critic = run_stage(CRITIC_UPDATE, critic, rollouts, values, advantages)
    judge = run_stage(JUDGE_UPDATE, judge, rollouts, others, advantages)
    actor = run_stage(ACTOR_UPDATE, actor, rollouts, logprobs, advantages)
    states = {"critic": critic, "judge": judge, "actor": actor}
    return StepOutputs(states, advantages.carry, ((rollouts, rewards),))


TWO_CRITICS = StepFunction("two_critics", _two_critics)


def choose(recipe: Recipe, step: int) -> StepFunction:
    return TWO_CRITICS


def recipe(**changes: Any) -> Recipe:
    """Return a recipe of three steps of four rows, with an optimizer of its own for each role."""
    tables: Mapping[str, Any] = {
        "rollout": FEW_ROWS,
        "ppo": {"epochs": 1, "minibatch_seqs": 2, "kl": {"place": "reward", "coef": 0.05}},
    }
    judge = changes.pop("judge", {"optimizer": {"lr": 0.02}})
    written = fake_recipe(**{**tables, **changes}).model_dump(by_alias=True, exclude_unset=True)
    return TwoCriticsRecipe.model_validate({**written, "judge": judge})
