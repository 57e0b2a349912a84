"""Policy losses: the loss of each token as a function of its advantage and probability ratio.

Every loss here is linear in the magnitude of the advantage A, so that the weights of a rollout correction can be
multiplied into A. No loss reads other rows. Only log-probs carry a gradient: A and old log-probs are constants of the
update. Entropy bonus, KL penalty and NLL of good responses are separate terms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ppoctl.algorithms.formulas.kl import MAX_LOG_RATIO

RatioGradient = Literal["token", "sequence"]

Grid = Float[Tensor, "B R"]
Mask = Bool[Tensor, "B R"]


@dataclass(frozen=True)
class PolicyLossInputs:
    """Values that a policy loss may read: complete rows of a minibatch, b responses of at most R tokens."""

    logprobs: Float[Tensor, "b R"]
    """Log-probs of the response tokens under the actor that is updated. They carry a gradient."""
    old_logprobs: Float[Tensor, "b R"]
    """Old log-probs, the denominator of the ratio (`ppo.old_logprobs`)."""
    advantages: Float[Tensor, "b R"]
    """Advantages after whitening, times the weights of a rollout correction if there is one."""
    mask: Bool[Tensor, "b R"]
    """Tokens in the loss."""
    sampler_logprobs: Float[Tensor, "b R"]
    """Log-probs that the generator returned with the tokens."""
    entropy: Float[Tensor, "b R"] | None = None
    """Entropy of the distribution of each token in nats, with a gradient; None: the loss does not need it."""


@runtime_checkable
class PolicyLoss(Protocol):
    """One kind of policy loss with its bounds."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss reads entropies."""

    def ratios(self, logprobs: Grid, old_logprobs: Grid, mask: Mask) -> Grid:
        """Return the ratio of new to old probability that the loss uses for each token; 1 where masked out."""
        ...

    def losses(self, inputs: PolicyLossInputs) -> Grid:
        """Return the loss of each token, to be minimized; exactly 0 where masked out."""
        ...

    def clamped(self, ratios: Grid) -> Grid | None:
        """Return the ratios within the clip range; None for a loss without a clip."""
        ...

    def clipped(self, ratios: Grid, advantages: Grid) -> Mapping[str, Mask]:
        """Return the tokens that each clip applies to, by metric name; empty for a loss without a clip."""
        ...

    def metrics(self, inputs: PolicyLossInputs) -> dict[str, float]:
        """Return further metrics of the tokens of a minibatch."""
        ...


class _BuiltIn:
    """Loss that reads no entropies and has no metrics except its clips."""

    needs_entropy: ClassVar[bool] = False

    def clamped(self, ratios: Grid) -> Grid | None:  # noqa: ARG002 - a loss with a clip reads it
        return None

    def metrics(self, inputs: PolicyLossInputs) -> dict[str, float]:  # noqa: ARG002 - a loss of the user reads it
        return {}


class _TokenRatio(_BuiltIn):
    """Loss with a separate ratio for each token."""

    def ratios(self, logprobs: Grid, old_logprobs: Grid, mask: Mask) -> Grid:
        return token_ratios(logprobs, old_logprobs, mask)


class _ClipRange(_BuiltIn):
    """Loss that clips ratios to 1 - low and 1 + high."""

    low: float
    high: float

    def clamped(self, ratios: Grid) -> Grid:
        return ratios.clamp(1.0 - self.low, 1.0 + self.high)

    def _surrogate(self, ratios: Grid, advantages: Grid) -> Grid:
        # Use the larger of the two losses: clipping then stops the gradient only if the loss would fall as the ratio
        # moves further from 1, and never if it would rise.
        return torch.maximum(-advantages * ratios, -advantages * self.clamped(ratios))


