"""What training sees of a score."""

import pytest
import torch

from ppoctl.rewards import shaping
from ppoctl.rewards.table import RewardScale


def scale(low: float, high: float, to_low: float, to_high: float) -> RewardScale:
    return RewardScale.model_validate({"from": (low, high), "to": (to_low, to_high)})


@pytest.mark.parametrize(
    ("table", "shaped"),
    [
        (scale(0, 1, -1, 1), [-1.0, -1.0, -0.5, 1.0, 1.0]),
        (scale(-3, 5, 0, 1), [0.0, 0.375, 0.40625, 0.5, 1.0]),
        (scale(0, 1, 1, 0), [1.0, 1.0, 0.75, 0.0, 0.0]),
        (None, [-4.0, 0.0, 0.25, 1.0, 9.0]),
    ],
)
def test_scores_are_clamped_and_mapped(table: RewardScale | None, shaped: list[float]) -> None:
    # -3..5 onto 0..1: (0 + 3) / 8 = 0.375, (0.25 + 3) / 8 = 0.40625, (1 + 3) / 8 = 0.5; -4 and 9 are outside.
    scores = torch.tensor([-4.0, 0.0, 0.25, 1.0, 9.0])
    assert torch.equal(shaping.shape(scores, table), torch.tensor(shaped))


def test_the_ends_land_exactly_on_the_target() -> None:
    shaped = shaping.shape(torch.tensor([0.1, 0.7]), scale(0.1, 0.7, -0.3, 0.9))
    assert torch.equal(shaped, torch.tensor([-0.3, 0.9]))
    assert shaped.dtype == torch.float32
