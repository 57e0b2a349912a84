"""The kinds of reward: recipe table to the function that scores, by name. Adding a kind: a table in
`recipe.schema`, a module here with a `score` function, and one case below (and one in `probe`)."""

from ppoctl.recipe.schema import ExactMatchReward, Gsm8kReward
from ppoctl.rewards.pool import ScorerPool
from ppoctl.rewards.worker import ScorerSpec


def spec_of(reward: Gsm8kReward | ExactMatchReward) -> ScorerSpec:
    """The scoring function of a reward table, in words that travel to a child."""
    match reward:
        case Gsm8kReward():
            return ScorerSpec("ppoctl.rewards.gsm8k:score", {"strict": reward.strict})
        case ExactMatchReward():
            return ScorerSpec("ppoctl.rewards.exact_match:score", {"ignore_case": reward.ignore_case})


def pool_of(reward: Gsm8kReward | ExactMatchReward) -> ScorerPool:
    """Its child processes (started by the first call); to be closed by the caller."""
    return ScorerPool(spec_of(reward), workers=reward.workers, timeout_s=reward.timeout_s)
