"""One PPO step from the textbook: the papers' formulas as loops over tokens, in float64, for models that are one
table.

Written from the papers alone, without imports from ppoctl. `tables` is a recipe as a user writes it, with every key
given: this file has no defaults, which could agree with those of ppoctl by chance.

An actor's table has one row of logits per token (of the next token), a critic's table one value per token. If the
critic is a value head on the actor, its table is the last column of the actor's.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch

from wiring import textbook_groups, textbook_losses, textbook_resampling

Array = np.ndarray
UNFILTERED = {"top_p": 1.0, "top_k": None, "min_p": 0.0}
Tables = Mapping[str, Any]


@dataclass
class TextbookGreedy:
    """Greedy responses, one per prompt."""

    present: Array
    scores: Sequence[float | None]
    truncated: Array
    of_row: Array
    """Prompt of each row of the rollout."""


@dataclass
class TextbookRollout:
    """Inputs of a step: models, responses and their scores. B rows, R columns, left-justified."""

    actor: Array
    critic: Array
    reference: Array
    before: Array
    """The token before each response token (in column 0 the last token of the prompt)."""
    tokens: Array
    present: Array
    mask: Array
    """Tokens in the loss: present tokens without the holes."""
    sampler: Array
    scores: Sequence[float | None]
    """None: the sample has no score."""
    truncated: Array
    """Responses truncated by the length limit."""
    carry: Mapping[str, float]
    """Moments of the rewards of earlier steps."""
    step: int
    updates: Mapping[str, int]
    """Optimizer steps of each role so far."""
    carried_coef: float
    """KL coefficient carried over from the previous step."""
    components: Mapping[str, Array]
    """Score of each response in each component of the reward."""
    greedy: TextbookGreedy
    OF_ROWS: ClassVar[tuple[str, ...]] = ("before", "tokens", "present", "mask", "sampler", "truncated")
    """Fields that the updates read, with one entry per row."""


@dataclass
class Learned:
    """One update of one role."""

    table: Array
    moments: Array
    count: int = 0
    columns: dict[str, list[float]] = field(default_factory=dict)

    def note(self, **metrics: float) -> None:
        for name, value in metrics.items():
            self.columns.setdefault(name, []).append(value)


def derived(*parts: object) -> int:
    """Return the first eight bytes of the SHA-256 of the parts, joined by unit separators, as a little-endian integer
    without its two lowest bits."""
    hashed = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(hashed[:8], "little") // 4


def step(tables: Tables, rollout: TextbookRollout) -> dict[str, Array]:
    """Return every number of one step, by name."""
    valid = np.array([score is not None for score in rollout.scores])
    shaped, numbers = shape_rewards(tables, rollout, valid)
    of_rewards = reward_metrics(rollout.scores, shaped, valid)
    baselines = np.zeros(len(valid))
    if tables["ppo"]["advantages"]["kind"] == "remax":
        baselines, has_baseline, of_greedy = greedy_baselines(tables, rollout)
        valid, numbers = valid & has_baseline, numbers | of_greedy
        shaped = np.where(valid, shaped, 0.0)
    truncated = tables["ppo"]["truncated"]
    mask = rollout.mask & valid[:, None] & ~(rollout.truncated & (truncated == "filter"))[:, None]
    sampling = tables["rollout"]
    actor, entropy = token_outputs(rollout.actor, rollout, sampling)
    reference, _ = token_outputs(rollout.reference, rollout, {**sampling, **UNFILTERED})
    values = np.where(rollout.mask, rollout.critic[rollout.before], 0.0)
    kl = tables["ppo"]["kl"]
    has_kl = kl["place"] != "none"
    by = tables["ppo"]["old_logprobs"]
    old = rollout.sampler if by == "sampler" else actor
    nats = clamped = np.zeros_like(actor)
    if has_kl:
        full = kl["estimator"] == "full"
        found, clamped = full_divergence(rollout, sampling, kl) if full else divergence(old, reference, kl)
        nats = np.where(mask, found, 0.0)
    coef, next_coef, measured = coefficients(kl, nats, mask, rollout.carried_coef)
    rewards = at_last_token(shaped, mask) - (coef * nats if kl["place"] == "reward" else 0.0)
    if tables["ppo"].get("whiten_rewards"):
        rewards = np.where(mask, rewards[mask].mean() + whitened(rewards, mask), 0.0)
    gae_keys = tables["ppo"]["advantages"]
    last = rollout.critic[rollout.tokens[np.arange(len(mask)), rollout.present.sum(1) - 1]]
    bootstrap = np.where(rollout.truncated & (truncated == "bootstrap"), last, 0.0)
    has_critic = gae_keys["kind"] in ("gae", "monte_carlo") or gae_keys.get("trains_critic", False)
    if gae_keys["kind"] in OF_RESPONSES and not has_critic:
        of_rows, more = response_advantages(tables, rollout, shaped - baselines, valid, mask)
        advantages, numbers = np.where(mask, of_rows[:, None], 0.0), numbers | more
    else:
        advantages, returns, lams = estimate_advantages(
            gae_keys, rewards, values, mask, np.where(valid, bootstrap, 0.0)
        )
    resample = tables["ppo"].get("resample", {"kind": "none"})
    whitens_last = resample.get("order") == "before_whitening"
    if whitens(gae_keys) and not whitens_last:
        advantages = whitened(advantages, mask)
    numbers |= truncation_metrics(truncated, rollout, bootstrap, valid) | {
        "scores": np.array([score or 0.0 for score in rollout.scores]),
        "shaped": shaped,
        **({} if by == "current" else {"logprobs": np.where(rollout.mask, old, 0.0)}),
        **({"entropy": np.where(rollout.mask, entropy, 0.0)} if by == "trainer" else {}),
        "token_rewards": rewards,
        "advantages": advantages,
        "mask": mask.astype(float),
        "next kl/coef": next_coef,
    }
    if gae_keys.get("length_adaptive_alpha"):
        numbers["advantage/lambda_mean"] = lams[mask.any(1)].mean()
    # Without a forward pass before the update, these metrics are computed in its first minibatch.
    assert by == "trainer" or resample["kind"] == "none", "the first minibatch is one of all rows"
    first = minibatches(tables, rollout, mask, role="actor")[0][0]
    seen = np.isin(np.arange(len(mask)), range(len(mask)) if by == "trainer" else first)[:, None]
    numbers |= of_rewards | mismatch_metrics(actor, rollout, rollout.mask & seen)
    if has_kl:
        numbers |= {} if kl["estimator"] == "full" else {"reference": np.where(rollout.mask, reference, 0.0)}
        # A sum over the vocabulary that only the loss reads is computed in the update, not before it.
        only_in_update = (kl["place"], kl["estimator"], kl["adaptive"]) == ("loss", "full", None)
        rows = first if only_in_update else range(len(mask))
        measured_tokens = mask & np.isin(np.arange(len(mask)), rows)[:, None]
        numbers["kl/reference_mean"], numbers["kl/clamped_frac"] = (
            nats[measured_tokens].mean(),
            clamped[measured_tokens].mean(),
        )
        numbers["kl/coef"] = coef
        numbers["kl/penalty_mean"] = coef * numbers["kl/reference_mean"]
        numbers |= {} if measured is None else {"kl/measured": measured}
    weights, kept, metrics = correct_mismatch(tables["ppo"], actor, rollout)
    numbers |= metrics
    if has_critic:
        numbers |= {"values": values, "returns": returns}
    if resample["kind"] != "none":
        chances = textbook_resampling.row_weights(resample, shaped, mask.any(1))
        rows = textbook_resampling.sampled_rows(chances, derived(tables["seed"], rollout.step, "resample"))
        numbers |= {"resampled": rows, "resample/effective_seqs": chances.sum() ** 2 / (chances**2).sum()}
        rollout = replace(rollout, **{name: getattr(rollout, name)[rows] for name in TextbookRollout.OF_ROWS})
        values, returns, mask, old, reference, advantages, weights, kept, entropy, seen = (
            grid[rows] for grid in (values, returns, mask, old, reference, advantages, weights, kept, entropy, seen)
        )
        valid, shaped = valid[rows], shaped[rows]
        advantages = whitened(advantages, mask) if whitens_last else advantages
        numbers["taken advantages"] = advantages
    has_head = has_critic and "on" in tables["critic"]
    if has_critic and not has_head:
        numbers |= critic_update(tables, rollout, values, returns, mask)
    with_coef = {**tables, "ppo": {**tables["ppo"], "kl": {**kl, "coef": coef}}}
    gains = (advantages, weights * advantages)
    explained = 1 - (returns - values)[mask].var() / returns[mask].var() if has_critic else 0.0
    numbers |= waiting(tables, rollout, explained)
    if numbers.get("policy/trained", 1.0):
        is_good = valid & (shaped > 0)
        numbers |= actor_update(
            with_coef,
            rollout,
            mask & kept,
            old=old,
            reference=reference,
            advantages=gains,
            is_good=is_good,
            head=(values, returns, mask) if has_head else None,
        )
        numbers["policy/entropy_mean"] = entropy[mask & kept & seen].mean()
    return {name: np.asarray(value, dtype=float) for name, value in numbers.items()}


def waiting(tables: Tables, rollout: TextbookRollout, explained: float) -> dict[str, Any]:
    """Return whether the policy trains and, if it waits for a critic that explains the returns, its unchanged numbers
    (value pretraining of VC-PPO, arXiv:2503.01491)."""
    until = tables["ppo"].get("critic_only_until")
    if until is None:
        return {}
    if rollout.step > until["at_most"] or explained >= until["explained_variance"]:
        return {"policy/trained": 1.0}
    return {"policy/trained": 0.0, "actor table": rollout.actor, "actor updates": rollout.updates["actor"]}


def truncation_metrics(truncated: str, rollout: TextbookRollout, bootstrap: Array, valid: Array) -> dict[str, Array]:
    """Return the numbers that a treatment of truncated responses adds."""
    if truncated == "bootstrap":
        return {"behind": bootstrap, "advantage/bootstrap_mean": bootstrap[valid].mean()}
    return {"advantage/filtered_frac": rollout.truncated[valid].mean()} if truncated == "filter" else {}


def whitens(keys: Tables) -> bool:
    """Return whether the estimator whitens advantages."""
    return bool(keys.get("whiten")) or keys["kind"] in textbook_groups.WHITENED


def whitened(numbers: Array, mask: Array) -> Array:
    """Return the numbers with mean 0 and variance 1 over the mask, and 0 elsewhere."""
    unmasked = numbers[mask]
    return np.where(mask, (numbers - unmasked.mean()) / np.sqrt(unmasked.var(ddof=1) + 1e-8), 0.0)


def scaled(score: float, scale: Mapping[str, Sequence[float]] | None) -> float:
    """Return the score clamped to `from` and mapped linearly to `to`."""
    if scale is None:
        return score
    (low, high), (to_low, to_high) = scale["from"], scale["to"]
    return to_low + (min(max(score, low), high) - low) * (to_high - to_low) / (high - low)


def shape_rewards(tables: Tables, rollout: TextbookRollout, valid: Array) -> tuple[Array, dict[str, Any]]:
    """Return each response's shaped reward, 0 without a score: scale, clip, moments, clip, unfinished, overlong,
    length."""
    keys, lengths, numbers = tables["reward"], rollout.mask.sum(1), {}
    scores = np.array([0.0 if score is None else score for score in rollout.scores])
    rewards = np.array([scaled(score, keys["scale"]) for score in scores])
    if keys["scale"]:
        low, high = keys["scale"]["from"]
        numbers["reward/clamped_frac"] = ((scores < low) | (scores > high))[valid].mean()
    clip, moments, overlong, per_length = (keys[name] for name in ("clip", "moments", "overlong", "length_penalty"))

    def clipped(place: str) -> Array:
        if not clip or clip["place"] != place:
            return rewards
        numbers["reward/clipped_frac"] = ((rewards < clip["low"]) | (rewards > clip["high"]))[valid].mean()
        return np.clip(rewards, clip["low"], clip["high"])

    rewards = clipped("before_moments")
    if moments["kind"] != "none":
        mean, std = rollout.carry["reference_mean"], moments.get("std") or rollout.carry["reference_std"]
        if moments["kind"] == "running":
            # Stand-ins for the earlier rewards: `count` numbers with their mean and sum of squared deviations.
            count, old, m2 = rollout.carry["count"], rollout.carry["mean"], rollout.carry["m2"]
            std_before = math.sqrt(m2 / count)
            all_of_them = [*[old - std_before, old + std_before] * (int(count) // 2), *rewards[valid]]
            mean, std = np.mean(all_of_them), np.std(all_of_them, ddof=1)
        rewards = (rewards - (mean if moments["center"] else 0.0)) / std
        numbers |= {"reward/moments_mean": mean, "reward/moments_std": std}
    rewards = clipped("after_moments")
    before, rewards = rewards, np.where(rollout.truncated, rewards * keys["unfinished_factor"], rewards)
    if keys["unfinished_factor"] != 1:
        numbers["reward/unfinished_mean"] = (rewards - before)[valid].mean()
    if overlong:
        end = overlong["max_tokens"] or tables["rollout"]["max_new_tokens"]
        over = [max(0.0, (length - end) / overlong["buffer_tokens"] + 1) for length in lengths]
        lost = overlong["penalty"] * np.array(
            [min(fraction, 1.0) if overlong["floor"] else fraction for fraction in over]
        )
        rewards, numbers["reward/overlong_mean"] = rewards - lost, -lost[valid].mean()
    if per_length:
        lost = per_length["per_token"] * np.maximum(lengths - per_length["free_tokens"], 0)
        rewards, numbers["reward/length_mean"] = rewards - lost, -lost[valid].mean()
    return np.where(valid, rewards, 0.0), numbers


def greedy_response(table: Array, token: int, end: int, sampling: Tables) -> tuple[list[int], str, bool]:
    """Return the tokens of a greedy response, its text before a stop string, and whether it is truncated."""
    tokens: list[int] = []
    while len(tokens) < sampling["max_new_tokens"]:
        tokens.append(int(np.argmax(table[tokens[-1] if tokens else token])))
        text = " ".join(map(str, tokens))
        for stop in sampling["stop_strings"]:
            if stop in text:
                return tokens, text.partition(stop)[0], False
        if tokens[-1] == end:
            return tokens, text, False
    return tokens, text, True


def greedy_baselines(tables: Tables, rollout: TextbookRollout) -> tuple[Array, Array, dict[str, Any]]:
    """Return, for each row, the shaped reward of the greedy response to its prompt, and whether there is one; and the
    metrics of greedy responses (Li et al. 2024, arXiv:2310.10505). The moments of rewards are not modelled."""
    greedy = rollout.greedy
    assert tables["reward"]["moments"]["kind"] == "none"
    valid = np.array([score is not None for score in greedy.scores])
    alone = replace(
        rollout, present=greedy.present, mask=greedy.present, scores=greedy.scores, truncated=greedy.truncated
    )
    shaped, _ = shape_rewards(tables, alone, valid)
    metrics = {
        "baseline/score_mean": np.mean([score for score in greedy.scores if score is not None]),
        "baseline/error_frac": 1 - valid.mean(),
        "baseline/tokens": greedy.present.sum(),
        "baseline/response_tokens_mean": greedy.present.sum(1).mean(),
        "baseline/truncated_frac": greedy.truncated.mean(),
    }
    return shaped[greedy.of_row], valid[greedy.of_row], metrics


def estimate_advantages(
    keys: Tables, rewards: Array, values: Array, mask: Array, bootstrap: Array
) -> tuple[Array, Array, Array]:
    """Return advantages, returns, and the policy's lambda of each row."""
    if keys["kind"] in ("monte_carlo", "raw_reward", "reinforce_plus_plus"):
        _, returns = gae(rewards, 0 * values, mask, keys["gamma"], np.ones(len(mask)), bootstrap)
        return returns, returns, np.ones(len(mask))
    if keys["kind"] == "python":  # rewards to go
        _, returns = gae(rewards, 0 * values, mask, 1.0, np.ones(len(mask)), bootstrap)
        return np.where(mask, returns - values, 0.0), returns, np.ones(len(mask))
    lams = np.full(len(mask), keys["gae_lambda"])
    if keys["length_adaptive_alpha"]:
        lams = np.array([1 - 1 / max(1, keys["length_adaptive_alpha"] * row_mask.sum()) for row_mask in mask])
    critics = keys["gae_lambda"] if keys["gae_lambda_value"] is None else keys["gae_lambda_value"]
    advantages, _ = gae(rewards, values, mask, keys["gamma"], lams, bootstrap)
    _, returns = gae(rewards, values, mask, keys["gamma"], np.full(len(mask), critics), bootstrap)
    return advantages, returns, lams


