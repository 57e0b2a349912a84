"""The arithmetic of rewards in words: each step with its numbers, in the order in which they are taken."""

from collections.abc import Mapping

from ppoctl.recipe.schema import Recipe
from ppoctl.rewards.shaping import (
    LengthPenalty,
    OverlongPenalty,
    ReferenceMoments,
    RewardClip,
    RewardScale,
    RunningMoments,
    ShapingTable,
    steps_of,
)

TRUNCATED = {
    "terminal": "count as finished",
    "bootstrap": "go on with the critic's value",
    "filter": "count in no loss",
}


def reward_steps(recipe: Recipe) -> Mapping[str, str]:
    """Name of each step -> what it does; the last says how truncated responses count."""
    told = dict(_words(step, recipe.rollout.max_new_tokens) for step in steps_of(recipe.reward))
    return told | {"truncated": f"responses {TRUNCATED[recipe.ppo.truncated]}"}


def _words(step: ShapingTable, longest: int) -> tuple[str, str]:
    match step:
        case RewardScale():
            (low, high), (to_low, to_high) = step.from_, step.to
            return "scale", f"{low:g} .. {high:g} becomes {to_low:g} .. {to_high:g}"
        case RewardClip():
            return "clip", f"to {step.low:g} .. {step.high:g}"
        case RunningMoments():
            return "moments", _divided(step.center, "of the run so far", None)
        case ReferenceMoments():
            return "moments", _divided(step.center, "of the first step whose rewards differ", step.std)
        case OverlongPenalty():
            end, beyond = step.max_tokens or longest, "no less beyond" if step.floor else "and less beyond"
            start = end - step.buffer_tokens
            return "overlong", f"from {start} tokens on less, {-step.penalty:g} at {end}, {beyond}"
        case LengthPenalty():
            return "length", f"{-step.per_token:g} for each token beyond {step.free_tokens}"
        case factor:
            return "unfinished", f"truncated responses x {factor:g}"


def _divided(center: bool, of: str, std: float | None) -> str:  # noqa: FBT001 - a key's value
    minus = f"minus the mean {of}, " if center else ""
    return f"{minus}divided by {f'{std:g}' if std else f'the standard deviation {of}'}"
