"""One PPO step by the book: the papers' formulas as loops over tokens, in float64, for models that are one table.

Written from the papers alone; nothing of the product is imported. `tables` is a recipe as a person writes it, with
every key spelled out: there is no default here to agree with by chance.

An actor's table has a row of logits for each token (what comes next), a critic's one number (what is to come).
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Array = np.ndarray
Tables = Mapping[str, Any]


@dataclass
class Drawn:
    """What a step is made of: models, responses and their scores. B rows, R columns, left-justified."""

    actor: Array
    critic: Array
    reference: Array
    before: Array
    """The token in front of each response token (the last of the prompt in column 0)."""
    tokens: Array
    present: Array
    mask: Array
    """Tokens that count: present ones without the holes."""
    sampler: Array
    scores: Sequence[float | None]
    """None: the sample has no score."""
    truncated: Array
    """Responses that the length limit ended."""
    carry: Mapping[str, float]
    """Moments of the rewards of the steps before."""
    step: int
    updates: Mapping[str, int]
    """Optimizer steps of each role so far."""


@dataclass
class Learned:
    """One update of one role."""

    table: Array
    moments: Array
    count: int = 0
    columns: dict[str, list[float]] = field(default_factory=dict)

    def note(self, **figures: float) -> None:
        for name, figure in figures.items():
            self.columns.setdefault(name, []).append(figure)


def derived(*parts: object) -> int:
    """SHA-256 of the parts, joined by unit separators; its first eight bytes, little end first, without two bits."""
    hashed = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(hashed[:8], "little") // 4


def step(tables: Tables, drawn: Drawn) -> dict[str, Array]:
    """Every number of one step, by name."""
    valid = np.array([score is not None for score in drawn.scores])
    shaped, told = arithmetic(tables, drawn, valid)
    truncated = tables["ppo"]["truncated"]
    mask = drawn.mask & valid[:, None] & ~(drawn.truncated & (truncated == "filter"))[:, None]
    temperature = tables["rollout"]["temperature"]
    actor, entropy = said(drawn.actor, drawn, temperature)
    reference, _ = said(drawn.reference, drawn, temperature)
    values = np.where(drawn.mask, drawn.critic[drawn.before], 0.0)
    kl = tables["ppo"]["kl"]
    has_kl = kl["place"] != "none"
    away = np.where(mask, divergence(actor, reference, kl["estimator"]), 0.0) if has_kl else np.zeros_like(actor)
    coef = kl["coef"] if has_kl else 0.0
    rewards = at_the_last(shaped, mask) - (coef * away if kl["place"] == "reward" else 0.0)
    gae_keys = tables["ppo"]["advantages"]
    last = drawn.critic[drawn.tokens[np.arange(len(mask)), drawn.present.sum(1) - 1]]
    behind = np.where(drawn.truncated & (truncated == "bootstrap"), last, 0.0)
    advantages, returns, lams = estimated(gae_keys, rewards, values, mask, np.where(valid, behind, 0.0))
    if gae_keys["whiten"]:
        counted = advantages[mask]
        advantages = np.where(mask, (advantages - counted.mean()) / np.sqrt(counted.var(ddof=1) + 1e-8), 0.0)
    told |= {
        "scores": np.array([score or 0.0 for score in drawn.scores]),
        "shaped": shaped,
        "values": values,
        "logprobs": np.where(drawn.mask, actor, 0.0),
        "entropy": np.where(drawn.mask, entropy, 0.0),
        "token_rewards": rewards,
        "advantages": advantages,
        "returns": returns,
        "mask": mask.astype(float),
    }
    if truncated == "bootstrap":
        told |= {"behind": behind, "advantage/bootstrap_mean": np.where(valid, behind, 0.0)[valid].mean()}
    if truncated == "filter":
        told["advantage/filtered_frac"] = drawn.truncated[valid].mean()
    if gae_keys.get("length_adaptive_alpha"):
        told["advantage/lambda_mean"] = lams[mask.any(1)].mean()
    told |= figures_of_rewards(drawn.scores, shaped, valid) | figures_of_mismatch(actor, drawn)
    if has_kl:
        told["reference"] = np.where(drawn.mask, reference, 0.0)
        told["kl/reference_mean"] = away[mask].mean()
        told["kl/coef"] = coef
        told["kl/penalty_mean"] = coef * away[mask].mean()
    correction = tables["ppo"]["rollout_correction"]
    if correction["kind"] != "none":
        weights = token_weights(correction, actor, drawn)
        capped = (weights == correction["max_ratio"])[drawn.mask].mean()
        told |= {"weights": weights, "correction/capped_frac": capped}
        told["correction/weight_mean"] = weights[drawn.mask].mean()
    told |= critic_update(tables, drawn, values, returns, mask)
    told |= actor_update(tables, drawn, mask, old=actor, reference=reference, advantages=advantages)
    told["policy/entropy_mean"] = entropy[mask].mean()
    return {name: np.asarray(value, dtype=float) for name, value in told.items()}


def scaled(score: float, scale: Mapping[str, Sequence[float]] | None) -> float:
    """Clamped to `from`, mapped linearly to `to`."""
    if scale is None:
        return score
    (low, high), (to_low, to_high) = scale["from"], scale["to"]
    return to_low + (min(max(score, low), high) - low) * (to_high - to_low) / (high - low)


def arithmetic(tables: Tables, drawn: Drawn, valid: Array) -> tuple[Array, dict[str, Any]]:
    """What each response earns, 0 without a score: scale, clip, moments, clip, unfinished, overlong, length."""
    keys, lengths, told = tables["reward"], drawn.present.sum(1), {}
    scores = np.array([0.0 if score is None else score for score in drawn.scores])
    rewards = np.array([scaled(score, keys["scale"]) for score in scores])
    if keys["scale"]:
        low, high = keys["scale"]["from"]
        told["reward/clamped_frac"] = ((scores < low) | (scores > high))[valid].mean()
    clip, moments, overlong, per_length = (keys[name] for name in ("clip", "moments", "overlong", "length_penalty"))

    def clipped(place: str) -> Array:
        if not clip or clip["place"] != place:
            return rewards
        told["reward/clipped_frac"] = ((rewards < clip["low"]) | (rewards > clip["high"]))[valid].mean()
        return np.clip(rewards, clip["low"], clip["high"])

    rewards = clipped("before_moments")
    if moments["kind"] != "none":
        mean, std = drawn.carry["reference_mean"], moments.get("std") or drawn.carry["reference_std"]
        if moments["kind"] == "running":
            # As many numbers with that mean and that sum of squared deviations as there were.
            count, old, m2 = drawn.carry["count"], drawn.carry["mean"], drawn.carry["m2"]
            spread = math.sqrt(m2 / count)
            all_of_them = [*[old - spread, old + spread] * (int(count) // 2), *rewards[valid]]
            mean, std = np.mean(all_of_them), np.std(all_of_them, ddof=1)
        rewards = (rewards - (mean if moments["center"] else 0.0)) / std
        told |= {"reward/moments_mean": mean, "reward/moments_std": std}
    rewards = clipped("after_moments")
    before, rewards = rewards, np.where(drawn.truncated, rewards * keys["unfinished_factor"], rewards)
    if keys["unfinished_factor"] != 1:
        told["reward/unfinished_mean"] = (rewards - before)[valid].mean()
    if overlong:
        end = overlong["max_tokens"] or tables["rollout"]["max_new_tokens"]
        over = [max(0.0, (length - end) / overlong["buffer_tokens"] + 1) for length in lengths]
        lost = overlong["penalty"] * np.array([min(share, 1.0) if overlong["floor"] else share for share in over])
        rewards, told["reward/overlong_mean"] = rewards - lost, -lost[valid].mean()
    if per_length:
        lost = per_length["per_token"] * np.maximum(lengths - per_length["free_tokens"], 0)
        rewards, told["reward/length_mean"] = rewards - lost, -lost[valid].mean()
    return np.where(valid, rewards, 0.0), told


def estimated(keys: Tables, rewards: Array, values: Array, mask: Array, behind: Array) -> tuple[Array, Array, Array]:
    """Advantages, returns, and the lambda of each row of the policy."""
    if keys["kind"] == "monte_carlo":
        _, returns = gae(rewards, 0 * values, mask, keys["gamma"], np.ones(len(mask)), behind)
        return returns, returns, np.ones(len(mask))
    lams = np.full(len(mask), keys["gae_lambda"])
    if keys["length_adaptive_alpha"]:
        lams = np.array([1 - 1 / max(1, keys["length_adaptive_alpha"] * counts.sum()) for counts in mask])
    critics = keys["gae_lambda"] if keys["gae_lambda_value"] is None else keys["gae_lambda_value"]
    advantages, _ = gae(rewards, values, mask, keys["gamma"], lams, behind)
    _, returns = gae(rewards, values, mask, keys["gamma"], np.full(len(mask), critics), behind)
    return advantages, returns, lams


def said(table: Array, drawn: Drawn, temperature: float) -> tuple[Array, Array]:
    """Log-prob of each response token, and entropy of what it was drawn from; 0 where there is none."""
    logs = log_softmax(table / temperature)
    chosen = np.where(drawn.present, logs[drawn.before, drawn.tokens], 0.0)
    entropies = -(np.exp(logs) * logs).sum(1)
    return chosen, np.where(drawn.present, entropies[drawn.before], 0.0)


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def divergence(pi: Array, other: Array, kind: str) -> Array:
    """Schulman's estimators of KL(pi || other) from tokens of pi: http://joschu.net/blog/kl-approx.html."""
    log_r = other - pi
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r}[kind]


