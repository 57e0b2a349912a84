"""Description of reward shaping: each shaping step with its settings, in the order in which the steps are applied."""

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
    "bootstrap": "continue with the critic's value",
    "filter": "are left out of all losses",
}


def reward_steps(recipe: Recipe) -> Mapping[str, str]:
    """Return shaping step -> description. The last entry describes how truncated responses are used."""
    steps = dict(_words(step, recipe.rollout.max_new_tokens) for step in steps_of(recipe.reward))
    return steps | {"truncated": f"responses {TRUNCATED[recipe.ppo.truncated]}"}


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
            return "moments", _divided(step.center, "of the first step whose rewards are not all equal", step.std)
        case OverlongPenalty():
            end, beyond = step.max_tokens or longest, "and no lower beyond" if step.floor else "and lower beyond"
            start = end - step.buffer_tokens
            return "overlong", f"lower from {start} tokens on, {-step.penalty:g} at {end}, {beyond}"
        case LengthPenalty():
            return "length", f"{-step.per_token:g} for each token beyond {step.free_tokens}"
        case factor:
            return "unfinished", f"truncated responses x {factor:g}"


def _divided(center: bool, of: str, std: float | None) -> str:  # noqa: FBT001 - the value of a key
    minus = f"minus the mean {of}, " if center else ""
    return f"{minus}divided by {f'{std:g}' if std else f'the standard deviation {of}'}"
