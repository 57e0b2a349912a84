"""Each step of the arithmetic of rewards, by hand."""

import pytest
import torch

from ppoctl.ppo.rewards import scaled


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        ((0.0, 1.0), (-1.0, 1.0), [-1.0, -1.0, -0.5, 1.0, 1.0]),
        ((-3.0, 5.0), (0.0, 1.0), [0.0, 0.375, 0.40625, 0.5, 1.0]),
        ((0.0, 1.0), (1.0, 0.0), [1.0, 1.0, 0.75, 0.0, 0.0]),
    ],
)
def test_scores_are_clamped_and_mapped(
    source: tuple[float, float], target: tuple[float, float], told: list[float]
) -> None:
    # -3..5 onto 0..1: (0 + 3) / 8 = 0.375, (0.25 + 3) / 8 = 0.40625, (1 + 3) / 8 = 0.5; -4 and 9 are outside.
    scores = torch.tensor([-4.0, 0.0, 0.25, 1.0, 9.0])
    assert torch.equal(scaled(scores, source=source, target=target), torch.tensor(told))


def test_the_ends_land_exactly_on_the_target() -> None:
    found = scaled(torch.tensor([0.1, 0.7]), source=(0.1, 0.7), target=(-0.3, 0.9))
    assert torch.equal(found, torch.tensor([-0.3, 0.9]))
    assert found.dtype == torch.float32
