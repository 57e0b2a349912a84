"""Components of a run: the implementations of the ports, in one object. `engines.py` builds the real components;
tests use fakes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ppoctl.core.batch.prompts import Prompts
from ppoctl.core.batch.records import State
from ppoctl.core.ports import Actor, Dialogue, Environments, Generator, Scorer, Trainer
from ppoctl.engines.weights.engine_calls import Reply


@runtime_checkable
class PromptsByStep(Protocol):
    """Source of prompts: a pure function of seed, step and batch."""

    def prompts_for(self, step: int, batch: int | None = None) -> Prompts:
        """Return a batch of prompts for a step, by default batch `step - 1`. Batches count from 0 over the run."""
        ...

    def evaluation_sets(self) -> Mapping[str, Prompts]: ...


@runtime_checkable
class OtherProcesses(Protocol):
    """Processes of a trained role or of an engine, which are not this process."""

    def begin(self, method: str, *arguments: Any) -> Reply:
        """Call a method of each process without waiting for the results."""
        ...


def no_op() -> None:
    """Do nothing, because everything runs in this process."""


@dataclass(frozen=True)
class Components:
    """Implementations of the ports: real engines in production, fakes in tests."""

    trainers: Mapping[str, Trainer]
    """Role -> its trainer, for each role that the recipe trains."""
    generator: Callable[[Callable[[State], Actor], Callable[[str], None], Path | None], Generator]
    """Function that builds the generator (vLLM). Its first argument is a function that returns the policy's trainer
    at a state. The generator calls that function when it requires the weights of another state. The second argument
    receives messages about repaired failures and waiting. The third is the folder for engine logs."""
    scorer: Scorer
    prompts: PromptsByStep
    source_digests: Mapping[str, str]
    """Role -> digest of the model source of its initial state."""
    environments: Environments | None = None
    """Environments of rollouts; None: their responses have one turn."""
    eval_environments: Environments | None = None
    """Environments of evaluations, which may be those of the rollouts; None: their responses have one turn."""
    dialogue: Dialogue | None = None
    """Token ids of conversations; None: there is no environment."""
    reward_digest: str = ""
    """Digest of the reward models; empty: no reward model."""
    rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Key of a data table -> numbers of rows by name: read, repeated, too long, left out, truncated and used."""
    close_trainers: Callable[[], None] = no_op
    """Function that stops the other processes of trained roles and reward models."""
    processes: Callable[[], Mapping[str, OtherProcesses]] = dict
    """Function that returns the processes of trained roles, by role, and of engines (`generator-0`), except this
    process. It is called after the generator was built."""
    prestart: Callable[[], None] = no_op
    """Function that starts all other processes in parallel. It is called after the generator was built."""

    def close(self) -> None:
        try:
            self.close_trainers()
        finally:
            self.scorer.close()
            for environments in (self.environments, self.eval_environments):
                if environments is not None:
                    environments.shutdown()
