"""Losses and estimators of a user, right and wrong."""

import torch


def clip(batch, low=0.2, high=0.2):
    """PPO's clip."""
    ratio = (batch.logprobs - batch.old_logprobs).clamp(-20, 20).exp()
    plain, clipped = -batch.advantages * ratio, -batch.advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(plain, clipped)


def with_words(batch):
    return clip(batch), {"words": batch.mask.float()}


def every_grid(batch, scale=1.0):
    """Read every field; the entropy has a gradient too."""
    losses = -scale * batch.advantages * (batch.logprobs - 0.5 * batch.sampler_logprobs) + 1 - 0.25 * batch.entropy
    return losses, {"gap": batch.logprobs - batch.sampler_logprobs, "tokens": batch.mask.float()}


def unclamped(batch):
    return -batch.advantages * (batch.logprobs - batch.old_logprobs).exp()


def raises(batch):
    return batch.logprobs + torch.zeros(7, 7)


def no_gradient(batch):
    return -batch.advantages * batch.logprobs.detach()


def one_number(batch):
    return (-batch.advantages * batch.logprobs).mean()


def a_list(batch):
    return batch.logprobs.tolist()


def whole_numbers(batch):
    return batch.mask.long()


def not_finite(batch):
    losses = -batch.advantages * batch.logprobs
    return losses / torch.where(batch.advantages == -1.0, 0.0, 1.0)


def three(batch):
    return batch.logprobs, batch.logprobs, batch.logprobs


def misnamed(batch):
    return batch.logprobs, {"per token": batch.logprobs}


def metric_of_rows(batch):
    return batch.logprobs, {"mean": batch.logprobs.mean(1)}


def two_arguments(batch, other):
    return batch.logprobs + other


def other_rows(batch):
    return -(batch.advantages - batch.advantages[batch.mask].mean()) * batch.logprobs


def by_width(batch):
    return -batch.advantages * batch.logprobs / batch.mask.shape[1]


def random(batch):
    return -batch.advantages * batch.logprobs * torch.rand(batch.mask.shape)


def ascent(batch):
    return batch.advantages * batch.logprobs


def constant(batch):
    return 0 * batch.logprobs


def median(step, scale=1.0):
    """Score minus the median of the scored responses to the same prompt, at every token."""
    baseline = torch.zeros_like(step.scores)
    for group in step.groups.unique():
        rows = (step.groups == group) & step.valid
        if rows.any():
            baseline[step.groups == group] = step.scores[rows].median()
    advantages = scale * (step.scores - baseline)
    return advantages[:, None].expand(step.mask.shape), {"baseline": baseline.mean()}


def rewards_to_go(step):
    """Rewards of the rest of the response as returns, minus the values."""
    returns = step.token_rewards.flip(1).cumsum(1).flip(1)
    return returns - step.values, returns, {"words": int(step.lengths.max())}


def by_rank(step):
    return torch.arange(len(step.scores))[:, None] * step.mask.float()


def infinite_metric(step):
    return step.token_rewards, {"ratio": float("inf")}


def word_metric(step):
    return step.token_rewards, {"ratio": "high"}


def times_tokens(batch):
    """The loss of the clip, times the number of tokens that count; without tokens, numbers without a gradient."""
    tokens = batch.mask.sum()
    return clip(batch) * tokens if tokens else torch.zeros_like(batch.advantages)
