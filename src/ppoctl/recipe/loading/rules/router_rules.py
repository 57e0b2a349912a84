"""Rules about the routers of a mixture of experts: given experts, and a balanced load. They read only config.json.
See `all_rules`."""

from collections.abc import Iterator

from ppoctl.algorithms.role_model import model_of, trainable_of
from ppoctl.algorithms.roles import POLICY
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe.schema import Recipe

_MOST_REPLAYED = 256
"""Number of experts of a layer that one byte of a record can number."""


def check_replayed_routers_exist(recipe: Recipe) -> Iterator[Finding]:
    """Check that the actor has routers whose choice one byte holds, and a forward pass before the update."""
    replay, model, key = recipe.actor.router_replay, model_of(recipe, POLICY), ("actor", "router_replay")
    if replay == "off":
        return
    shape = model.shape
    if shape is not None and (shape.experts is None or shape.experts.count > _MOST_REPLAYED):
        count = 0 if shape.experts is None else shape.experts.count
        many = f"records have one byte for an expert, for at most {_MOST_REPLAYED} in a layer; the model has {count}"
        yield conflict(
            many if count else "the model has no experts that a pass could use again",
            (key, model.key),
            "--set actor.router_replay=off",
        )
    if replay == "trainer" and recipe.ppo.old_logprobs != "trainer":
        yield conflict(
            "the update would use the experts of the forward pass of the old log-probs, but there is none",
            (key, ("ppo", "old_logprobs")),
            "--set actor.router_replay=off",
        )
    segments: tuple[tuple[bool, KeyPath], ...] = (
        (recipe.environment is not None, ("environment",)),
        (recipe.rollout.tokens_per_step is not None, ("rollout", "tokens_per_step")),
    )
    for has_several, source in segments:
        if replay == "generator" and has_several:
            yield conflict(
                "the generator returns the experts of one request, but a response has several",
                (key, source),
                "--set actor.router_replay=trainer",
            )


def check_balanced_routers_exist(recipe: Recipe) -> Iterator[Finding]:
    """Check that the actor has the routers, and the bias, that its settings balance, and that the bias is saved."""
    model, keys = model_of(recipe, POLICY), (("actor", "router_aux_loss_coef"), ("actor", "router_bias_rate"))
    experts = None if model.shape is None else model.shape.experts
    for key in keys:
        if not getattr(recipe.actor, key[1]):
            continue
        off = f"--set {dotted(key)}=0"
        if model.shape is not None and experts is None:
            yield conflict("the model has no experts to balance", (key, model.key), off)
        elif experts is not None and experts.sigmoid is None and key[1] == "router_bias_rate":
            yield conflict("routers with a softmax have no bias that balances their experts", (key, model.key), off)
        elif key[1] == "router_bias_rate" and not trainable_of(recipe, POLICY).is_all:
            yield conflict(
                "saved states have the biases of routers only if all parameters train",
                (key, ("actor", "train"), ("actor", "freeze")),
                off,
            )
