"""Which story a recipe tells at which step."""

from collections.abc import Callable

from ppoctl.loop.stories import CRITIC_ONLY, PPO, Story, outline
from ppoctl.recipe.schema import Recipe
from ppoctl.store.outline import Outline, Outlines

StoryAt = Callable[[Recipe, int], Story]
"""(recipe, step) -> the story of that step."""


def story_at(recipe: Recipe, step: int) -> Story:
    """The critic may train alone for some steps."""
    return CRITIC_ONLY if step <= recipe.ppo.critic_only_steps else PPO


def outlines(recipe: Recipe, choose: StoryAt = story_at) -> Outlines:
    """What each step of the run will consist of."""
    found: dict[int, Outline] = {}
    told = ""
    for step in range(1, recipe.steps + 1):
        story = choose(recipe, step)
        if story.name != told:
            found[step], told = outline(story), story.name
    return Outlines(found)
