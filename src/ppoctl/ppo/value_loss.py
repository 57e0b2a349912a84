"""The clipped value loss of PPO."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def clipped_value_losses(
    values: Float[Tensor, "B R"],
    old_values: Float[Tensor, "B R"],
    returns: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    clip: float | None,
) -> Float[Tensor, "B R"]:
    """The critic's loss of each token; exactly 0 under the mask.

        e1 = (V - G)^2          e2 = (clip(V, V_old - c, V_old + c) - G)^2
        l = max(e1, e2) / 2          (e1 alone when clip is None)

    Source: the PPO2 code of OpenAI baselines; NeMo-RL and verl. old_values are those of the rollout, fixed over
    all epochs. Only values carry a gradient. Raises ValueError when clip is not above 0.
    """
    errors, clipped_errors = squared_errors(values, old_values.detach(), returns.detach(), mask, clip=clip)
    return torch.maximum(errors, clipped_errors) / 2


def squared_errors(
    values: Float[Tensor, "B R"],
    old_values: Float[Tensor, "B R"],
    returns: Float[Tensor, "B R"],
    mask: Bool[Tensor, "B R"],
    *,
    clip: float | None,
) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
    """The squared errors e1 and e2 of `clipped_value_losses`, 0 under the mask; one tensor twice when clip is None.

    Raises ValueError when clip is not above 0.
    """
    if clip is not None and not clip > 0.0:
        raise ValueError(f"clip is {clip}: it must be above 0, or None for no clip")
    # Blanked before the squares: their gradient is a product, and 0 times NaN is NaN.
    values, old_values, returns = (torch.where(mask, x, 0) for x in (values, old_values, returns))
    errors = (values - returns).square()
    if clip is None:
        return errors, errors
    # Not old + clamp(values - old): its rounding would make e2 differ from e1 where nothing is clipped.
    clipped_values = values.clamp(old_values - clip, old_values + clip)
    return errors, (clipped_values - returns).square()
