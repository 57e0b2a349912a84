"""The recipe's arithmetic of rewards -> its steps."""

from ppoctl.rewards.arithmetic import (
    LengthPenalty,
    OverlongPenalty,
    ReferenceMoments,
    RewardArithmetic,
    RewardClip,
    RewardScale,
    RunningMoments,
    Step,
    steps_of,
)
from ppoctl.stages.shaping import Clip, Length, Overlong, Reference, RewardStep, Running, Scale, Unfinished


def reward_steps(table: RewardArithmetic, *, max_new_tokens: int) -> tuple[RewardStep, ...]:
    """The steps that the table asks for, for responses of at most so many tokens."""
    return tuple(_step(step, max_new_tokens) for step in steps_of(table))


def _step(step: Step, max_new_tokens: int) -> RewardStep:
    match step:
        case RewardScale():
            return Scale(step.from_, step.to)
        case RewardClip():
            return Clip(step.low, step.high)
        case RunningMoments():
            return Running(step.center)
        case ReferenceMoments():
            return Reference(step.std, step.center)
        case OverlongPenalty():
            length = step.max_tokens or max_new_tokens
            return Overlong(length, step.buffer_tokens, step.penalty, step.floor)
        case LengthPenalty():
            return Length(step.per_token, step.free_tokens)
        case factor:
            return Unfinished(factor)
