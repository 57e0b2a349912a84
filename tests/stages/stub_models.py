"""Two rows of records, small enough to work out by hand: row 0 has two tokens, row 1 has three."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ppoctl.algorithms.stages.actor_update import NegativeLogLikelihood
from ppoctl.algorithms.stages.objective import Term, Terms
from ppoctl.core.batch.records import Advantages, Correction, Logprobs, Rewards, Rollouts, State, Values
from ppoctl.core.batch.sequences import Sequences
from ppoctl.core.ports import MinibatchResult, OutputRequest, TokenOutputs, Trainer

MASK = torch.tensor([[True, True, False], [True, True, True]])
REFERENCE = torch.tensor([[-1.0, -2.0, 0.0], [-3.0, -1.5, -0.5]])
ACTOR = torch.tensor([[-0.5, -2.5, 0.0], [-3.0, -1.0, -1.5]])


def rollouts(**changes: object) -> Rollouts:
    fields = {
        "prompt_tokens": torch.tensor([5, 6], dtype=torch.int32),
        "prompt_lengths": torch.tensor([1, 1]),
        "tokens": torch.tensor([[2, 1, 0], [3, 4, 1]], dtype=torch.int32),
        "lengths": torch.tensor([2, 3]),
        "mask": MASK,
        "sampler_logprobs": ACTOR.clone(),
        "finish": torch.tensor([0, 0]),
        "seeds": torch.tensor([1, 2]),
        "prompt_ids": ["a", "b"],
        "sample_indices": [0, 0],
        "texts": ["2 1", "3 4 1"],
        "stamps": ["", ""],
        "sends": [1, 1],
    }
    return Rollouts(**{**fields, **changes})  # type: ignore[arg-type]


def logprobs(actor: torch.Tensor = ACTOR, reference: torch.Tensor | None = REFERENCE) -> Logprobs:
    return Logprobs(actor=actor, entropy=torch.ones(2, 3) * MASK, reference=reference, stamp="", gap={})


def values(grid: torch.Tensor | None = None) -> Values:
    return Values(values=torch.zeros(2, 3) if grid is None else grid, stamp="")


def rewards(first: float = 1.0, second: float = 2.0, *, outcomes: tuple[int, int] = (0, 0)) -> Rewards:
    return Rewards(torch.tensor([first, second]), torch.tensor(outcomes), {}, ["", ""], ["", ""])


def advantages(grid: torch.Tensor | None = None, *, kl_coef: float = 0.0) -> Advantages:
    chosen = torch.tensor([[1.0, 2.0, 0.0], [-1.0, 0.5, 3.0]]) if grid is None else grid
    return Advantages(chosen, chosen.clone(), MASK, {"kl_coef": kl_coef}, {}, returns=chosen + 1 * MASK)


def correction(weights: torch.Tensor, mask: torch.Tensor = MASK) -> Correction:
    return Correction(weights * mask, mask, {})


@dataclass
class Engine:
    """Returns the outputs that it was given, and records its calls."""

    outputs: torch.Tensor = field(default_factory=lambda: ACTOR.clone())
    reference: torch.Tensor = field(default_factory=lambda: REFERENCE.clone())
    calls: dict[str, object] = field(default_factory=dict)

    def logprobs(self, sequences: Sequences, request: OutputRequest) -> TokenOutputs:
        self.calls["actor"] = request
        return TokenOutputs(self.outputs, torch.zeros(2, 3), reference=self.reference if request.reference else None)

    def reference_logprobs(self, sequences: Sequences, request: OutputRequest) -> torch.Tensor:
        self.calls["reference"] = request
        return self.reference

    def values(self, sequences: Sequences) -> torch.Tensor:
        return self.outputs

    def update(self, sequences: Sequences, minibatches: list, objective: object) -> list[MinibatchResult]:  # type: ignore[type-arg]
        self.calls["minibatches"], self.calls["objective"] = minibatches, objective
        grid = torch.zeros_like(self.outputs) if getattr(objective, "request", OutputRequest()).entropy else None
        entropies = [None if grid is None else grid[m.rows] for m in minibatches]
        return [
            MinibatchResult(0.0, 1.0, TokenOutputs(self.outputs[m.rows], entropy))
            for m, entropy in zip(minibatches, entropies, strict=True)
        ]


@dataclass
class Models:
    """The port, with one trainer that is at every state."""

    engine: Engine = field(default_factory=Engine)

    def actor_at(self, state: State) -> Engine:
        return self.engine

    critic_at = actor_at

    def stamped(self, state: State) -> State:
        return state

    @contextmanager
    def advancing(self, state: State, *, to: State) -> Iterator[Trainer]:
        yield self.engine  # type: ignore[misc]


def in_loss(*masks: torch.Tensor) -> Terms:
    """Return an objective with these tokens in its terms."""
    return Terms([Term(NegativeLogLikelihood(), mask) for mask in masks])
