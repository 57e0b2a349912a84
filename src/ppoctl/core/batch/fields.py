"""Fields of each kind of record: names, types and axes. Imports neither torch nor numpy.

A reader checks the required fields of a record by this table, `plan` counts the bytes of records by it, and
`selection.take` selects rows by the axes. A test compares the table with the classes in `records`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RecordField:
    """One field of a kind of record."""

    name: str
    dtype: Literal["bool", "uint8", "int32", "int64", "float32", "text", "json"]
    """Type of a tensor's elements; `text`: decoded responses; `json`: any other value in the metadata."""
    axes: Literal["", "B", "B R", "T", "N E"] = ""
    """Axes of a tensor, as in `records`. N: the input tokens of all rows, row by row; `input_lengths` has the number
    of each row. E: the experts of a token in all layers. A text or JSON field with axis B is a list with one entry
    per row, or a mapping of names to such lists. Empty: one value for the whole record."""
    is_optional: bool = False
    """Whether the field has a default. Settings then decide whether it is present."""


_ROLLOUTS = (
    RecordField("prompt_tokens", "int32", "T"),
    RecordField("prompt_lengths", "int64", "B"),
    RecordField("tokens", "int32", "B R"),
    RecordField("lengths", "int64", "B"),
    RecordField("mask", "bool", "B R"),
    RecordField("sampler_logprobs", "float32", "B R"),
    RecordField("finish", "int64", "B"),
    RecordField("seeds", "int64", "B"),
    RecordField("prompt_ids", "json", "B"),
    RecordField("sample_indices", "json", "B"),
    RecordField("texts", "text", "B"),
    RecordField("stamps", "json", "B"),
    RecordField("sends", "json", "B"),
    RecordField("episodes", "json", "B", is_optional=True),
    RecordField("segment_stamps", "json", "B", is_optional=True),
    RecordField("segment_tokens", "json", "B", is_optional=True),
    RecordField("experts", "uint8", "N E", is_optional=True),
)
_REWARDS = (
    RecordField("scores", "float32", "B"),
    RecordField("outcomes", "int64", "B"),
    RecordField("extras", "json", "B"),
    RecordField("outcome_messages", "json", "B"),
    RecordField("truths", "json", "B"),
    RecordField("token_scores", "float32", "B R", is_optional=True),
)

FIELDS: Mapping[str, tuple[RecordField, ...]] = {
    "rollouts": _ROLLOUTS,
    "partial_rollouts": _ROLLOUTS,
    "rewards": _REWARDS,
    "greedy_rollouts": _ROLLOUTS,
    "greedy_rewards": _REWARDS,
    "values": (
        RecordField("values", "float32", "B R"),
        RecordField("stamp", "json"),
        RecordField("behind", "float32", "B", is_optional=True),
    ),
    "logprobs": (
        RecordField("stamp", "json"),
        RecordField("gap", "json"),
        RecordField("actor", "float32", "B R", is_optional=True),
        RecordField("entropy", "float32", "B R", is_optional=True),
        RecordField("reference", "float32", "B R", is_optional=True),
        RecordField("full_kl", "float32", "B R", is_optional=True),
        RecordField("values", "float32", "B R", is_optional=True),
        RecordField("behind", "float32", "B", is_optional=True),
        RecordField("experts", "uint8", "N E", is_optional=True),
        RecordField("input_lengths", "int64", "B", is_optional=True),
    ),
    "correction": (
        RecordField("weights", "float32", "B R"),
        RecordField("mask", "bool", "B R"),
        RecordField("summary", "json"),
    ),
    "advantages": (
        RecordField("advantages", "float32", "B R"),
        RecordField("returns", "float32", "B R", is_optional=True),
        RecordField("token_rewards", "float32", "B R"),
        RecordField("mask", "bool", "B R"),
        RecordField("carry_out", "json"),
        RecordField("summary", "json"),
        RecordField("shaped", "float32", "B", is_optional=True),
        RecordField("kl_coef", "json", is_optional=True),
        RecordField("trains_actor", "json", is_optional=True),
    ),
    "update": (
        RecordField("role", "json"),
        RecordField("step", "json"),
        RecordField("parent", "json"),
        RecordField("lineage", "json"),
        RecordField("updates", "json"),
        RecordField("per_minibatch", "json"),
        RecordField("summary", "json"),
        RecordField("gap", "json", is_optional=True),
    ),
    "evaluation": (
        RecordField("stamp", "json"),
        RecordField("summary", "json"),
        RecordField("rows", "json", "B"),
    ),
    "selection": (
        RecordField("rounds", "int64", "B"),
        RecordField("rows", "int64", "B"),
        RecordField("prompt_ids", "json", "B"),
        RecordField("sample_indices", "json", "B"),
        RecordField("is_full", "json"),
        RecordField("summary", "json"),
    ),
}
"""Kind of record -> its fields, in the order of its class. Fields that are never written are not listed."""
