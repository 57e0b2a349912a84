"""Recipes with dynamic sampling, whose steps have different numbers of rounds."""

from collections.abc import Mapping
from typing import Any

from fakes.components import FEW_ROWS, fake_recipe
from ppoctl.recipe.schema import Recipe

PPO = {"epochs": 2, "minibatch_seqs": 2, "kl": {"place": "loss", "coef": 0.05}}


def with_groups(groups: Mapping[str, Any], **changes: Any) -> Recipe:
    """Return a recipe of three steps of two groups, with a critic. With its seed and mixed groups, the steps have two
    rounds, one and three."""
    tables = {"seed": 13, "ppo": PPO, **changes}
    return fake_recipe(**{**tables, "rollout": {**FEW_ROWS, **tables.get("rollout", {}), "groups": groups}})


def without_critic(**changes: Any) -> Recipe:
    """Return the recipe of `with_groups` with GRPO, and at most four rounds."""
    ppo = {**PPO, "advantages": {"kind": "grpo"}}
    return with_groups({"max_rounds": 4}, **{"critic": None, "ppo": ppo, **changes})


def with_critic(**changes: Any) -> Recipe:
    """Return the recipe of `with_groups` whose critic trains on the kept groups."""
    return with_groups({"max_rounds": 4}, **changes)


REPLAYING = {"optimizer": {"lr": 0.05}, "router_replay": "trainer"}


def critic_sees_all(**changes: Any) -> Recipe:
    """Return the recipe of `with_groups` whose critic trains on all responses, whose rewards contain the KL, whose
    actor trains the experts of its old log-probs, and whose rounds overlap."""
    ppo = {**PPO, "kl": {"place": "reward", "coef": 0.05}, "rollout_correction": {"kind": "tis"}}
    groups = {"max_rounds": 4, "critic_sees": "all", "overlap_rounds": True}
    return with_groups(groups, **{"ppo": ppo, "actor": REPLAYING, **changes})
