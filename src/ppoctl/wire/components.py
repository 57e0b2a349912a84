"""Components of a run: the implementations of the ports, as one record. `engines.py` builds real ones, tests use
fakes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from ppoctl.batch.prompts import Prompts
from ppoctl.batch.records import State
from ppoctl.ports import Actor, Critic, Generator, Scorer


@runtime_checkable
class PromptsByStep(Protocol):
    """Source of prompts: a pure function of (seed, step)."""

    def prompts_for(self, step: int) -> Prompts: ...

    def evaluation_sets(self) -> Mapping[str, Prompts]: ...


def no_op() -> None:
    """Do nothing: everything runs in this process."""


@dataclass(frozen=True)
class Components:
    """Implementations of the ports: real engines in production, fakes in tests."""

    actor: Actor
    critic: Critic
    generator: Callable[[Callable[[State], Actor], Callable[[str], None], Path | None], Generator]
    """Function that builds the generator. The first argument returns the trainer of the actor at a state, when the
    weights of another state are required. The second receives messages about repaired failures and about what is
    awaited. The third is the folder for engine logs."""
    scorer: Scorer
    prompts: PromptsByStep
    source_digests: Mapping[str, str]
    """Role -> digest of the model source of its initial state."""
    reward_digest: str = ""
    """Digest of the reward models; empty: no reward model."""
    rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Key of a data table -> numbers of rows that were read, repeated, too long, left out, truncated and used."""
    close_trainers: Callable[[], None] = no_op
    """Stops the other processes of actor, critic and reward models."""
    prestart: Callable[[], None] = no_op
    """Starts all other processes in parallel. Called after the generator was built."""

    def close(self) -> None:
        try:
            self.close_trainers()
        finally:
            self.scorer.close()
