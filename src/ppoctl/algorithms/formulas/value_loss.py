"""Clipped value loss of PPO."""

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
    """Return the critic's loss of each token; exactly 0 where masked out.

        e1 = (V - G)^2          e2 = (clip(V, V_old - c, V_old + c) - G)^2
        l = max(e1, e2) / 2          (e1 alone if clip is None)

    Source: the PPO2 code of OpenAI baselines, NeMo-RL and verl; the PPO paper has no value clip. old_values are the
    values at the rollout, fixed over all epochs. Only values carry a gradient. Raises ValueError if clip is not above
    0.
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
    """Return the squared errors e1 and e2 of `clipped_value_losses`, 0 where masked out; the same tensor twice if
    clip is None.

    Raises ValueError if clip is not above 0.
    """
    if clip is not None and not clip > 0.0:
        raise ValueError(f"clip is {clip}: it must be above 0, or None for no clip")
    # Mask before the squares: the gradient of a square is a product, and 0 times NaN is NaN.
    values, old_values, returns = (torch.where(mask, x, 0) for x in (values, old_values, returns))
    errors = (values - returns).square()
    if clip is None:
        return errors, errors
    # Do not use old + clamp(values - old): its rounding would make e2 differ from e1 for unclipped tokens.
    clipped_values = values.clamp(old_values - clip, old_values + clip)
    return errors, (clipped_values - returns).square()