def at_the_last(scores: Array, mask: Array) -> Array:
    grid = np.zeros(mask.shape)
    for row, counts in enumerate(mask):
        if counts.any():
            grid[row, np.flatnonzero(counts)[-1]] = scores[row]
    return grid


def gae(rewards: Array, values: Array, mask: Array, gamma: float, lams: Array, behind: Array) -> tuple[Array, Array]:
    """Schulman et al. 2016, equation 16, from the last counted token back; holes are not there. `behind` the last
    token a return goes on with a value, where it does."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for row, counts in enumerate(mask):
        next_value, next_advantage = behind[row], 0.0
        for column in reversed(np.flatnonzero(counts)):
            delta = rewards[row, column] + gamma * next_value - values[row, column]
            next_advantage = delta + gamma * lams[row] * next_advantage
            next_value = values[row, column]
            advantages[row, column] = next_advantage
            returns[row, column] = next_advantage + next_value
    return advantages, returns


def critic_update(tables: Tables, drawn: Drawn, old: Array, returns: Array, mask: Array) -> dict[str, Any]:
    """Schulman's PPO2: the larger of the two squared errors, halved, a mean over tokens."""
    keys = tables["ppo"]["value_loss"]
    clip, scale = keys["clip"], keys["scale"]
    learned = Learned(drawn.critic.copy(), np.zeros((2, *drawn.critic.shape)))
    for rows, lr in minibatches(tables, drawn, mask, role="critic"):
        loss, gradient = 0.0, np.zeros_like(learned.table)
        places = [(row, column) for row in rows for column in np.flatnonzero(mask[row])]
        errors = []
        for row, column in places:
            value, goal = learned.table[drawn.before[row, column]], returns[row, column]
            bounded = value if clip is None else min(max(value, old[row, column] - clip), old[row, column] + clip)
            plain, clipped = (value - goal) ** 2, (bounded - goal) ** 2
            loss += scale * max(plain, clipped) / 2 / len(places)
            if plain >= clipped:
                gradient[drawn.before[row, column]] += scale * (value - goal) / len(places)
            errors.append((value, abs(value - goal)))
        learned.note(value_mean=float(np.mean([v for v, _ in errors])))
        learned.note(value_error=float(np.mean([e for _, e in errors])))
        adamw(learned, gradient, tables["critic"]["optimizer"], lr=lr, loss=loss)
    told = as_figures("critic", "value", learned, drawn)
    target, unexplained = returns[mask], (returns - old)[mask]
    told["value/explained_variance"] = 1 - unexplained.var() / target.var()
    told["value/value_mean"], told["value/return_mean"] = old[mask].mean(), target.mean()
    told["value/return_std"] = target.std(ddof=1)
    told["value/value_error"] = np.abs(unexplained).mean()
    return told


