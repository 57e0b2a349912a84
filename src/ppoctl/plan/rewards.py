"""The arithmetic of rewards in words: each step with its numbers, in the order in which they are taken."""

from collections.abc import Iterator, Mapping

from ppoctl.recipe.schema import Recipe

TRUNCATED = {
    "terminal": "count as finished",
    "bootstrap": "go on with the critic's value",
    "filter": "count in no loss",
}


def reward_steps(recipe: Recipe) -> Mapping[str, str]:
    """Name of each step -> what it does; the last says how truncated responses count."""
    return dict(_steps(recipe))


def _steps(recipe: Recipe) -> Iterator[tuple[str, str]]:
    table = recipe.reward
    clip = table.clip
    bounds = None if clip is None else f"to {clip.low:g} .. {clip.high:g}"
    if (scale := table.scale) is not None:
        (low, high), (to_low, to_high) = scale.from_, scale.to
        yield "scale", f"{low:g} .. {high:g} becomes {to_low:g} .. {to_high:g}"
    if bounds is not None and clip is not None and clip.place == "before_moments":
        yield "clip", bounds
    if table.moments.kind != "none":
        std = getattr(table.moments, "std", None)
        of = "of the run so far" if table.moments.kind == "running" else "of the first step whose rewards differ"
        minus = f"minus the mean {of}, " if table.moments.center else ""
        yield "moments", f"{minus}divided by {f'{std:g}' if std else f'the standard deviation {of}'}"
    if bounds is not None and clip is not None and clip.place == "after_moments":
        yield "clip", bounds
    if table.unfinished_factor != 1:
        yield "unfinished", f"truncated responses x {table.unfinished_factor:g}"
    if (overlong := table.overlong) is not None:
        end = overlong.max_tokens or recipe.rollout.max_new_tokens
        beyond = "no less beyond" if overlong.floor else "and less beyond"
        start = end - overlong.buffer_tokens
        yield "overlong", f"from {start} tokens on less, {-overlong.penalty:g} at {end}, {beyond}"
    if (length := table.length_penalty) is not None:
        yield "length", f"{-length.per_token:g} for each token beyond {length.free_tokens}"
    yield "truncated", f"responses {TRUNCATED[recipe.ppo.truncated]}"
