"""Base class of all recipe tables, bounds and effects of keys, and the table of a parallel layout.

The tables are in several packages, which all import this module. Every recipe key has exactly one effect, which a
test checks. The fingerprint of a stage covers the RESULTS keys that the stage reads: a committed stage is reused only
if these keys have the same values. SPEED keys (batching, placement, deadlines) and REPORTING keys are never
fingerprinted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Effect(Enum):
    """Effect of changing a key."""

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
OrMixed = BeforeValidator(lambda value: None if value == "mixed" else value)
OrAllLinear = BeforeValidator(lambda value: None if value == "all-linear" else value)
"""`OrOff`, `OrAll`, `OrMixed` and `OrAllLinear` are validators of keys for which None has a word. The word "off",
"all", "mixed" or "all-linear" sets such a key to None, which TOML cannot express."""
_WORDS = {OrOff: "off", OrAll: "all", OrMixed: "mixed", OrAllLinear: "all-linear"}


def word_for_none(metadata: Sequence[object]) -> str | None:
    """Return the word that sets a key with this metadata to None; None: the key has no such word."""
    return next((word for validator, word in _WORDS.items() if validator in metadata), None)


Array = Field(strict=False)
"""Field of a tuple, which TOML and JSON write as an array."""


@dataclass(frozen=True)
class KindOr:
    """Discriminator that selects an alternative by the value of a key; a table without the key is the `usual`
    alternative."""

    usual: str
    key: str = "kind"
    __name__ = "kind"  # pydantic uses this name in errors

    def __call__(self, value: Any) -> str | None:
        """Return the name of the alternative that a table, or a mapping of written keys, selects; None for other
        values."""
        if isinstance(value, dict):
            return str(value.get(self.key, self.usual))
        return getattr(value, self.key, self.usual if isinstance(value, BaseModel) else None)


class Table(BaseModel):
    """Base class of all tables. Unknown keys are errors, values are frozen and never converted (`"8"` is not a
    number, `1` is not a boolean), and docstrings become descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def joined(name: str, kind: type[Table], use: type[Table]) -> Any:
    """Return a table class of this name with the keys of both tables, and the docstring of the first. The keys have
    their descriptions already: pydantic would search every loaded module for the source of the class."""
    config = ConfigDict(use_attribute_docstrings=False)
    return type(name, (kind, use), {"__doc__": kind.__doc__, "__module__": kind.__module__, "model_config": config})


class ParallelTable(Table):
    """Parallel layout of one role in Megatron-Core. If the table is written, its missing keys are 1 or off."""

    tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of ranks that split each layer (Megatron-Core's `tensor_model_parallel_size`). It must divide the
    numbers of attention heads and key/value heads."""
    pipeline: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of ranks that split the sequence of layers (Megatron-Core's `pipeline_model_parallel_size`)."""
    stages_per_rank: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of virtual pipeline stages on each pipeline rank (Megatron-Core's
    `virtual_pipeline_model_parallel_size`). A value above 1 selects the interleaved schedule, which shortens the idle
    time at both ends of a minibatch and requires more communication."""
    context: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of ranks that split the tokens of each sequence (Megatron-Core's `context_parallel_size`). Raise this
    number if a sequence is too long for one device."""
    data: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of copies of the model, which split the rows of a minibatch (Megatron-Core's `data_parallel_size`)."""
    sequence: Annotated[bool, SPEED] = False
    """Whether norms and residuals are split over the tensor ranks too (Megatron-Core's `sequence_parallel`). A model
    with experts requires it if `tensor` is above 1."""
    expert: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of ranks that share the experts of a layer (Megatron-Core's `expert_model_parallel_size`). It must
    divide the number of experts. Expert parallelism regroups the data, context and tensor ranks; it adds no
    processes."""
    expert_tensor: Annotated[int, SPEED, AtLeastOne] = 1
    """Number of ranks that split each expert (Megatron-Core's `expert_tensor_parallel_size`); it regroups existing
    ranks too. Experts are small, so 1 (each expert on one rank) suits nearly all models. Megatron-Core's default is
    `tensor`."""
    first_stage_layers: Annotated[int | None, SPEED, AtLeastOne] = None
    """Number of layers on the first pipeline rank, which also holds the embedding (Megatron-Core's
    `num_layers_in_first_pipeline_stage`); absent: as many as on the other ranks."""
    last_stage_layers: Annotated[int | None, SPEED, AtLeastOne] = None
    """Number of layers on the last pipeline rank, which also holds the output layer (Megatron-Core's
    `num_layers_in_last_pipeline_stage`); absent: as many as on the other ranks."""
    distributed_optimizer: Annotated[bool, SPEED] = False
    """Whether main weights and moments are sharded over the data and context ranks (Megatron-Core's
    `use_distributed_optimizer`)."""

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that together hold one copy of all experts of a pipeline stage."""
        return self.expert * self.expert_tensor

    @property
    def experts_span_data(self) -> bool:
        """Whether data ranks exchange tokens; then all of them must run the same number of microbatches."""
        return self.tensor * self.context % self.expert_ranks != 0

    @property
    def virtual_pipeline(self) -> int | None:
        """Number of virtual pipeline stages per rank, as Megatron-Core expects it: None if there is only one."""
        return self.stages_per_rank if self.stages_per_rank > 1 else None

    @property
    def model_ranks(self) -> int:
        """Number of tensor and pipeline ranks, which hold one copy of the model."""
        return self.tensor * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """Number of processes of one pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        """Number of processes of the role."""
        return self.stage_ranks * self.pipeline

    def describe(self) -> str:
        """Return the settings that are not 1, off or absent, in words; `one process` if every setting is."""
        changed = {name: value for name, value in self if value != type(self).model_fields[name].default}
        words = [name if value is True else f"{name} {value}" for name, value in changed.items()]
        return ", ".join(words).replace("_", " ") or "one process"