def token_weights(correction: Tables, old: Array, drawn: Drawn) -> Array:
    """Truncated importance sampling (Yao et al. 2025), or ones."""
    if correction["kind"] != "tis":
        return np.ones(drawn.mask.shape)
    return np.where(drawn.mask, np.minimum(np.exp(old - drawn.sampler), correction["max_ratio"]), 0.0)


def actor_update(
    tables: Tables, drawn: Drawn, mask: Array, *, old: Array, reference: Array, advantages: Array
) -> dict[str, Any]:
    """Schulman et al. 2017, equation 7, with the dual clip of Ye et al. 2020; entropy bonus, KL to the reference."""
    ppo, temperature = tables["ppo"], tables["rollout"]["temperature"]
    keys, kl = ppo["policy_loss"], ppo["kl"]
    low, high, dual = 1 - keys["clip_low"], 1 + keys["clip_high"], keys["dual_clip"] or math.inf
    weights = token_weights(ppo["rollout_correction"], old, drawn)
    learned = Learned(drawn.actor.copy(), np.zeros((2, *drawn.actor.shape)))
    for rows, lr in minibatches(tables, drawn, mask, role="actor"):
        logs = log_softmax(learned.table / temperature)
        loss, gradient = 0.0, np.zeros_like(learned.table)
        places = [(row, column) for row in rows for column in np.flatnonzero(mask[row])]
        seen = []
        for row, column in places:
            state, token = drawn.before[row, column], drawn.tokens[row, column]
            share, chances = 1 / len(places), np.exp(logs[state])
            log_prob = logs[state, token]
            ratio = math.exp(log_prob - old[row, column])
            gain = weights[row, column] * advantages[row, column]
            plain, clipped = -gain * ratio, -gain * min(max(ratio, low), high)
            surrogate, slope = (plain, plain) if plain >= clipped else (clipped, 0.0)
            if gain < 0 and surrogate > -gain * dual:
                surrogate, slope = -gain * dual, 0.0
            if kl["place"] == "loss":
                surrogate += kl["coef"] * divergence(log_prob, reference[row, column], kl["estimator"])
                log_r = reference[row, column] - log_prob
                slope += kl["coef"] * {"k2": -log_r, "k3": 1 - math.exp(log_r)}[kl["estimator"]]
            entropy = -(chances * logs[state]).sum()
            loss += share * (surrogate - keys["entropy_coef"] * entropy)
            one_hot = np.eye(len(chances))[token]
            gradient[state] += share * slope * (one_hot - chances) / temperature
            # d entropy / d logit k = -p_k (log p_k + entropy)
            gradient[state] += share * keys["entropy_coef"] * chances * (logs[state] + entropy) / temperature
            seen.append((ratio, advantages[row, column], log_prob - old[row, column]))
        learned.note(**moved(np.array(seen), low, high, dual))
        adamw(learned, gradient, tables["actor"]["optimizer"], lr=lr, loss=loss)
    return as_figures("actor", "policy", learned, drawn)


