"""Rules about the KL penalty. See `rules`."""

from collections.abc import Iterator

from ppoctl.loading.problems import Conflict, rules_of
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.schema import KlInLoss, NoKl, Recipe
from ppoctl.recipe.sizes import sequences_per_step


def check_loss_penalty_has_gradient(recipe: Recipe) -> Iterator[Conflict]:
    kl = recipe.ppo.kl
    if isinstance(kl, KlInLoss) and (kl.estimator, kl.gradient) == ("k1", "estimator"):
        yield Conflict(
            "as a loss k1 has a gradient that averages to 0: it pulls nowhere",
            (("ppo", "kl", "gradient"), ("ppo", "kl", "estimator")),
            "--set ppo.kl.gradient=score_function",
        )


def check_adaptive_coef_positive(recipe: Recipe) -> Iterator[Conflict]:
    """It shrinks by a fifth of the step's sequences over the horizon at most."""
    kl, sequences = recipe.ppo.kl, sequences_per_step(recipe)
    if not isinstance(kl, NoKl) and kl.adaptive is not None and sequences >= 5 * kl.adaptive.horizon_seqs:
        yield Conflict(
            f"one step of {sequences} sequences may take the coefficient to 0 or below",
            (("ppo", "kl", "adaptive", "horizon_seqs"),),
            f"--set ppo.kl.adaptive.horizon_seqs={10 * sequences}",
        )


def check_adaptive_coef_has_kl(recipe: Recipe) -> Iterator[Conflict]:
    kl = recipe.ppo.kl
    by = recipe.ppo.old_logprobs
    if isinstance(kl, NoKl) or kl.adaptive is None or by == "trainer":
        return
    if by == "current" or kl.estimator == "full":
        yield Conflict(
            "a coefficient adapts to the KL of the actor's log-probs before its update, and nothing computes them",
            (("ppo", "old_logprobs"), ("ppo", "kl", "adaptive")),
            "--set ppo.old_logprobs=trainer",
        )


def check_estimator_unbiased_with_filters(recipe: Recipe) -> Iterator[Conflict]:
    """Estimates k2 and k3 of a filtered actor and the whole reference average to something else than KL; as a loss
    they pull right."""
    kl, rollout = recipe.ppo.kl, recipe.rollout
    if isinstance(kl, NoKl) or (kl.place == "loss" and kl.adaptive is None) or kl.estimator not in ("k2", "k3"):
        return
    usual = type(rollout).model_fields
    for name in ("top_p", "top_k", "min_p", "min_new_tokens"):
        if getattr(rollout, name) != usual[name].default:
            yield Conflict(
                f"{kl.estimator} does not average to the KL of a filtered actor from the whole reference",
                (("ppo", "kl", "estimator"), ("rollout", name)),
                "--set ppo.kl.estimator=full",
            )


def check_full_kl_options(recipe: Recipe) -> Iterator[Conflict]:
    kl = recipe.ppo.kl
    if isinstance(kl, NoKl) or kl.estimator != "full":
        return
    full: KeyPath = ("ppo", "kl", "estimator")
    if kl.input_clamp is not None:
        key = ("ppo", "kl", "input_clamp")
        yield Conflict("the sum over the vocabulary has no difference of two log-probs to clamp", (full, key))
    if isinstance(kl, KlInLoss) and kl.gradient != "estimator":
        key = ("ppo", "kl", "gradient")
        yield Conflict(
            "the sum over the vocabulary has its own gradient", (full, key), "--set ppo.kl.gradient=estimator"
        )
    if recipe.ppo.old_logprobs != "trainer" and kl.place == "reward":
        yield Conflict(
            "the sum over the vocabulary is read in a forward pass of the actor, and none is run",
            (full, ("ppo", "old_logprobs")),
            "--set ppo.old_logprobs=trainer",
        )


KL_RULES = rules_of(globals())
