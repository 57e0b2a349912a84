"""Policy gradient without a critic: the advantages are computed without values (`estimators`)."""

from ppoctl.algorithm.advantages import ADVANTAGES
from ppoctl.algorithm.forward import CORRECTION, LOGPROBS
from ppoctl.algorithm.generation import REWARD, ROLLOUT
from ppoctl.algorithm.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithm.updates import ACTOR_UPDATE


def _policy_only(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
    """Generate, score, compute advantages, and update the actor."""
    actor = inputs.states["actor"]
    rollouts = run_stage(ROLLOUT, actor, inputs.prompts)
    rewards = run_stage(REWARD, inputs.prompts, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, None, logprobs, inputs.carry)
    actor = run_stage(ACTOR_UPDATE, actor, rollouts, logprobs, advantages)
    return StepOutputs({"actor": actor}, advantages.carry, ((rollouts, rewards),))


def _policy_only_corrected(run_stage: RunStage, inputs: StepInputs) -> StepOutputs:
    """Run the same step with rollout correction (see `ppo`)."""
    actor = inputs.states["actor"]
    rollouts = run_stage(ROLLOUT, actor, inputs.prompts)
    rewards = run_stage(REWARD, inputs.prompts, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    correction = run_stage(CORRECTION, rollouts, logprobs)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, None, logprobs, inputs.carry)
    actor = run_stage(ACTOR_UPDATE, actor, rollouts, logprobs, advantages, correction)
    return StepOutputs({"actor": actor}, advantages.carry, ((rollouts, rewards),))


POLICY_ONLY = StepFunction("policy_only", _policy_only)
POLICY_ONLY_CORRECTED = StepFunction("policy_only_corrected", _policy_only_corrected)
