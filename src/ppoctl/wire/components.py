"""What is plugged in: the ports' implementations, as one record. Real engines in `engines.py`, fakes in tests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from ppoctl.batch.prompts import Prompts
from ppoctl.batch.records import State
from ppoctl.ports import Actor, Critic, Generator, Scorer


@runtime_checkable
class PromptsByStep(Protocol):
    """Where prompts come from: a pure function of (seed, step)."""

    def prompts_for(self, step: int) -> Prompts: ...

    def evaluation_sets(self) -> Mapping[str, Prompts]: ...


def no_op() -> None:
    """Everything is in this process."""


@dataclass(frozen=True)
class Components:
    """What is plugged in: real engines in the product, fakes at these ports in tests."""

    actor: Actor
    critic: Critic
    generator: Callable[[Callable[[State], Actor], Callable[[str], None], Path | None], Generator]
    """The generator asks the first argument for the actor when it has to be at another state; it says what went wrong
    and was mended, and what is being waited for, to the second; its engines write their logs into the folder."""
    scorer: Scorer
    prompts: PromptsByStep
    source_digests: Mapping[str, str]
    """Digest of the model source that the initial state of each role descends from."""
    reward_digest: str = ""
    """Digest of the reward models; empty: there is none."""
    rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Numbers of rows that were read, repeated, too long, left out, cut and used, by the key of their table."""
    close_trainers: Callable[[], None] = no_op
    """Ends the processes of actor, critic and reward models that are not this one."""
    prestart: Callable[[], None] = no_op
    """Starts all processes that are not this one side by side, once there is a generator."""

    def close(self) -> None:
        try:
            self.close_trainers()
        finally:
            self.scorer.close()
