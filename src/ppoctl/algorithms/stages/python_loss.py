"""A policy loss of the user (`ppo.policy_loss.kind = "python"`): its inputs, and checks of what it returns."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.algorithms.formulas.masking import masked_mean
from ppoctl.algorithms.formulas.policy_loss import PolicyLossInputs, token_ratios
from ppoctl.core.errors import NonFiniteError
from ppoctl.core.user_functions import VALIDATE, TrainingFunction

CUSTOM = "custom_"
"""Prefix of the names of metrics that a function of the user returns."""
_NAME = re.compile("[A-Za-z0-9_]+")


@dataclass(frozen=True)
class PythonLoss:
    """Loss of each token that a function of the user computes."""

    function: TrainingFunction
    needs_entropy: bool

    def ratios(
        self, logprobs: Float[Tensor, "b R"], old_logprobs: Float[Tensor, "b R"], mask: Bool[Tensor, "b R"]
    ) -> Float[Tensor, "b R"]:
        """Return the ratio of each token, for metrics; the function may compute another one."""
        return token_ratios(logprobs, old_logprobs, mask)

    def losses(self, inputs: PolicyLossInputs) -> Float[Tensor, "b R"]:
        """Return the loss of each token, exactly 0 where masked out. Raises RecipeError if the function fails or
        returns something else, and NonFiniteError if a loss is not finite."""
        losses, _ = self._returned(inputs)
        has_gradient = losses.requires_grad or not inputs.logprobs.requires_grad
        if not has_gradient and bool(inputs.mask.any()):
            self.function.refuse(
                "returned losses without a gradient: compute them from `logprobs`, without `detach`, `item` or numpy"
            )
        return torch.where(inputs.mask, losses, 0)

    def clamped(self, ratios: Float[Tensor, "b R"]) -> None:
        """Return None: the function may clip, but does not say how."""
        del ratios

    def clipped(
        self, ratios: Float[Tensor, "b R"], advantages: Float[Tensor, "b R"]
    ) -> Mapping[str, Bool[Tensor, "b R"]]:
        del ratios, advantages
        return {}

    def metrics(self, inputs: PolicyLossInputs) -> dict[str, float]:
        """Return the mean of each metric of the function over the tokens of a minibatch."""
        with torch.no_grad():
            _, metrics = self._returned(inputs)
            return {f"{CUSTOM}{name}": float(masked_mean(grid, inputs.mask)) for name, grid in metrics.items()}

    def _returned(self, inputs: PolicyLossInputs) -> tuple[Float[Tensor, "b R"], dict[str, Float[Tensor, "b R"]]]:
        """Return the losses and the metrics of each token."""
        returned, metrics = with_metrics(self.function, self.function(_blanked(inputs)), ("losses",))
        shape = inputs.mask.shape
        grids = {name: grid_of(self.function, grid, shape, f"as `{name}`") for name, grid in metrics.items()}
        losses = grid_of(self.function, returned[0], shape, "as losses")
        for name, grid in {"the loss": losses, **{f"`{name}`": grid for name, grid in grids.items()}}.items():
            require_finite(self.function, grid, inputs.mask, name)
        return losses, grids


def _blanked(inputs: PolicyLossInputs) -> PolicyLossInputs:
    """Return the inputs with 0 where masked out, so that no masked-out number reaches a loss or a gradient. Only
    log-probs and entropies carry a gradient."""

    def blank(grid: Tensor) -> Tensor:
        return torch.where(inputs.mask, grid, 0)

    return PolicyLossInputs(
        logprobs=blank(inputs.logprobs),
        old_logprobs=blank(inputs.old_logprobs.detach()),
        advantages=blank(inputs.advantages.detach()),
        mask=inputs.mask,
        sampler_logprobs=blank(inputs.sampler_logprobs.detach()),
        entropy=None if inputs.entropy is None else blank(inputs.entropy),
    )


def with_metrics(
    function: TrainingFunction, returned: Any, expected: tuple[str, ...]
) -> tuple[list[Any], dict[str, Any]]:
    """Split what a function returned into the expected values and its metrics, which may be absent.

    Raises RecipeError if the number of values is wrong, or if a metric has an invalid name.
    """
    values = list(returned) if isinstance(returned, tuple) else [returned]
    metrics = values.pop() if len(values) == len(expected) + 1 and isinstance(values[-1], Mapping) else {}
    if len(values) != len(expected):
        what = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
        one = expected[0] if len(expected) == 1 else f"({', '.join(expected)})"
        function.refuse(f"returned {what}; it must return {one}, or ({', '.join((*expected, 'metrics'))})")
    for name in metrics:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            function.refuse(f"returned a metric named `{name}`: a name consists of letters, digits and underscores")
    return values, dict(metrics)


def grid_of(function: TrainingFunction, value: Any, shape: torch.Size, role: str) -> Tensor:
    """Return a grid that the function returned. Raises RecipeError unless it is a tensor of floats of this shape."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        function.refuse(f"returned {kind} {role}; it must be a tensor of floats of shape {[*shape]}")
    if value.shape != shape:
        function.refuse(f"returned a tensor of shape {[*value.shape]} {role}; the shape must be {[*shape]}")
    return value


def require_finite(function: TrainingFunction, grid: Tensor, mask: Bool[Tensor, "b R"], what: str) -> None:
    """Raise NonFiniteError that names the first unmasked token whose number is not finite."""
    wrong = torch.nonzero(mask & ~torch.isfinite(grid.detach()))
    if len(wrong):
        row, column = wrong[0].tolist()
        value = float(grid.detach()[row, column])
        raise NonFiniteError(
            f"`{function.key}.function` is `{function.function}`: it returned `{value}` as {what} "
            f"of token {column} of row {row} ({len(wrong)} of {int(mask.sum())} tokens are not finite)",
            hint=VALIDATE,
        )
