"""PPO with a policy and a critic (Schulman et al. 2017; Ouyang et al. 2022).

Differences from textbook PPO:

1. The critic trains before the actor, each for its own number of epochs. Returns and advantages are fixed before
   either update, so the result equals that of the interleaved order. Each model is reloaded and offloaded only once
   per step.
2. Every stage is durable: its record is on disk before the next stage starts.
3. A loss is a sum over unmasked tokens, divided by a count over the whole minibatch. Microbatch sizes therefore never
   change a gradient.
4. The denominator of the ratio is the trainer's own log-prob, not the generator's, unless `ppo.old_logprobs` selects
   another source.
"""

from ppoctl.algorithms.advantages_spec import ADVANTAGES
from ppoctl.algorithms.forward_specs import CORRECTIONS, LOGPROBS, VALUES, Correct
from ppoctl.algorithms.get_samples import ONE_ROUND, GetSamples, step_function
from ppoctl.algorithms.trace import RunStage, StepFunction, StepInputs, StepOutputs
from ppoctl.algorithms.update_specs import ACTOR_UPDATE, CRITIC_UPDATE


def _ppo(run_stage: RunStage, inputs: StepInputs, get_samples: GetSamples, correct: Correct) -> StepOutputs:
    """Generate, score, compute advantages, and update critic and actor. With rollout correction, importance weights
    in the actor's loss correct for the sampler/trainer log-prob difference."""
    actor, critic = inputs.states["actor"], inputs.states["critic"]
    samples = get_samples(run_stage, inputs)
    rollouts, rewards = samples.rollouts, samples.rewards
    values = run_stage(VALUES, critic, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    correction = correct(run_stage, rollouts, logprobs)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, values, logprobs, inputs.carry)
    critic = run_stage(CRITIC_UPDATE, critic, rollouts, values, advantages)
    actor = run_stage(ACTOR_UPDATE, actor, rollouts, logprobs, advantages, *correction)
    return StepOutputs({"critic": critic, "actor": actor}, advantages.carry, samples.generated)


def _critic_only(run_stage: RunStage, inputs: StepInputs, get_samples: GetSamples) -> StepOutputs:
    """Run PPO without the actor update, so that the critic learns before its values train the actor."""
    actor, critic = inputs.states["actor"], inputs.states["critic"]
    samples = get_samples(run_stage, inputs)
    rollouts, rewards = samples.rollouts, samples.rewards
    values = run_stage(VALUES, critic, rollouts)
    logprobs = run_stage(LOGPROBS, actor, rollouts)
    advantages = run_stage(ADVANTAGES, rollouts, rewards, values, logprobs, inputs.carry)
    critic = run_stage(CRITIC_UPDATE, critic, rollouts, values, advantages)
    return StepOutputs({"critic": critic}, advantages.carry, samples.generated)


def ppo(get_samples: GetSamples = ONE_ROUND, *, corrects: bool = False) -> StepFunction:
    """Return PPO with these samples, with or without rollout correction."""
    return step_function("ppo_corrected" if corrects else "ppo", _ppo, get_samples, CORRECTIONS[corrects])


def critic_only(get_samples: GetSamples = ONE_ROUND) -> StepFunction:
    """Return the training of the critic alone with these samples."""
    return step_function("critic_only", _critic_only, get_samples)


PPO = ppo()
PPO_CORRECTED = ppo(corrects=True)
CRITIC_ONLY = critic_only()
