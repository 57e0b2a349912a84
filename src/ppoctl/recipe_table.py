"""The base of the recipe's tables, the bounds that keys share, the effect of changing a key, and the table of a
model's parallel layout, which tables of several rooms have.

Every recipe key carries exactly one effect; a test proves it. RESULTS keys are fingerprinted by the stages that read
them: a committed stage is recalled only under equal ones. SPEED keys (batching, placement, deadlines) and REPORTING
keys are never fingerprinted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Effect(Enum):
    """The kind of thing that changing a key changes."""

    RESULTS = "results"
    SPEED = "speed"
    REPORTING = "reporting"


RESULTS = Effect.RESULTS
SPEED = Effect.SPEED
REPORTING = Effect.REPORTING

Positive = Field(gt=0)
AtLeastOne = Field(ge=1)
NotNegative = Field(ge=0)
Fraction = Field(ge=0, le=1)
OrOff = BeforeValidator(lambda value: None if value == "off" else value)
OrAll = BeforeValidator(lambda value: None if value == "all" else value)
"""Validators of keys that are not absent by default: a word makes them absent, as TOML has none for it."""
_WORDS = {OrOff: "off", OrAll: "all"}


def word_for_none(metadata: Sequence[object]) -> str | None:
    """The word that makes a key with this metadata absent; None: leaving it out does."""
    return next((word for validator, word in _WORDS.items() if validator in metadata), None)


Array = Field(strict=False)
"""Field of a tuple that TOML and JSON write as an array."""


@dataclass(frozen=True)
class KindOr:
    """Discriminator of alternatives that are told apart by `kind`; a table without one is the `usual` one."""

    usual: str
    __name__ = "kind"  # what pydantic calls it in errors

    def __call__(self, value: Any) -> str | None:
        """The name of the alternative that a table, or what is written of one, asks for; None where it is no
        table."""
        if isinstance(value, dict):
            return str(value.get("kind", self.usual))
        return getattr(value, "kind", None)


class Table(BaseModel):
    """Base of all tables: unknown keys are errors, values are frozen and of the written type (`"8"` is no number, `1`
    is no switch), docstrings become descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class ParallelTable(Table):
    """Megatron-Core's parallel layout of one role. A written table is complete: keys not given are 1 or off."""

    tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split each layer (Megatron-Core's `tensor_model_parallel_size`); divides attention heads and
    key/value heads."""
    pipeline: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split the layers among them (Megatron-Core's `pipeline_model_parallel_size`)."""
    stages_per_rank: Annotated[int, SPEED, AtLeastOne] = 1
    """Runs of layers on each pipeline rank (Megatron-Core's `virtual_pipeline_model_parallel_size`). More than one,
    the interleaved schedule, shortens the wait at the ends of a minibatch and costs more messages."""
    context: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split the tokens of a microbatch, within a sequence too (Megatron-Core's `context_parallel_size`).
    Raise it when one sequence is too long for a device."""
    data: Annotated[int, SPEED, AtLeastOne] = 1
    """Copies of the model that share the rows of a minibatch (Megatron-Core's `data_parallel_size`)."""
    sequence: Annotated[bool, SPEED] = False
    """Split norms and residuals over the tensor ranks too (Megatron-Core's `sequence_parallel`); a model with experts
    needs it where there are tensor ranks."""
    expert: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that share the experts of a layer (Megatron-Core's `expert_model_parallel_size`); divides their number.
    They are the data, context and tensor ranks seen another way: no more processes."""
    expert_tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Ranks that split each expert (Megatron-Core's `expert_tensor_parallel_size`); they too are those ranks seen
    another way. Experts are small: 1, each whole on its rank, suits nearly all models (Megatron-Core's own default is
    `tensor`)."""
    first_stage_layers: Annotated[int | None, SPEED, AtLeastOne] = None
    """Layers of the first pipeline rank, which also holds the embedding (Megatron-Core's
    `num_layers_in_first_pipeline_stage`); absent: as many as the others."""
    last_stage_layers: Annotated[int | None, SPEED, AtLeastOne] = None
    """Layers of the last pipeline rank, which also holds the output layer (Megatron-Core's
    `num_layers_in_last_pipeline_stage`); absent: as many as the others."""
    distributed_optimizer: Annotated[bool, SPEED] = False
    """Split main weights and moments over the data and context ranks (Megatron-Core's
    `use_distributed_optimizer`)."""

    @property
    def expert_ranks(self) -> int:
        """Ranks of a pipeline stage that hold one copy of all its experts."""
        return self.expert * self.expert_tensor

    @property
    def experts_span_data(self) -> bool:
        """Whether data ranks exchange tokens: then each must run as many microbatches as the others."""
        return self.tensor * self.context % self.expert_ranks != 0

    @property
    def virtual_pipeline(self) -> int | None:
        """Runs of layers on a rank as Megatron-Core takes it: None where there is only one."""
        return self.stages_per_rank if self.stages_per_rank > 1 else None

    @property
    def model_ranks(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """Processes of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        """Processes of the role."""
        return self.stage_ranks * self.pipeline

    def describe(self) -> str:
        """Settings that are not 1, off or absent, in words; `one process` where there are none."""
        set_here = {name: value for name, value in self if value != type(self).model_fields[name].default}
        words = [name if value is True else f"{name} {value}" for name, value in set_here.items()]
        return ", ".join(words).replace("_", " ") or "one process"
