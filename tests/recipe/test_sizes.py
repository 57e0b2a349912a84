"""Sizes computed from several keys."""

from dataclasses import replace
from pathlib import Path

import pytest

from plan.small_model import SMALL
from ppoctl.algorithms.sizes import generator_window, longest_sequence, reward_tokens, warmup_updates
from ppoctl.recipe.loading.load import load
from ppoctl.rewards.model_reward import ModelScorer


@pytest.mark.parametrize(
    ("written", "positions", "tokens"),
    [(None, 64, 64), (None, 4096, 4096), (None, 131_072, 4096), (9000, 131_072, 9000), (16, 64, 16)],
)
def test_reward_model_length_is_setting_or_at_most_4096(written: int | None, positions: int, tokens: int) -> None:
    table = ModelScorer(kind="model", path="judge", max_tokens=written)
    assert reward_tokens(table, replace(SMALL, max_positions=positions)) == tokens


@pytest.mark.parametrize(("share", "updates"), [(0.04, 1), (0.06, 1), (0.08, 2), (0.5, 10)])
def test_warmup_fraction_rounds_to_nearest_update(smallest: Path, share: float, updates: int) -> None:
    """Fractions of 20 updates."""
    recipe = load([smallest], [f"actor.optimizer.lr_warmup_frac={share}"], {}).recipe
    assert (warmup_updates(recipe, "actor"), warmup_updates(recipe, "critic")) == (updates, 0)


@pytest.mark.parametrize(("sets", "window"), [((), 33), ((9,), 33), ((40,), 60)])
def test_generator_window_includes_eval_responses(smallest: Path, sets: tuple[int, ...], window: int) -> None:
    """20 prompt tokens and 13 response tokens; a forward pass does not read the last token."""
    evaluation = [f"eval.max_new_tokens={tokens}" for tokens in sets]
    recipe = load([smallest], ["data.eval.e={format='gsm8k', path='e.jsonl'}", *evaluation], {}).recipe
    assert (generator_window(recipe), longest_sequence(recipe)) == (window, 32)
