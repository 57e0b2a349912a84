"""The actor's losses from the papers, one response at a time, with gradients derived by hand."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def response_loss(keys: Mapping[str, Any], new: Array, old: Array, gains: Array) -> tuple[Array, Array, Array]:
    """Return the loss of each unmasked token, its derivative with respect to the log-prob (each token with weight 1),
    and the ratio that is clipped."""
    ratios = np.exp(new - old)
    if keys["kind"] == "reinforce":  # Williams 1992
        return -gains * new, -gains, ratios
    if keys["kind"] == "cispo":  # arXiv:2506.13585, eq. 4
        weights = np.array([min(max(ratio, 1 - keys["clip_low"]), 1 + keys["clip_high"]) for ratio in ratios])
        return -gains * weights * new, -gains * weights, ratios
    if keys["kind"] == "python":  # the SAPO of docs/your-own-loss.md, arXiv:2511.20347
        taus = np.where(gains > 0, keys["options"]["tau_pos"], keys["options"]["tau_neg"])
        gates = 1 / (1 + np.exp(-taus * (ratios - 1)))
        # d gate / d log-ratio = tau gate (1 - gate) ratio
        return -gains * gates * 4 / taus, -gains * 4 * gates * (1 - gates) * ratios, ratios
    if keys["kind"] == "gspo":  # arXiv:2507.18071, eq. 7
        ratios = np.full(len(new), math.exp(sum(new - old) / len(new)))
    found = [_clipped(keys, ratio, gain) for ratio, gain in zip(ratios, gains, strict=True)]
    losses, slopes = (np.array(column) for column in zip(*found, strict=True))
    if keys["kind"] == "gspo" and keys["ratio_gradient"] == "sequence":
        slopes = np.full(len(new), slopes.sum() / len(new))  # d s / d log-prob = s / n
    return losses, slopes, ratios


def _clipped(keys: Mapping[str, Any], ratio: float, gain: float) -> tuple[float, float]:
    """Return the loss and its derivative with respect to the log of the ratio (Schulman et al. 2017, eq. 7; Ye et al.
    2020)."""
    plain, clipped = -gain * ratio, -gain * min(max(ratio, 1 - keys["clip_low"]), 1 + keys["clip_high"])
    loss, slope = (plain, plain) if plain >= clipped else (clipped, 0.0)
    dual = keys.get("dual_clip") or math.inf
    return (-gain * dual, 0.0) if gain < 0 and loss > -gain * dual else (loss, slope)


def clamped_metrics(keys: Mapping[str, Any], ratios: Array) -> dict[str, float]:
    """Return the extremes of all ratios of a step within the clip range."""
    if keys["kind"] in ("reinforce", "python"):
        return {}
    clamped = [min(max(ratio, 1 - keys["clip_low"]), 1 + keys["clip_high"]) for ratio in ratios]
    return {"policy/clamped_ratio_min": min(clamped), "policy/clamped_ratio_max": max(clamped)}


def clip_metrics(keys: Mapping[str, Any], ratios: Array, advantages: Array) -> dict[str, float]:
    """Return the fractions of clipped tokens."""
    if keys["kind"] in ("reinforce", "python"):
        return {}
    above, below = ratios > 1 + keys["clip_high"], ratios < 1 - keys["clip_low"]
    if keys["kind"] != "cispo":
        above, below = above & (advantages > 0), below & (advantages < 0)
    metrics = {"clip_frac_high": above.mean(), "clip_frac_low": below.mean(), "clip_frac": (above | below).mean()}
    if keys["kind"] == "clip":
        dual = (advantages < 0) & (ratios > (keys["dual_clip"] or math.inf))
        metrics["dual_clip_frac"] = dual.mean()
    return {name: float(fraction) for name, fraction in metrics.items()}
