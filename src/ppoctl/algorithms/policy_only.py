"""Policy gradient without a critic: the advantages are computed without values (`estimators`)."""

from ppoctl.algorithms.advantages_spec import ADVANTAGES
from ppoctl.algorithms.forward_specs import CORRECTIONS, LOGPROBS, Correct
from ppoctl.algorithms.get_samples import ONE_ROUND, GetSamples, step_function
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithms.update_specs import ACTOR_UPDATE, PolicyUpdateSpec


def policy_step(
    run_stage: RunStage, inputs: StepInputs, get_samples: GetSamples, update: PolicyUpdateSpec, correct: Correct
) -> StepOutputs:
    """Generate, score, compute advantages, and update the actor, with or without rollout correction (see `ppo`)."""
    actor = inputs.states["actor"]
    samples = get_samples(run_stage, inputs)
    rollouts, rewards = samples.rollouts, samples.rewards
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    correction = correct(run_stage, rollouts, logprobs)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, None, logprobs, inputs.carry)
    actor = run_stage(update, actor, rollouts, logprobs, advantages, *correction)
    return StepOutputs({"actor": actor}, advantages.carry, samples.generated)


def policy_only(get_samples: GetSamples = ONE_ROUND, *, corrects: bool = False) -> StepFunction:
    """Return the policy gradient without a critic with these samples, with or without rollout correction."""
    name = "policy_only_corrected" if corrects else "policy_only"
    return step_function(name, policy_step, get_samples, ACTOR_UPDATE, CORRECTIONS[corrects])


POLICY_ONLY = policy_only()
