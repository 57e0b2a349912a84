"""Tables that `[reward]` accepts: each scorer with reward shaping, and the kinds that combine several scorers."""

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from ppoctl.rewards.choose import ChooseReward
from ppoctl.rewards.kinds import SCORERS, scorer_table
from ppoctl.rewards.sum import SumReward
from ppoctl.rewards.table import RewardTable

KINDS: tuple[type[RewardTable], ...] = (
    *(scorer_table(scorer, RewardTable, "Reward") for scorer in SCORERS),
    SumReward,
    ChooseReward,
)

if TYPE_CHECKING:
    Reward = RewardTable
else:
    Reward = Annotated[Union[KINDS], Field(discriminator="kind")]  # noqa: UP007 - members are known at run time
