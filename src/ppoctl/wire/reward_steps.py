"""The recipe's arithmetic of rewards -> its steps, in the one order that they have."""

from collections.abc import Iterator

from ppoctl.rewards.arithmetic import RewardArithmetic
from ppoctl.stages.shaping import RewardStep, Scale


def reward_steps(table: RewardArithmetic) -> tuple[RewardStep, ...]:
    """The steps that the table asks for."""
    return tuple(_steps(table))


def _steps(table: RewardArithmetic) -> Iterator[RewardStep]:
    if table.scale is not None:
        yield Scale(table.scale.from_, table.scale.to)
