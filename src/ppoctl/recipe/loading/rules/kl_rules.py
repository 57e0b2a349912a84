"""Rules about the KL penalty. See `all_rules`."""

import dataclasses
from collections.abc import Iterator

from ppoctl.algorithms.role_model import model_of
from ppoctl.algorithms.roles import POLICY, REFERENCE
from ppoctl.algorithms.sizes import sequences_per_step
from ppoctl.algorithms.stages.kl_table import KlInLoss, NoKl
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath
from ppoctl.recipe.schema import Recipe

_REFERENCE: KeyPath = ("model", REFERENCE)
_MAY_DIFFER = frozenset({"family", "max_positions", "rope", "norm_eps"})
"""Fields of a model's shape in which the reference may differ from the actor's model. They change no size."""


def check_reference_is_read(recipe: Recipe) -> Iterator[Finding]:
    if recipe.model.reference is not None and recipe.ppo.kl.place == "none":
        yield conflict(
            "`model.reference` has no effect, because no KL penalty reads a reference",
            ((*_REFERENCE, "path"), ("ppo", "kl", "place")),
            "remove `model.reference`, or add `--set 'ppo.kl={place=\"loss\", coef=0.001}'`",
        )


def check_reference_sizes(recipe: Recipe) -> Iterator[Finding]:
    """Check that the reference has the sizes of the actor's model: it has the same layout, and `plan` counts it as a
    copy of the actor's weights."""
    model = model_of(recipe, POLICY)
    own, base = model_of(recipe, REFERENCE).shape, model.shape
    if recipe.model.reference is None or own is None or base is None:
        return
    for name in (field.name for field in dataclasses.fields(own) if field.name not in _MAY_DIFFER):
        ours, its = getattr(base, name), getattr(own, name)
        if ours != its:
            yield conflict(
                f"the reference must have the architecture of the actor's model, but its `{name}` is `{its}`, not "
                f"`{ours}`",
                ((*_REFERENCE, "path"), model.key),
            )
            return


def check_loss_penalty_has_gradient(recipe: Recipe) -> Iterator[Finding]:
    kl = recipe.ppo.kl
    if isinstance(kl, KlInLoss) and (kl.estimator, kl.gradient) == ("k1", "estimator"):
        yield conflict(
            "k1 as a loss has a gradient with mean 0, so it has no effect",
            (("ppo", "kl", "gradient"), ("ppo", "kl", "estimator")),
            "--set ppo.kl.gradient=score_function",
        )


def check_adaptive_coef_positive(recipe: Recipe) -> Iterator[Finding]:
    """Check that the adaptive coefficient stays positive.

    In one step the coefficient shrinks at most by the fraction 0.2 x sequences / horizon.
    """
    kl, sequences = recipe.ppo.kl, sequences_per_step(recipe)
    if not isinstance(kl, NoKl) and kl.adaptive is not None and sequences >= 5 * kl.adaptive.horizon_seqs:
        yield conflict(
            f"one step of {sequences} sequences may reduce the coefficient to 0 or below",
            (("ppo", "kl", "adaptive", "horizon_seqs"),),
            f"--set ppo.kl.adaptive.horizon_seqs={10 * sequences}",
        )


def check_adaptive_coef_has_kl(recipe: Recipe) -> Iterator[Finding]:
    kl = recipe.ppo.kl
    source = recipe.ppo.old_logprobs
    if isinstance(kl, NoKl) or kl.adaptive is None or source == "trainer":
        return
    if source == "current" or kl.estimator == "full":
        yield conflict(
            "the coefficient adapts to the KL of the actor's log-probs before its update, but they are not computed",
            (("ppo", "old_logprobs"), ("ppo", "kl", "adaptive")),
            "--set ppo.old_logprobs=trainer",
        )


def check_estimator_unbiased_with_filters(recipe: Recipe) -> Iterator[Finding]:
    """Check that k2 and k3 estimate the KL without bias.

    Sampling filters such as top_p bias these estimators, because the reference's distribution is not filtered. In a
    loss with a fixed coefficient, k2 and k3 still have the right gradient.
    """
    kl, rollout = recipe.ppo.kl, recipe.rollout
    if isinstance(kl, NoKl) or (kl.place == "loss" and kl.adaptive is None) or kl.estimator not in ("k2", "k3"):
        return
    defaults = type(rollout).model_fields
    for name in ("top_p", "top_k", "min_p", "min_new_tokens"):
        if getattr(rollout, name) != defaults[name].default:
            yield conflict(
                f"{kl.estimator} is a biased estimate of the KL between a filtered actor and an unfiltered reference",
                (("ppo", "kl", "estimator"), ("rollout", name)),
                "--set ppo.kl.estimator=full",
            )


def check_full_kl_options(recipe: Recipe) -> Iterator[Finding]:
    kl = recipe.ppo.kl
    if isinstance(kl, NoKl) or kl.estimator != "full":
        return
    full: KeyPath = ("ppo", "kl", "estimator")
    if kl.input_clamp is not None:
        key = ("ppo", "kl", "input_clamp")
        yield conflict("the full KL has no difference of two log-probs to clamp", (full, key))
    if isinstance(kl, KlInLoss) and kl.gradient != "estimator":
        key = ("ppo", "kl", "gradient")
        yield conflict("the full KL has its own gradient", (full, key), "--set ppo.kl.gradient=estimator")
    if recipe.ppo.old_logprobs != "trainer" and kl.place == "reward":
        yield conflict(
            "the full KL needs a forward pass of the actor, but none is run",
            (full, ("ppo", "old_logprobs")),
            "--set ppo.old_logprobs=trainer",
        )
