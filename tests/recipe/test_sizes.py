"""Sizes that follow from several keys."""

from dataclasses import replace

import pytest

from plan.small_model import SMALL
from ppoctl.recipe.sizes import reward_tokens
from ppoctl.rewards.model import ModelScorer


@pytest.mark.parametrize(
    ("written", "positions", "tokens"),
    [(None, 64, 64), (None, 4096, 4096), (None, 131_072, 4096), (9000, 131_072, 9000), (16, 64, 16)],
)
def test_a_reward_model_reads_as_many_tokens_as_written_else_at_most_4096(
    written: int | None, positions: int, tokens: int
) -> None:
    table = ModelScorer(kind="model", path="judge", max_tokens=written)
    assert reward_tokens(table, replace(SMALL, max_positions=positions)) == tokens