OF_RESPONSES = (*textbook_groups.KINDS, "remax", "python")
"""Kinds of advantages of which all tokens of a response have the same, if the function of the user says so."""


def response_advantages(
    tables: Tables, rollout: TextbookRollout, relative: Array, valid: Array, mask: Array
) -> tuple[Array, dict[str, Array]]:
    """Return the advantage of each response, and the numbers of its estimator. `relative` are the shaped rewards
    minus the baselines, if there are any."""
    keys, samples = tables["ppo"]["advantages"], tables["rollout"]["samples_per_prompt"]
    if keys["kind"] == "remax":
        return relative, {}
    if keys["kind"] == "python":
        return from_median(relative, valid, samples) * keys["options"]["scale"], {}
    scores, weights = [relative], [1.0]
    if keys["kind"] == "gdpo":
        weights = [part["weight"] for part in tables["reward"]["parts"].values()]
        scores = [rollout.components[name] for name in tables["reward"]["parts"]]
    of_rows, equal = textbook_groups.group_advantages(keys, scores, weights, valid, mask.sum(1), samples)
    return of_rows, {"advantage/equal_groups_frac": equal}


def from_median(scores: Array, valid: Array, samples: int) -> Array:
    """Return each score minus the lower median of the scored responses to the same prompt."""
    advantages = np.zeros(len(scores))
    for first in range(0, len(scores), samples):
        rows = range(first, first + samples)
        scored = sorted(scores[row] for row in rows if valid[row])
        advantages[rows] = scores[rows] - (scored[(len(scored) - 1) // 2] if scored else 0.0)
    return advantages


def token_outputs(table: Array, rollout: TextbookRollout, sampling: Tables) -> tuple[Array, Array]:
    """Return the log-prob of each response token, and the entropy of its sampling distribution; 0 if not present."""
    chosen, entropies = np.zeros(rollout.present.shape), np.zeros(rollout.present.shape)
    for place in zip(*np.nonzero(rollout.present), strict=True):
        logs = filtered_logprobs(table[rollout.before[place]], rollout.tokens[place], sampling)
        chosen[place], entropies[place] = logs[rollout.tokens[place]], -(np.exp(logs) * logs).sum()
    return chosen, entropies


def filtered_logprobs(logits: Array, token: int, sampling: Tables) -> Array:
    """Return log-probs of all ids after the sampler's filters; a removed id has probability 0, and its log-prob is
    arbitrary. The token was sampled, so it and all ids that are more likely were kept."""
    full = log_softmax(logits[None] / sampling["temperature"])[0]
    if not sampling["top_k"] and not sampling["min_p"] and sampling["top_p"] == 1:
        return full
    chances = np.exp(full)
    left = {id_ for id_ in range(len(chances)) if chances[id_] >= sampling["min_p"] * chances.max()}
    ordered = sorted(left, key=lambda id_: -chances[id_])[: sampling["top_k"] or None]
    of_all, nucleus, mass = sum(chances[id_] for id_ in ordered), [], 0.0
    for id_ in ordered:  # Holtzman et al. 2020: the smallest set whose mass is at least p
        nucleus.append(id_)
        mass += chances[id_]
        if mass >= sampling["top_p"] * of_all:
            break
    kept = np.isin(np.arange(len(chances)), nucleus) | (chances >= chances[token])
    return log_softmax(np.where(kept, logits / sampling["temperature"], -1e9)[None])[0]


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


def divergence(pi: Array, other: Array, kl: Tables) -> tuple[Array, Array]:
    """Return Schulman's estimators of KL(pi || other) from tokens of pi (http://joschu.net/blog/kl-approx.html), or
    |d|; and which of them a clamp changes."""
    bound, cap = kl["input_clamp"] or math.inf, kl["output_clamp"] or math.inf
    log_r = np.clip(other - pi, -bound, bound)
    formulas = {"k1": -log_r, "k2": log_r**2 / 2, "k3": np.exp(log_r) - 1 - log_r, "abs": np.abs(log_r)}
    nats = formulas[kl["estimator"]]
    return np.clip(nats, -cap, cap), (np.abs(other - pi) > bound) | (np.abs(nats) > cap)


def full_divergence(rollout: TextbookRollout, sampling: Tables, kl: Tables) -> tuple[Array, Array]:
    """Return KL(actor || reference) over all ids at each position, with the actor's sampling filters and an
    unfiltered reference; and which values the clamp changes."""
    found = np.zeros(rollout.present.shape)
    for place in zip(*np.nonzero(rollout.present), strict=True):
        state, token = rollout.before[place], rollout.tokens[place]
        found[place] = from_reference(
            filtered_logprobs(rollout.actor[state], token, sampling), rollout, state, sampling
        )[0]
    cap = kl["output_clamp"] or math.inf
    return np.minimum(found, cap), found > cap


def from_reference(logs: Array, rollout: TextbookRollout, state: int, sampling: Tables) -> tuple[float, Array]:
    """Return the KL of this distribution from the reference, and its gradient with respect to each logit at
    temperature 1: p_k (log p_k - log q_k - KL)."""
    apart = logs - log_softmax(rollout.reference[state][None] / sampling["temperature"])[0]
    kl = float((np.exp(logs) * apart).sum())
    return kl, np.exp(logs) * (apart - kl)


def loss_penalty(pi: float, other: float, old: float, kl: Tables) -> tuple[float, float]:
    """Return the KL penalty in the loss for one token, and its derivative with respect to the log-prob of pi. It is
    the derivative of clip(weight x estimate(d)): 0 if either clamp is active."""
    log_r, cap = other - pi, kl["output_clamp"] or math.inf
    nats = float(divergence(np.array(pi), np.array(other), {**kl, "output_clamp": None})[0])
    if kl["gradient"] == "k2":  # the value with clamps, and the derivative of log_r^2 / 2
        return min(max(nats, -cap), cap), -log_r
    weight = math.exp(pi - old) if kl["gradient"] == "importance" else 1.0
    value = min(max(weight * nats, -cap), cap)
    if abs(log_r) > (kl["input_clamp"] or math.inf) or abs(weight * nats) > cap:
        return value, 0.0
    slope = {"k1": 1.0, "k2": -log_r, "k3": 1 - math.exp(log_r), "abs": -math.copysign(1.0, log_r)}[kl["estimator"]]
    # d (weight x nats) = weight x (d nats + nats) if the weight has a derivative, which equals the weight itself.
    return value, weight * (slope + (0.0 if kl["gradient"] == "estimator" else nats))


def coefficients(kl: Tables, nats: Array, mask: Array, carried: float) -> tuple[float, float, float | None]:
    """Return the coefficient of this step, that of the next, and the measured KL that is compared with the target
    (Ziegler et al. 2019, section 2.2)."""
    if kl["place"] == "none":
        return 0.0, 0.0, None
    adaptive = kl["adaptive"]
    if adaptive is None:
        return kl["coef"], kl["coef"], None
    rows = [nats[row][row_mask] for row, row_mask in enumerate(mask) if row_mask.any()]
    if "target_per_token" in adaptive:
        target, measured = adaptive["target_per_token"], float(np.mean([row.mean() for row in rows]))
    else:
        target, measured = adaptive["target_per_sequence"], float(np.mean([row.sum() for row in rows]))
    error = min(max(measured / target - 1, -0.2), 0.2)
    return carried, carried * (1 + error * len(mask) / adaptive["horizon_seqs"]), measured


def at_last_token(scores: Array, mask: Array) -> Array:
    grid = np.zeros(mask.shape)
    for row, row_mask in enumerate(mask):
        if row_mask.any():
            grid[row, np.flatnonzero(row_mask)[-1]] = scores[row]
    return grid


def gae(
    rewards: Array, values: Array, mask: Array, gamma: float, lams: Array, bootstrap: Array
) -> tuple[Array, Array]:
    """Return advantages and returns by Schulman et al. 2016, equation 16, from the last unmasked token backwards;
    holes are skipped. `bootstrap` is the value after the last token, 0 if the response has ended."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for row, row_mask in enumerate(mask):
        next_value, next_advantage = bootstrap[row], 0.0
        for column in reversed(np.flatnonzero(row_mask)):
            delta = rewards[row, column] + gamma * next_value - values[row, column]
            next_advantage = delta + gamma * lams[row] * next_advantage
            next_value = values[row, column]
            advantages[row, column] = next_advantage
            returns[row, column] = next_advantage + next_value
    return advantages, returns


def critic_update(
    tables: Tables, rollout: TextbookRollout, old: Array, returns: Array, mask: Array
) -> dict[str, Any]:
    """Update the critic with Schulman's PPO2 loss: half of the larger of the two squared errors, averaged over
    tokens."""
    learned, last_seen = Learned(rollout.critic.copy(), np.zeros((2, *rollout.critic.shape))), old.copy()
    for rows, lr in minibatches(tables, rollout, mask, role="critic"):
        loss, gradient, seen, _ = value_loss(tables, rollout, learned.table, old, returns, mask, rows)
        places = [(row, column) for row in rows for column in np.flatnonzero(mask[row])]
        for place in places:
            last_seen[place] = seen[place]
        learned.note(value_mean=float(np.mean([seen[place] for place in places])))
        learned.note(value_error=float(np.mean([abs(seen[place] - returns[place]) for place in places])))
        adamw(learned, gradient, tables["critic"]["optimizer"], lr=lr, loss=loss)
    numbers = update_metrics("critic", "value", learned, rollout)
    return numbers | value_metrics(old, returns, last_seen, mask)


def value_loss(
    tables: Tables,
    rollout: TextbookRollout,
    table: Array,
    old: Array,
    returns: Array,
    mask: Array,
    rows: Sequence[int],
) -> tuple[float, Array, Array, float]:
    """Return the loss of a minibatch, its gradient for the table of values, the values, and the fraction of tokens
    whose clipped error is the larger one."""
    keys = tables["ppo"]["value_loss"]
    clip, scale = keys["clip"], keys["scale"]
    loss, gradient, seen = 0.0, np.zeros_like(table), np.zeros(mask.shape)
    fractions = token_fractions(keys.get("aggregation", "token_mean"), mask[rows].sum(1), rows, tables)
    is_clipped = []
    places = [(row, column) for row in rows for column in np.flatnonzero(mask[row])]
    for row, column in places:
        value, goal = table[rollout.before[row, column]], returns[row, column]
        seen[row, column] = value
        bounded = value if clip is None else min(max(value, old[row, column] - clip), old[row, column] + clip)
        plain, clipped = (value - goal) ** 2, (bounded - goal) ** 2
        loss += scale * fractions[row] * max(plain, clipped) / 2
        if plain >= clipped:
            gradient[rollout.before[row, column]] += scale * fractions[row] * (value - goal)
        is_clipped.append(clipped > plain)
    return loss, gradient, seen, float(np.mean(is_clipped))


def value_metrics(old: Array, returns: Array, last_seen: Array, mask: Array) -> dict[str, Any]:
    """Return the metrics of all values of a step: `old` before the update, `last_seen` in its last epoch."""
    numbers: dict[str, Any] = {}
    target, unexplained = returns[mask], (returns - old)[mask]
    numbers["value/explained_variance"] = 1 - unexplained.var() / target.var()
    numbers["value/explained_variance_last_epoch"] = 1 - (returns - last_seen)[mask].var() / target.var()
    numbers["value/value_mean"], numbers["value/return_mean"] = old[mask].mean(), target.mean()
    numbers["value/return_std"] = target.std(ddof=1)
    numbers["value/value_error"] = np.abs(unexplained).mean()
    return numbers


def token_fractions(kind: str, counts: Array, rows: Sequence[int], tables: Tables) -> dict[int, float]:
    """Return the weight of a token of each row in the mean over a minibatch whose rows have `counts` unmasked
    tokens."""
    if kind == "token_mean":
        return dict.fromkeys(rows, 1 / counts.sum())
    sequences = np.count_nonzero(counts)
    longest = tables["rollout"]["max_new_tokens"] if kind == "fixed_length" else 1
    lengths = counts if kind == "sequence_mean_token_mean" else np.full(len(rows), longest)
    return {row: 1 / sequences / max(size, 1) for row, size in zip(rows, lengths, strict=True)}


def correct_mismatch(ppo: Tables, old: Array, rollout: TextbookRollout) -> tuple[Array, Array, dict[str, Any]]:
    """Return token weights, kept tokens, and the metrics of the correction. Ratios are trainer / sampler."""
    keys, rejection, gap = ppo["rollout_correction"], ppo["rollout_rejection"], ppo["max_sequence_gap"]
    kind, ones = keys["kind"], np.ones(rollout.mask.shape)
    rejects = kind == "sequence_mask" or rejection["kind"] != "none" or gap is not None
    if kind == "none" and not rejects:
        return ones, rollout.mask, {}
    weights, outside, kept = np.zeros_like(ones), np.zeros_like(rollout.mask), rollout.mask.copy()
    for row, row_mask in enumerate(rollout.mask):
        if not row_mask.any():
            continue
        log_r = (old - rollout.sampler)[row][row_mask]
        weights[row][row_mask], outside[row][row_mask] = token_weights(keys, log_r)
        passes = np.ones(len(log_r), dtype=bool)
        if kind == "sequence_mask":
            passes &= keys["min_ratio"] <= math.exp(log_r.mean()) <= keys["max_ratio"]
        if rejection["kind"] != "none":
            passes &= passes_rejection(rejection, log_r)
        if gap is not None:
            passes &= np.exp(np.abs(log_r)).mean() <= gap
        kept[row][row_mask] = passes
    if kind != "none" and keys["normalize"]:
        by_sequence = [weights[row][row_mask].mean() for row, row_mask in enumerate(rollout.mask) if row_mask.any()]
        means = {
            "kept_tokens": weights[kept].mean(),
            "tokens": weights[rollout.mask].mean(),
            "sequences": np.mean(by_sequence),
        }
        weights = weights / means[keys.get("normalize_over", "kept_tokens")]
    weights = np.where(kept, weights, 0.0)
    numbers = {"weights": weights, "kept": kept.astype(float), "correction/weight_mean": weights[kept].mean()}
    if kind in ("tis", "tis_sequence", "icepop", "icepop_sequence"):
        numbers["correction/capped_frac"] = outside[kept].mean()
    if rejects:
        numbers["correction/rejected_frac"] = 1 - kept.sum() / rollout.mask.sum()
        numbers["correction/dropped_seqs"] = (rollout.mask.any(1) & ~kept.any(1)).sum()
    return weights, kept, numbers


def token_weights(keys: Tables, log_r: Array) -> tuple[Array, Array]:
    """Return the weights of a sequence's tokens, and which ratios are outside the bounds."""
    ratio, kind = np.exp(log_r), keys["kind"]
    if kind == "none":
        return np.ones_like(ratio), ratio < 0
    if kind == "sequence_mask":
        return ratio, ratio < 0
    if kind.endswith("_sequence"):
        ratio = np.full_like(ratio, math.prod(ratio))
    outside = (ratio < keys["min_ratio"]) | (ratio > keys["max_ratio"])
    if kind.startswith("icepop"):
        return np.where(outside, 0.0, ratio), outside
    return np.clip(ratio, keys["min_ratio"], keys["max_ratio"]), outside


def passes_rejection(rejection: Tables, log_r: Array) -> Array | bool:
    """Return whether tokens of a sequence are kept: one value per token, or one for all."""
    ratio, level = np.exp(log_r), rejection["level"]
    if rejection["statistic"] == "k1":
        low, high = rejection["min_ratio"] or 0.0, rejection["max_ratio"] or math.inf
        ratio = {"sequence_sum": math.prod(ratio), "sequence_mean": math.prod(ratio) ** (1 / len(ratio))}.get(
            level, ratio
        )
        inside = (low <= ratio) & (ratio <= high)
    else:
        nats = log_r**2 / 2 if rejection["statistic"] == "k2" else ratio - 1 - log_r
        nats = {"sequence_sum": nats.sum(), "sequence_mean": nats.mean()}.get(level, nats)
        inside = nats <= rejection["max"]
    return bool(np.all(inside)) if level == "sequence_max" else inside


def actor_update(
    tables: Tables,
    rollout: TextbookRollout,
    mask: Array,
    *,
    old: Array,
    reference: Array,
    advantages: tuple[Array, Array],
    is_good: Array,
    head: tuple[Array, Array, Array] | None = None,
) -> dict[str, Any]:
    """Update the actor with a loss of `textbook_losses`, an entropy bonus, KL to the reference, and VAPO's NLL of
    good responses. `advantages` are given without and with their correction weights. `head` has old values, returns
    and their mask, if the joint loss trains a value head too (Schulman et al. 2017, eq. 9)."""
    ppo, sampling = tables["ppo"], tables["rollout"]
    temperature = sampling["temperature"]
    keys, penalty, (plain_advantages, gains) = ppo["policy_loss"], ppo["kl"], advantages
    table = rollout.actor if head is None else np.hstack([rollout.actor, rollout.critic[:, None]])
    learned, size = Learned(table.copy(), np.zeros((2, *table.shape))), len(rollout.actor)
    parts: dict[str, list[float]] = {}
    last_seen, clipped = (None if head is None else head[0].copy()), []
    clamped: list[Array] = []
    for rows, lr in minibatches(tables, rollout, mask if head is None else head[2], role="actor"):
        part, whole = dict.fromkeys(("surrogate", "entropy", "kl", "nll", "value"), 0.0), np.zeros_like(table)
        gradient, logits = whole[:, :size], learned.table[:, :size]
        now, _ = token_outputs(logits, rollout, sampling)
        was = now.copy() if ppo["old_logprobs"] == "current" else old
        surrogates, slopes, ratios = np.zeros((3, *mask.shape))
        for row in (row for row in rows if mask[row].any()):
            at = row, mask[row]
            surrogates[at], slopes[at], ratios[at] = textbook_losses.response_loss(keys, now[at], was[at], gains[at])
        places = [(row, column) for row in rows for column in np.flatnonzero(mask[row])]
        fractions = token_fractions(keys["aggregation"], mask[rows].sum(1), rows, tables) if places else {}
        good_tokens = mask[rows].sum(1) @ is_good[rows]
        for row, column in places:
            state, token = rollout.before[row, column], rollout.tokens[row, column]
            logs = filtered_logprobs(logits[state], token, sampling)
            fraction, chances = fractions[row], np.exp(logs)
            log_prob = logs[token]
            surrogate, slope = surrogates[row, column], slopes[row, column]
            if penalty["place"] == "loss" and penalty["estimator"] == "full":
                bound = penalty["output_clamp"] or math.inf
                kl, steep_by_logit = from_reference(logs, rollout, state, sampling)
                part["kl"] += fraction * penalty["coef"] * min(kl, bound)
                gradient[state] += fraction * penalty["coef"] * steep_by_logit * (kl <= bound) / temperature
            elif penalty["place"] == "loss":
                nats, steep = loss_penalty(log_prob, reference[row, column], was[row, column], penalty)
                part["kl"] += fraction * penalty["coef"] * nats
                slope += penalty["coef"] * steep
            entropy = -(chances * logs).sum()
            part["surrogate"] += fraction * surrogate
            part["entropy"] -= fraction * keys["entropy_coef"] * entropy
            nll = keys["positive_nll_coef"] / good_tokens if is_good[row] else 0.0
            part["nll"] -= nll * log_prob
            one_hot = np.eye(len(chances))[token]
            gradient[state] += (fraction * slope - nll) * (one_hot - chances) / temperature
            # d entropy / d logit k = -p_k (log p_k + entropy)
            gradient[state] += fraction * keys["entropy_coef"] * chances * (logs + entropy) / temperature
        unmasked = mask & np.isin(np.arange(len(mask)), rows)[:, None]
        if places:
            learned.note(**textbook_losses.clip_metrics(keys, ratios[unmasked], plain_advantages[unmasked]))
            learned.note(**ratio_metrics(ratios[unmasked], (now - was)[unmasked]))
            clamped.append(ratios[unmasked])
        if head is not None:
            coef = ppo["value_loss"]["coef"]
            loss, of_values, seen, share = value_loss(tables, rollout, learned.table[:, size], *head, rows)
            part["value"], whole[:, size] = coef * loss, coef * of_values
            in_rows = head[2] & np.isin(np.arange(len(mask)), rows)[:, None]
            last_seen = np.where(in_rows, seen, last_seen)
            clipped.append(share)
        adamw(learned, whole, tables["actor"]["optimizer"], lr=lr, loss=sum(part.values()))
        for name, fraction in part.items():
            parts.setdefault(name, []).append(fraction)
    is_there = {
        "surrogate": True,
        "entropy": keys["entropy_coef"] > 0,
        "kl": penalty["place"] == "loss",
        "nll": keys["positive_nll_coef"] > 0,
        "value": head is not None,
    }
    of_terms = {f"policy/{name}_loss": np.mean(fractions) for name, fractions in parts.items() if is_there[name]}
    of_nll = {"policy/nll_tokens": (mask & is_good[:, None]).sum()} if is_there["nll"] else {}
    numbers = update_metrics("actor", "policy", learned, rollout) | of_terms | of_nll
    numbers |= textbook_losses.clamped_metrics(keys, np.concatenate(clamped))
    if head is None or last_seen is None:
        return numbers
    numbers["value/loss"] = np.mean(parts["value"]) / ppo["value_loss"]["coef"]
    numbers["value/clip_frac"] = np.mean(clipped)
    return numbers | value_metrics(head[0], head[1], last_seen, head[2])


def ratio_metrics(ratio: Array, log_r: Array) -> dict[str, float]:
    """Return how far a minibatch's ratios are from 1."""
    ordered = np.sort(ratio)

    def rank(fraction: float) -> float:
        return float(ordered[round(fraction * (len(ordered) - 1))])

    return {
        "approx_kl": (np.exp(log_r) - 1 - log_r).mean(),
        "ratio_mean": ratio.mean(),
        "ratio_p01": rank(0.01),
        "ratio_p50": rank(0.5),
        "ratio_p99": rank(0.99),
        "ratio_max": ordered[-1],
    }


def minibatches(tables: Tables, rollout: TextbookRollout, mask: Array, *, role: str) -> list[tuple[list[int], float]]:
    """Return (rows, learning rate) of each optimizer step; a minibatch without an unmasked token is skipped."""
    ppo, optimizer = tables["ppo"], tables[role]["optimizer"]
    epochs = ppo["epochs"] if role == "actor" or ppo["critic_epochs"] is None else ppo["critic_epochs"]
    own = ppo.get("critic_minibatch_seqs") if role == "critic" else None
    size, num_rows = own or ppo["minibatch_seqs"], len(mask)
    waits = ppo["critic_only_steps"] if role == "actor" else 0
    # A tick is one optimizer step, or all optimizer steps of a PPO step.
    by_step = optimizer.get("lr_ticks", "update") == "step"
    per_tick = epochs * (num_rows // size) if by_step else 1
    planned = (tables["steps"] - waits) * epochs * (num_rows // size)
    found: list[tuple[list[int], float]] = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(derived(tables["seed"], rollout.step, role, epoch))
        order = torch.randperm(num_rows, generator=generator).tolist()
        if ppo.get("minibatch_order", "shuffled") == "in_order":
            order = list(range(num_rows))
        for start in range(0, num_rows, size):
            rows = order[start : start + size]
            if mask[rows].any():
                tick = rollout.step - 1 - waits if by_step else rollout.updates[role] + len(found)
                found.append((rows, rate(optimizer, tick, planned, per_tick)))
    return found


def rate(keys: Tables, tick: int, planned: int, per_tick: int) -> float:
    """Return the learning rate: linear warm-up whose first tick is not 0, or starts at `lr_warmup_init_frac`; then
    constant, linear or half a cosine down to the floor."""
    peak, floor, first = keys["lr"], keys["lr_min_frac"], keys.get("lr_warmup_init_frac")
    fraction = keys.get("lr_warmup_frac")
    warmup = keys["lr_warmup_updates"] // per_tick if fraction is None else round(fraction * planned / per_tick)
    if tick < warmup:
        return float(peak * ((tick + 1) / warmup if first is None else first + (1 - first) * tick / warmup))
    end = (keys["lr_decay_updates"] or planned) // per_tick
    done = min((tick - warmup) / (end - warmup), 1.0)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[keys["lr_schedule"]]
    return float(peak * (floor + (1 - floor) * shape) if keys["lr_schedule"] != "constant" else peak)


def adamw(learned: Learned, gradient: Array, keys: Tables, *, lr: float, loss: float) -> None:
    """Apply AdamW (Loshchilov and Hutter 2019, algorithm 2) after clipping the global gradient norm."""
    norm = float(np.sqrt((gradient**2).sum()))
    if keys["grad_clip"] and norm > keys["grad_clip"]:
        gradient = gradient * keys["grad_clip"] / norm
    learned.count += 1
    learned.moments[0] = keys["beta1"] * learned.moments[0] + (1 - keys["beta1"]) * gradient
    learned.moments[1] = keys["beta2"] * learned.moments[1] + (1 - keys["beta2"]) * gradient**2
    mean = learned.moments[0] / (1 - keys["beta1"] ** learned.count)
    std_before = learned.moments[1] / (1 - keys["beta2"] ** learned.count)
    decayed = learned.table - lr * keys["weight_decay"] * learned.table
    learned.table = decayed - lr * mean / (np.sqrt(std_before) + keys["eps"])
    learned.note(loss=loss, grad_norm=norm, lr=lr)


def update_metrics(role: str, prefix: str, learned: Learned, rollout: TextbookRollout) -> dict[str, Any]:
    """Return an update's numbers: one per optimizer step; and over the steps the mean, the last rate, or the largest
    extreme."""
    numbers: dict[str, Any] = {
        f"{role} table": learned.table,
        f"{role} updates": rollout.updates[role] + learned.count,
    }
    for name, column in learned.columns.items():
        numbers[f"{prefix} minibatches {name}"] = column
        over = column[-1] if name == "lr" else max(column) if name == "ratio_max" else float(np.mean(column))
        numbers[f"{prefix}/{name}"] = over
    return numbers


def reward_metrics(scores: Sequence[float | None], shaped: Array, valid: Array) -> dict[str, Any]:
    scored = np.array([score for score in scores if score is not None])
    return {
        "reward/score_mean": scored.mean(),
        "reward/score_std": scored.std(),
        "reward/shaped_mean": shaped[valid].mean(),
    }


def mismatch_metrics(actor: Array, rollout: TextbookRollout, unmasked: Array) -> dict[str, Any]:
    """Compare trainer and sampler over the unmasked tokens; the effective sample size is Kish's."""
    gap = (actor - rollout.sampler)[unmasked]
    weights = np.exp(gap)
    rows = [row for row in range(len(unmasked)) if unmasked[row].any()]
    by_sequence = [np.exp(np.abs((actor - rollout.sampler)[row][unmasked[row]])).mean() for row in rows]
    return {
        "mismatch/gap_mean_abs": np.abs(gap).mean(),
        "mismatch/gap_max_abs": np.abs(gap).max(),
        "mismatch/gap_k3": (np.exp(gap) - 1 - gap).mean(),
        "mismatch/ess_frac": weights.sum() ** 2 / (len(weights) * (weights**2).sum()),
        "mismatch/sequence_gap_mean": np.mean(by_sequence),
        "mismatch/sequence_gap_max": max(by_sequence),
    }
