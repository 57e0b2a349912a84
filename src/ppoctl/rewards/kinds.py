"""The kinds of reward that a recipe may name: one line each."""

from ppoctl.rewards.exact_match import ExactMatchReward
from ppoctl.rewards.gsm8k import Gsm8kReward
from ppoctl.rewards.table import RewardTable

KINDS: tuple[type[RewardTable], ...] = (
    Gsm8kReward,
    ExactMatchReward,
)
