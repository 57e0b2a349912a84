"""Construction of the KL penalty from the recipe's table."""

from ppoctl.ppo.kl_coefficient import KlTarget
from ppoctl.recipe.schema import AdaptivePerSequence, AdaptivePerToken, KlInLoss, KlInReward, Recipe
from ppoctl.stages.logprobs import KlPenalty


def penalty_of(recipe: Recipe) -> KlPenalty | None:
    """Return the KL penalty; None if the recipe has no penalty and therefore no reference model."""
    kl = recipe.ppo.kl
    if not isinstance(kl, KlInReward | KlInLoss):
        return None
    return KlPenalty(
        place=kl.place,
        estimator=kl.estimator,
        coef=kl.coef,
        input_clamp=kl.input_clamp,
        output_clamp=kl.output_clamp,
        gradient=kl.gradient if isinstance(kl, KlInLoss) else "estimator",
        target=_target(kl.adaptive),
    )


def _target(table: AdaptivePerToken | AdaptivePerSequence | None) -> KlTarget | None:
    if isinstance(table, AdaptivePerToken):
        return KlTarget(table.target_per_token, "token", table.horizon_seqs)
    if isinstance(table, AdaptivePerSequence):
        return KlTarget(table.target_per_sequence, "sequence", table.horizon_seqs)
    return None
