"""The part of a recipe that decides what a step computes."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from ppoctl.algorithms.evaluation_table import EvalTable
from ppoctl.algorithms.ppo_table import PpoTable
from ppoctl.algorithms.role_table import ActorTable, TrainedTable
from ppoctl.algorithms.rollout_table import RolloutTable
from ppoctl.environments.environment_table import EpisodeTable
from ppoctl.models.head import SharedValueHead
from ppoctl.models.model_tables import ModelTable
from ppoctl.rewards.reward_table import Reward


class StepRecipe(Protocol):
    """Keys of a recipe that specs and step functions read. Keys of data, devices, tracking and Slurm are not among
    them."""

    @property
    def seed(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def model(self) -> ModelTable: ...
    @property
    def rollout(self) -> RolloutTable: ...
    @property
    def environment(self) -> EpisodeTable | None: ...
    @property
    def reward(self) -> Reward: ...
    @property
    def ppo(self) -> PpoTable: ...
    @property
    def actor(self) -> ActorTable: ...
    @property
    def eval(self) -> EvalTable: ...

    @property
    def trained(self) -> Mapping[str, TrainedTable]:
        """Role -> its table, for each role that this recipe trains."""

    @property
    def eval_environment(self) -> EpisodeTable | None:
        """Environment of evaluations; None: their responses have one turn."""

    @property
    def value_head(self) -> SharedValueHead | None:
        """The value head on the actor's model; None: there is none."""

    def fingerprint(self, keys: Sequence[str], *, without: Sequence[str] = ()) -> str:
        """Return the digest of the keys at or below `keys` that decide results, except those at or below
        `without`."""
