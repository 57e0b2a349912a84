"""Policy gradient without a critic: the advantages are computed without values (`estimators`)."""

from ppoctl.algorithm.advantages import ADVANTAGES
from ppoctl.algorithm.forward import CORRECTION, LOGPROBS
from ppoctl.algorithm.samples import ONE_ROUND, GetSamples, step_function
from ppoctl.algorithm.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithm.updates import ACTOR_UPDATE


def _policy_only(run_stage: RunStage, inputs: StepInputs, get_samples: GetSamples) -> StepOutputs:
    """Generate, score, compute advantages, and update the actor."""
    actor = inputs.states["actor"]
    samples = get_samples(run_stage, inputs)
    rollouts, rewards = samples.rollouts, samples.rewards
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, None, logprobs, inputs.carry)
    actor = run_stage(ACTOR_UPDATE, actor, rollouts, logprobs, advantages)
    return StepOutputs({"actor": actor}, advantages.carry, samples.generated)


def _policy_only_corrected(run_stage: RunStage, inputs: StepInputs, get_samples: GetSamples) -> StepOutputs:
    """Run the same step with rollout correction (see `ppo`)."""
    actor = inputs.states["actor"]
    samples = get_samples(run_stage, inputs)
    rollouts, rewards = samples.rollouts, samples.rewards
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    correction = run_stage(CORRECTION, rollouts, logprobs)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, None, logprobs, inputs.carry)
    actor = run_stage(ACTOR_UPDATE, actor, rollouts, logprobs, advantages, correction)
    return StepOutputs({"actor": actor}, advantages.carry, samples.generated)


def policy_only(get_samples: GetSamples = ONE_ROUND, *, corrects: bool = False) -> StepFunction:
    """Return the policy gradient without a critic with these samples, with or without rollout correction."""
    name, run = ("policy_only_corrected", _policy_only_corrected) if corrects else ("policy_only", _policy_only)
    return step_function(name, run, get_samples)


POLICY_ONLY = policy_only()
POLICY_ONLY_CORRECTED = policy_only(corrects=True)
