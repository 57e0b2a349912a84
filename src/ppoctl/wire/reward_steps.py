"""Construction of the reward shaping steps from the recipe's table."""

from ppoctl.rewards.shaping import (
    LengthPenalty,
    OverlongPenalty,
    ReferenceMoments,
    RewardClip,
    RewardScale,
    RewardShaping,
    RunningMoments,
    ShapingTable,
    steps_of,
)
from ppoctl.stages.shaping import (
    ApplyClip,
    ApplyScale,
    NormalizeByReferenceStd,
    NormalizeByRunningStd,
    PenalizeLength,
    PenalizeOverlong,
    ScaleTruncated,
    ShapingStep,
)


def reward_steps(table: RewardShaping, *, max_new_tokens: int) -> tuple[ShapingStep, ...]:
    """Return the shaping steps of the table, for responses of at most `max_new_tokens` tokens."""
    return tuple(_step(step, max_new_tokens) for step in steps_of(table))


def _step(step: ShapingTable, max_new_tokens: int) -> ShapingStep:
    match step:
        case RewardScale():
            return ApplyScale(step.from_, step.to)
        case RewardClip():
            return ApplyClip(step.low, step.high)
        case RunningMoments():
            return NormalizeByRunningStd(step.center)
        case ReferenceMoments():
            return NormalizeByReferenceStd(step.std, step.center)
        case OverlongPenalty():
            length = step.max_tokens or max_new_tokens
            return PenalizeOverlong(length, step.buffer_tokens, step.penalty, step.floor)
        case LengthPenalty():
            return PenalizeLength(step.per_token, step.free_tokens)
        case factor:
            return ScaleTruncated(factor)
