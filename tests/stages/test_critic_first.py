"""The actor waits for the critic: the decision by hand, and an update without optimizer steps."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from ppoctl.algorithms.stages.critic_first import CriticFirst
from ppoctl.core.batch.records import Carry, State, Values
from stages import stub_models
from stages.test_updates import actor_stage

RETURNS = torch.tensor([[1.0, 3.0, 9.0], [2.0, 9.0, 4.0]])
VALUES = Values(torch.tensor([[0.0, 2.0, -7.0], [2.0, 7.0, 3.0]]), "critic@1:x")
MASK = torch.tensor([[True, True, False], [True, False, True]])
# Returns 1, 3, 2, 4 with squared deviations 5; errors 1, 1, 0, 1 with 0.75. Explained: 1 - 0.75 / 5 = 0.85.


@pytest.mark.parametrize(
    ("bound", "at_most", "step", "waited", "trains"),
    [
        (0.84, 5, 1, 0.0, True),
        (0.86, 5, 1, 0.0, False),
        (0.86, 5, 3, 2.0, False),
        (0.86, 5, 5, 4.0, False),
        (0.86, 5, 6, 5.0, True),  # five steps have waited
        (0.84, 5, 3, 2.0, True),
        (0.86, 5, 3, 1.0, True),  # step 2 trained the actor
        (0.86, 5, 3, 0.0, True),  # a resumed run: its actor has trained before the key was set
        (1.0, 1, 2, 1.0, True),
    ],
)
def test_actor_trains_once_the_critic_is_good(
    bound: float, at_most: int, step: int, waited: float, trains: bool
) -> None:
    decision = CriticFirst(bound, at_most)
    assert decision.trains_actor(step, Carry(waited_steps=waited), VALUES, RETURNS, MASK) is trains


def test_equal_returns_have_no_variance_to_explain() -> None:
    equal = torch.full((2, 3), 2.5)
    for bound, trains in ((0.1, False), (0.0, True), (-0.5, True)):
        assert CriticFirst(bound, 9).trains_actor(1, Carry(), VALUES, equal, MASK) is trains


class UntouchedModels(stub_models.Models):
    def advancing(self, state: State, *, to: State) -> Any:
        raise AssertionError("the update uses the trainer")


def test_update_that_does_not_train_keeps_the_state() -> None:
    before = State("actor", 4, 9, "parent")
    stage = actor_stage(models=cast(Any, UntouchedModels()), positive_nll_coef=0.5)
    waiting = replace(stub_models.advantages(), trains_actor=False)
    found = stage.run(before, stub_models.rollouts(), stub_models.logprobs(), waiting)
    assert found.result == State("actor", 5, 9, "parent")
    assert (found.parent, found.per_minibatch, found.metrics()) == (
        "parent",
        {"loss": [], "grad_norm": [], "lr": []},
        {},
    )
    trained = actor_stage().run(
        before, stub_models.rollouts(), stub_models.logprobs(), replace(waiting, trains_actor=True)
    )
    assert (trained.result.updates, trained.parent) == (11, "parent")
    assert trained.lineage != "parent"
