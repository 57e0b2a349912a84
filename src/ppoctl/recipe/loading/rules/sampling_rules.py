"""Rules about sampling: the limits of prompt, response and window are consistent. See `all_rules`."""

import json
from collections.abc import Iterator

from ppoctl.algorithms.sizes import generator_window
from ppoctl.core.errors import quoted
from ppoctl.core.finding import Finding, conflict
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.recipe.generator_limits import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from ppoctl.recipe.schema import Recipe

_PROMPT: KeyPath = ("rollout", "max_prompt_tokens")
_NEW: KeyPath = ("rollout", "max_new_tokens")
_FEWEST: KeyPath = ("rollout", "min_new_tokens")
_WINDOW: KeyPath = ("rollout", "max_window_tokens")
_STRINGS: KeyPath = ("rollout", "stop_strings")


def check_min_new_tokens(recipe: Recipe) -> Iterator[Finding]:
    rollout = recipe.rollout
    if rollout.min_new_tokens > rollout.max_new_tokens:
        yield conflict("the minimum response length exceeds the maximum", (_FEWEST, _NEW))
    window = rollout.max_window_tokens
    if window is not None and window - rollout.max_prompt_tokens < max(rollout.min_new_tokens, 1):
        message = "the window is too small for the longest prompt and the shortest response"
        smallest = rollout.max_prompt_tokens + max(rollout.min_new_tokens, 1)
        yield conflict(message, (_WINDOW, _PROMPT, _FEWEST), f"--set rollout.max_window_tokens={smallest}")


def check_window_reachable(recipe: Recipe) -> Iterator[Finding]:
    window = recipe.rollout.max_window_tokens
    if window is not None and generator_window(recipe) < window:
        yield conflict("no prompt and response together reach the window", (_WINDOW, _PROMPT, _NEW))


def check_stop_strings(recipe: Recipe) -> Iterator[Finding]:
    texts = recipe.rollout.stop_strings
    if "" in texts:
        rest = json.dumps([text for text in texts if text], ensure_ascii=False)
        hint = f"--set {quoted(f'rollout.stop_strings={rest}')}"
        yield conflict("an empty stop string would end every response at once", (_STRINGS,), hint)


def check_temperatures(recipe: Recipe) -> Iterator[Finding]:
    for name, value in (("rollout", recipe.rollout.temperature), ("eval", recipe.eval.temperature)):
        key = (name, "temperature")
        if not LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE:
            nearest = min(max(value, LOWEST_TEMPERATURE), HIGHEST_TEMPERATURE)
            yield conflict(
                f"vLLM does not support temperature `{value}`: it must be between {LOWEST_TEMPERATURE} "
                f"and {HIGHEST_TEMPERATURE}",
                (key,),
                f"--set {dotted(key)}={nearest}",
            )


def check_stop_token_ids(recipe: Recipe) -> Iterator[Finding]:
    ids = recipe.rollout.stop_token_ids
    if any(token < 0 for token in ids) or len(set(ids)) != len(ids):
        message = "stop token ids must be unique and at least 0"
        yield conflict(message, (("rollout", "stop_token_ids"),))
