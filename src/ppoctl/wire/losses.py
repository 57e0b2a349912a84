"""Construction of the policy loss from the recipe's table."""

from ppoctl.ppo.policy_loss import Cispo, Gspo, PolicyClip, PolicyLoss, Reinforce
from ppoctl.recipe.schema import CispoLoss, ClippedLoss, GspoLoss, ReinforceLoss


def policy_loss(table: ClippedLoss | GspoLoss | CispoLoss | ReinforceLoss) -> PolicyLoss:
    """Return the policy loss that the table names, with its bounds."""
    match table:
        case ClippedLoss():
            return PolicyClip(table.clip_low, table.clip_high, table.dual_clip)
        case GspoLoss():
            return Gspo(table.clip_low, table.clip_high, table.ratio_gradient)
        case CispoLoss():
            return Cispo(table.clip_low, table.clip_high)
        case ReinforceLoss():
            return Reinforce()