@dataclass(frozen=True)
class PolicyClip(_ClipRange, _TokenRatio):
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        ratio = exp(logprobs - old)          l = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))
        if A < 0 and dual is set:            l = min(l, -A dual)

    PPO has low equal to high; DAPO (arXiv:2503.14476) has high above low. dual bounds the loss of a token with a
    negative advantage at dual times |A| (Ye et al. 2020, arXiv:1912.09729), as in verl and NeMo-RL; None: no bound.
    Raises ValueError if low is not between 0 and 1, high is negative, or dual is not above 1.
    """

    low: float
    high: float
    dual: float | None

    def __post_init__(self) -> None:
        _require_bounds(self.low, self.high)
        if self.dual is not None and not self.dual > 1.0:
            raise ValueError(f"dual is {self.dual}: it must be above 1, or None for no bound")

    def losses(self, inputs: PolicyLossInputs) -> Grid:
        mask, advantages = inputs.mask, _constants(inputs.advantages, inputs.mask)
        ratios = self.ratios(inputs.logprobs, inputs.old_logprobs, mask)
        loss = self._surrogate(ratios, advantages)
        if self.dual is not None:
            loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * self.dual), loss)
        return torch.where(mask, loss, 0)

    def clipped(self, ratios: Grid, advantages: Grid) -> Mapping[str, Mask]:
        """Return the three regions in which the clipped branch is the loss, and the gradient is 0."""
        dual = (advantages < 0) & (ratios > (torch.inf if self.dual is None else self.dual))
        return {**_stopped(ratios, advantages, self.low, self.high), "dual_clip_frac": dual}


@dataclass(frozen=True)
class Gspo(_ClipRange):
    """Loss of group sequence policy optimization: PPO's clip with one ratio for all n tokens of a sequence.

        s = exp(1/n sum_t (logprobs_t - old_t))          l_t = max(-A_t s, -A_t clip(s, 1 - low, 1 + high))

    gradient "token" (GSPO-token, arXiv:2507.18071, eq. 13-14; verl): s stands for sg(s) exp(logprobs_t -
    sg(logprobs_t)), so that the gradient of a token is scaled by its own advantage. "sequence" (eq. 5-7; NeMo-RL):
    the gradient flows through s, and that of every token is scaled by the mean advantage of the sequence. The two are
    equal if all tokens of a response have the same advantage, as in the paper; with a critic they do not.
    Raises ValueError if low is not between 0 and 1, or high is negative.
    """

    low: float
    high: float
    gradient: RatioGradient

    def __post_init__(self) -> None:
        _require_bounds(self.low, self.high)

    def ratios(self, logprobs: Grid, old_logprobs: Grid, mask: Mask) -> Grid:
        log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0)
        mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        sequence_mean = mean.detach() + (log_ratio - log_ratio.detach()) if self.gradient == "token" else mean
        return torch.where(mask, sequence_mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 1)

    def losses(self, inputs: PolicyLossInputs) -> Grid:
        mask, advantages = inputs.mask, _constants(inputs.advantages, inputs.mask)
        ratios = self.ratios(inputs.logprobs, inputs.old_logprobs, mask)
        return torch.where(mask, self._surrogate(ratios, advantages), 0)

    def clipped(self, ratios: Grid, advantages: Grid) -> Mapping[str, Mask]:
        """Return the tokens of sequences whose ratio is clipped, as in the paper."""
        return _stopped(ratios, advantages, self.low, self.high)


@dataclass(frozen=True)
class Cispo(_ClipRange, _TokenRatio):
    """CISPO's loss: the log-prob of each token, weighted by a clipped ratio that is a constant (arXiv:2506.13585, eq.
    4-5).

        ratio = exp(logprobs - old)          l = -A sg(clip(ratio, 1 - low, 1 + high)) logprobs

    A clipped token keeps a gradient, with a bounded weight. low = 1: no lower bound, as in MiniMax-M1.
    Raises ValueError if low is not between 0 and 1, or high is negative.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        _require_bounds(self.low, self.high)

    def losses(self, inputs: PolicyLossInputs) -> Grid:
        mask, advantages = inputs.mask, _constants(inputs.advantages, inputs.mask)
        ratios = self.ratios(inputs.logprobs, inputs.old_logprobs, mask).detach()
        return -advantages * self.clamped(ratios) * torch.where(mask, inputs.logprobs, 0)

    def clipped(self, ratios: Grid, advantages: Grid) -> Mapping[str, Mask]:
        """Return the tokens whose weight is clipped, for either sign of A."""
        del advantages
        return _fractions(ratios > 1.0 + self.high, ratios < 1.0 - self.low)


@dataclass(frozen=True)
class Reinforce(_TokenRatio):
    """REINFORCE (Williams 1992): l = -A logprobs, independent of the old log-probs (NeMo-RL's
    `disable_ppo_ratio`)."""

    def losses(self, inputs: PolicyLossInputs) -> Grid:
        mask = inputs.mask
        return -_constants(inputs.advantages, mask) * torch.where(mask, inputs.logprobs, 0)

    def clipped(self, ratios: Grid, advantages: Grid) -> Mapping[str, Mask]:
        del ratios, advantages
        return {}


def token_ratios(
    logprobs: Float[Tensor, "B R"], old_logprobs: Float[Tensor, "B R"], mask: Bool[Tensor, "B R"]
) -> Float[Tensor, "B R"]:
    """Return exp(logprobs - old), with the difference clamped to +-20; 1 where masked out. `old` carries no
    gradient."""
    # Mask before exp: a `where` after exp would stop NaN in the value but not in the gradient (0 times NaN).
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _require_bounds(low: float, high: float) -> None:
    if not 0.0 <= low <= 1.0:
        raise ValueError(f"low is {low}: it must be between 0 and 1")
    if not high >= 0.0:
        raise ValueError(f"high is {high}: it must not be negative")


def _constants(advantages: Grid, mask: Mask) -> Grid:
    return torch.where(mask, advantages, 0).detach()


def _stopped(ratios: Grid, advantages: Grid, low: float, high: float) -> Mapping[str, Mask]:
    """Return the tokens whose gradient the clip sets to 0."""
    return _fractions((advantages > 0) & (ratios > 1.0 + high), (advantages < 0) & (ratios < 1.0 - low))


def _fractions(high: Mask, low: Mask) -> Mapping[str, Mask]:
    return {"clip_frac_high": high, "clip_frac_low": low, "clip_frac": high | low}
