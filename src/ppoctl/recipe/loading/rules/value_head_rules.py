"""Rules about a value head on the actor's model, which is trained by the actor's update. See `all_rules`."""

import json
from collections.abc import Iterator

from ppoctl.algorithms.role_model import model_of
from ppoctl.algorithms.roles import CRITIC, POLICY
from ppoctl.algorithms.stages.resample_table import NoResampling
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe import schema_tree as tree
from ppoctl.recipe.parallel import layers_of_last_stage, layouts
from ppoctl.recipe.schema import Recipe

_ON: KeyPath = (CRITIC, "on")
_COPIED: KeyPath = (CRITIC, "layers_copied")
_COEF: KeyPath = ("ppo", "value_loss", "coef")
_OWN_MODEL = "is a value head on the actor's model"
_OF_AN_OWN_MODEL: tuple[KeyPath, ...] = (
    ("ppo", "critic_epochs"),
    ("ppo", "critic_minibatch_seqs"),
    ("ppo", "critic_only_steps"),
    ("ppo", "critic_only_until"),
    ("model", CRITIC),
)
"""Keys and tables that have no effect without a critic that has a model of its own."""


def check_keys_of_own_critic(recipe: Recipe) -> Iterator[Finding]:
    if recipe.value_head is None:
        return
    written = [entry.path for entry in tree.values(recipe) if entry.value != entry.usual]
    for top in _OF_AN_OWN_MODEL:
        if keys := [path for path in written if path[: len(top)] == top]:
            yield conflict(
                f"`{dotted(top)}` is of a critic that has a model of its own, but the critic {_OWN_MODEL}, which the "
                "actor's update trains",
                (*keys, _ON),
                f"remove {' and '.join(f'`{dotted(key)}`' for key in keys)}",
            )


def check_offload_of_value_head(recipe: Recipe) -> Iterator[Finding]:
    if recipe.value_head is not None and CRITIC in recipe.cluster.offload:
        listed = [role for role in recipe.cluster.offload if role != CRITIC]
        yield conflict(
            f"the critic {_OWN_MODEL} and is offloaded with the actor",
            (("cluster", "offload"), _ON),
            f"--set 'cluster.offload={json.dumps(listed)}'",
        )


def check_value_head_sees_kept_groups(recipe: Recipe) -> Iterator[Finding]:
    groups = recipe.rollout.groups
    if recipe.value_head is not None and groups is not None and groups.critic_sees == "all":
        yield conflict(
            f"the critic {_OWN_MODEL}, so one update trains both on the same responses",
            (("rollout", "groups", "critic_sees"), _ON),
            "--set rollout.groups.critic_sees=kept",
        )


def check_value_head_without_resampling(recipe: Recipe) -> Iterator[Finding]:
    if recipe.value_head is not None and not isinstance(recipe.ppo.resample, NoResampling):
        yield conflict(
            f"rows are sampled again only for a critic that has a model of its own, but the critic {_OWN_MODEL}",
            (("ppo", "resample", "kind"), _ON),
            "--set ppo.resample.kind=none",
        )


def check_value_head_has_forward_pass(recipe: Recipe) -> Iterator[Finding]:
    source = recipe.ppo.old_logprobs
    if recipe.value_head is not None and source != "trainer":
        yield conflict(
            "the values come from the trainer's forward pass of the log-probs, which `ppo.old_logprobs` "
            f"(`{source}`) leaves out",
            (("ppo", "old_logprobs"), _ON),
            "--set ppo.old_logprobs=trainer",
        )


def check_joint_coefficient_has_value_head(recipe: Recipe) -> Iterator[Finding]:
    if recipe.value_head is None and recipe.ppo.value_loss.coef != 1.0:
        yield conflict(
            "the joint loss of a value head on the actor's model contains this factor, but there is no such head",
            (_COEF,),
            "set `ppo.value_loss.scale` instead, or add `--set critic.on=actor`",
        )


def check_copied_layers_are_on_last_stage(recipe: Recipe) -> Iterator[Finding]:
    head, shape = recipe.value_head, model_of(recipe, POLICY).shape
    if head is None or shape is None:
        return
    last = layers_of_last_stage(layouts(recipe)[POLICY], shape.num_layers)
    if head.layers_copied > last:
        yield conflict(
            f"the value head copies the last {head.layers_copied} layers, but the last pipeline stage of the actor "
            f"has {last} of the {shape.num_layers} layers",
            (_COPIED, (POLICY, "parallel", "pipeline"), ("model", "path")),
            f"--set {dotted(_COPIED)}={last}",
        )
