"""Tables that `[reward]` accepts: each scorer with reward shaping, and the kinds that combine several scorers."""

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from ppoctl.rewards.choose_reward import ChooseReward
from ppoctl.rewards.reward_kinds import SCORERS, scorer_table
from ppoctl.rewards.scorer_table import RewardTable
from ppoctl.rewards.sum import SumReward

KINDS: tuple[type[RewardTable], ...] = (
    *(scorer_table(scorer, RewardTable, "Reward") for scorer in SCORERS),
    SumReward,
    ChooseReward,
)

if TYPE_CHECKING:
    Reward = RewardTable
else:
    Reward = Annotated[Union[KINDS], Field(discriminator="kind")]  # noqa: UP007 - members are known at run time
