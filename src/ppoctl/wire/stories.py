"""Which story a recipe tells at which step."""

from collections.abc import Callable
from typing import Any

from ppoctl.loop.stories import CRITIC_ONLY, PPO, PPO_CORRECTED, Story, outline
from ppoctl.recipe.schema import Recipe
from ppoctl.store.outline import Outline, Outlines
from ppoctl.store.run_dir import STORIES

StoryAt = Callable[[Recipe, int], Story]
"""(recipe, step) -> the story of that step."""


def story_at(recipe: Recipe, step: int) -> Story:
    """The critic may train alone for some steps; then the actor learns too, from corrected rollouts or plain ones."""
    if step <= recipe.ppo.critic_only_steps:
        return CRITIC_ONLY
    return PPO if recipe.ppo.rollout_correction.kind == "none" else PPO_CORRECTED


def as_recorded(recipe: Recipe, choose: StoryAt = story_at) -> dict[str, Any]:
    """What a run directory keeps of a recipe: every key with its value, and the stories that its steps tell."""
    return {**recipe.model_dump(mode="json", by_alias=True), STORIES: outlines(recipe, choose).as_json()}


def outlines(recipe: Recipe, choose: StoryAt = story_at) -> Outlines:
    """What each step of the run will consist of."""
    found: dict[int, Outline] = {}
    told = ""
    for step in range(1, recipe.steps + 1):
        story = choose(recipe, step)
        if story.name != told:
            found[step], told = outline(story), story.name
    return Outlines(found)
