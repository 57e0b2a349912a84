"""The distribution that responses are sampled from, as the generator and the trainer receive it."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.core.batch.episodes import Dialogue, Environments, EpisodeSettings
from ppoctl.environments.environment_table import EpisodeTable

if TYPE_CHECKING:
    from ppoctl.core.ports import OutputRequest, SamplingParams

_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p", "min_new_tokens", "stop_token_ids")
DISTRIBUTION_KEYS = tuple(f"rollout.{key}" for key in _DISTRIBUTION)
"""Keys of the distribution that responses are sampled from."""


def rollout_sampling(recipe: StepRecipe) -> "SamplingParams":
    """Return the sampling parameters of a rollout."""
    rollout = recipe.rollout
    plain = plain_sampling(recipe, rollout.temperature, rollout.max_new_tokens)
    filtered = replace(plain, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p)
    returns_experts = recipe.actor.router_replay == "generator"
    return replace(filtered, min_new_tokens=rollout.min_new_tokens, returns_experts=returns_experts)


def greedy_sampling(recipe: StepRecipe) -> "SamplingParams":
    """Return the sampling parameters of greedy responses that have the length limits of a rollout."""
    rollout = recipe.rollout
    return replace(plain_sampling(recipe, 0.0, rollout.max_new_tokens), min_new_tokens=rollout.min_new_tokens)


def plain_sampling(recipe: StepRecipe, temperature: float, max_new_tokens: int) -> "SamplingParams":
    """Return sampling parameters without filters, which end responses as the rollouts do."""
    from ppoctl.core.ports import SamplingParams

    rollout = recipe.rollout
    return SamplingParams(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        stop_strings=rollout.stop_strings,
        stop_token_ids=rollout.stop_token_ids,
        max_window_tokens=rollout.max_window_tokens,
        special_tokens=rollout.special_tokens,
    )


def episode_settings(
    table: EpisodeTable | None, environments: Environments | None, dialogue: Dialogue | None
) -> EpisodeSettings | None:
    """Return the settings of episodes; None if the table is absent, so that responses have one turn."""
    if table is None:
        return None
    assert environments is not None, "the components of a recipe with an environment have environments"
    assert dialogue is not None, "and a dialogue"
    return EpisodeSettings(table.limits, environments, dialogue)


def scored_distribution(recipe: StepRecipe) -> "OutputRequest":
    """Return the request for log-probs under the distribution that the generator (vLLM) samples from."""
    from ppoctl.core.ports import OutputRequest

    return OutputRequest(**{key: getattr(recipe.rollout, key) for key in _DISTRIBUTION})