def moved(seen: Array, low: float, high: float, dual: float) -> dict[str, float]:
    """How far a minibatch's ratios lie from 1."""
    ratio, advantage, log_r = seen.T
    above, below = (advantage > 0) & (ratio > high), (advantage < 0) & (ratio < low)
    ordered = np.sort(ratio)

    def rank(share: float) -> float:
        return float(ordered[round(share * (len(ordered) - 1))])

    return {
        "clip_frac_high": above.mean(),
        "clip_frac_low": below.mean(),
        "clip_frac": (above | below).mean(),
        "dual_clip_frac": ((advantage < 0) & (ratio > dual)).mean(),
        "approx_kl": (np.exp(log_r) - 1 - log_r).mean(),
        "ratio_mean": ratio.mean(),
        "ratio_p01": rank(0.01),
        "ratio_p50": rank(0.5),
        "ratio_p99": rank(0.99),
        "ratio_max": ordered[-1],
    }


def minibatches(tables: Tables, drawn: Drawn, mask: Array, *, role: str) -> list[tuple[list[int], float]]:
    """(rows, learning rate) of each optimizer step; one without a counted token is none."""
    ppo = tables["ppo"]
    epochs = ppo["epochs"] if role == "actor" or ppo["critic_epochs"] is None else ppo["critic_epochs"]
    size, num_rows = ppo["minibatch_seqs"], len(mask)
    steps = tables["steps"] - (ppo["critic_only_steps"] if role == "actor" else 0)
    planned = steps * epochs * (num_rows // size)
    found: list[tuple[list[int], float]] = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(derived(tables["seed"], drawn.step, role, epoch))
        order = torch.randperm(num_rows, generator=generator).tolist()
        for start in range(0, num_rows, size):
            rows = order[start : start + size]
            if mask[rows].any():
                update = drawn.updates[role] + len(found)
                found.append((rows, rate(tables[role]["optimizer"], update, planned)))
    return found


def rate(keys: Tables, update: int, planned: int) -> float:
    """Linear warm-up, whose first step is not 0; then constant, or linear or half a cosine down to the floor."""
    peak, warmup, floor = keys["lr"], keys["lr_warmup_updates"], keys["lr_min_frac"]
    if update < warmup:
        return float(peak * (update + 1) / warmup)
    end = keys["lr_decay_updates"] or planned
    done = min((update - warmup) / (end - warmup), 1.0)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[keys["lr_schedule"]]
    return float(peak * (floor + (1 - floor) * shape) if keys["lr_schedule"] != "constant" else peak)


def adamw(learned: Learned, gradient: Array, keys: Tables, *, lr: float, loss: float) -> None:
    """Loshchilov and Hutter 2019, algorithm 2, behind a clip of the global norm."""
    norm = float(np.sqrt((gradient**2).sum()))
    if keys["grad_clip"] and norm > keys["grad_clip"]:
        gradient = gradient * keys["grad_clip"] / norm
    learned.count += 1
    learned.moments[0] = keys["beta1"] * learned.moments[0] + (1 - keys["beta1"]) * gradient
    learned.moments[1] = keys["beta2"] * learned.moments[1] + (1 - keys["beta2"]) * gradient**2
    mean = learned.moments[0] / (1 - keys["beta1"] ** learned.count)
    spread = learned.moments[1] / (1 - keys["beta2"] ** learned.count)
    decayed = learned.table - lr * keys["weight_decay"] * learned.table
    learned.table = decayed - lr * mean / (np.sqrt(spread) + keys["eps"])
    learned.note(loss=loss, grad_norm=norm, lr=lr)


def as_figures(role: str, prefix: str, learned: Learned, drawn: Drawn) -> dict[str, Any]:
    """An update's numbers: each optimizer step's, and over them the mean, the last rate, the largest extreme."""
    told: dict[str, Any] = {f"{role} table": learned.table, f"{role} updates": drawn.updates[role] + learned.count}
    for name, column in learned.columns.items():
        told[f"{prefix} minibatches {name}"] = column
        over = column[-1] if name == "lr" else max(column) if name == "ratio_max" else float(np.mean(column))
        told[f"{prefix}/{name}"] = over
    return told


def figures_of_rewards(scores: Sequence[float | None], shaped: Array, valid: Array) -> dict[str, Any]:
    given = np.array([score for score in scores if score is not None])
    return {
        "reward/score_mean": given.mean(),
        "reward/score_std": given.std(),
        "reward/shaped_mean": shaped[valid].mean(),
    }


def figures_of_mismatch(actor: Array, drawn: Drawn) -> dict[str, Any]:
    """Trainer against sampler over all counted tokens; the effective sample size is Kish's."""
    gap = (actor - drawn.sampler)[drawn.mask]
    weights = np.exp(gap)
    return {
        "mismatch/gap_mean_abs": np.abs(gap).mean(),
        "mismatch/gap_max_abs": np.abs(gap).max(),
        "mismatch/gap_k3": (np.exp(gap) - 1 - gap).mean(),
        "mismatch/ess_frac": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
    }
