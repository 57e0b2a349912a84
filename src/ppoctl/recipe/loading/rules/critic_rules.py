"""Rules about the critic, which only some kinds of advantages train. See `all_rules`."""

import json
from collections.abc import Iterator

from ppoctl.algorithms.roles import CRITIC
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.schema import Recipe

_ADVANTAGES: KeyPath = ("ppo", "advantages", "kind")
_UNTIL: KeyPath = ("ppo", "critic_only_until")
_TRAIN_ONE = "--set ppo.advantages.kind=gae"
_OF_A_CRITIC: tuple[KeyPath, ...] = (
    ("ppo", "critic_epochs"),
    ("ppo", "critic_minibatch_seqs"),
    ("ppo", "critic_only_steps"),
    ("ppo", "critic_only_until"),
    ("ppo", "value_loss"),
    ("model", CRITIC),
    ("health", "explained_variance"),
)
"""Keys and tables that have no effect without a critic."""


def check_advantages_have_critic(recipe: Recipe) -> Iterator[Finding]:
    if recipe.ppo.advantages.trains_critic and recipe.critic is None:
        yield conflict(
            f"missing table [{CRITIC}], which the advantages train; it needs `{CRITIC}.optimizer.lr`",
            (_ADVANTAGES,),
            f"--set {CRITIC}.optimizer.lr=1e-5",
        )


def check_critic_is_trained(recipe: Recipe) -> Iterator[Finding]:
    if not recipe.ppo.advantages.trains_critic and recipe.critic is not None:
        yield conflict(
            f"[{CRITIC}] has no effect, because the advantages train no critic",
            ((CRITIC, *(("optimizer", "lr") if recipe.value_head is None else ("on",))), _ADVANTAGES),
            f"remove the table [{CRITIC}], or add `{_TRAIN_ONE}`",
        )


def check_critic_keys(recipe: Recipe) -> Iterator[Finding]:
    if recipe.ppo.advantages.trains_critic:
        return
    written = [entry.path for entry in tree.values(recipe) if entry.value != entry.usual]
    for top in _OF_A_CRITIC:
        if keys := [path for path in written if path[: len(top)] == top]:
            yield conflict(
                f"`{dotted(top)}` has no effect, because the advantages train no critic",
                (*keys, _ADVANTAGES),
                f"remove {' and '.join(f'`{dotted(key)}`' for key in keys)}, or add `{_TRAIN_ONE}`",
            )


def check_bootstrap_has_critic(recipe: Recipe) -> Iterator[Finding]:
    if recipe.ppo.truncated == "bootstrap" and not recipe.ppo.advantages.trains_critic:
        yield conflict(
            "a bootstrap value is the critic's, but the advantages train no critic",
            (("ppo", "truncated"), _ADVANTAGES),
            "--set ppo.truncated=terminal",
        )


def check_offload_without_critic(recipe: Recipe) -> Iterator[Finding]:
    if CRITIC in recipe.cluster.offload and not recipe.ppo.advantages.trains_critic:
        listed = [role for role in recipe.cluster.offload if role != CRITIC]
        yield conflict(
            "there is no critic to offload, because the advantages train none",
            (("cluster", "offload"), _ADVANTAGES),
            f"--set 'cluster.offload={json.dumps(listed)}'",
        )


def check_one_critic_warmup(recipe: Recipe) -> Iterator[Finding]:
    if recipe.ppo.critic_only_until is not None and recipe.ppo.critic_only_steps:
        yield conflict(
            "the steps that train only the critic are set both as a number and by a condition",
            (("ppo", "critic_only_steps"), (*_UNTIL, "at_most")),
            "--set ppo.critic_only_steps=0",
        )


def check_critic_warmup_ends(recipe: Recipe) -> Iterator[Finding]:
    until = recipe.ppo.critic_only_until
    if until is not None and until.at_most >= recipe.steps:
        yield conflict(
            f"the actor may never train: the critic may train alone for {until.at_most} of {recipe.steps} steps",
            ((*_UNTIL, "at_most"), ("steps",)),
            f"--set {dotted(_UNTIL)}.at_most={max(recipe.steps // 10, 1)}",
        )
