"""The recipe's arithmetic of rewards -> its steps, in the one order that they have."""

from collections.abc import Iterator

from ppoctl.rewards.arithmetic import ReferenceMoments, RewardArithmetic, RunningMoments
from ppoctl.stages.shaping import Clip, Length, Overlong, Reference, RewardStep, Running, Scale, Unfinished


def reward_steps(table: RewardArithmetic, *, max_new_tokens: int) -> tuple[RewardStep, ...]:
    """The steps that the table asks for, for responses of at most so many tokens."""
    return tuple(_steps(table, max_new_tokens))


def _steps(table: RewardArithmetic, max_new_tokens: int) -> Iterator[RewardStep]:
    if table.scale is not None:
        yield Scale(table.scale.from_, table.scale.to)
    if table.clip is not None and table.clip.place == "before_moments":
        yield Clip(table.clip.low, table.clip.high)
    if isinstance(table.moments, RunningMoments):
        yield Running(table.moments.center)
    elif isinstance(table.moments, ReferenceMoments):
        yield Reference(table.moments.std, table.moments.center)
    if table.clip is not None and table.clip.place == "after_moments":
        yield Clip(table.clip.low, table.clip.high)
    if table.unfinished_factor != 1:
        yield Unfinished(table.unfinished_factor)
    if (overlong := table.overlong) is not None:
        length = overlong.max_tokens or max_new_tokens
        yield Overlong(length, overlong.buffer_tokens, overlong.penalty, overlong.floor)
    if table.length_penalty is not None:
        yield Length(table.length_penalty.per_token, table.length_penalty.free_tokens)
