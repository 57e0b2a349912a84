"""The base of the recipe's tables, the bounds that keys share, and the effect of changing a key.

Every recipe key carries exactly one effect; a test proves it. RESULTS keys are fingerprinted by the stages that read
them: a committed stage is recalled only under equal ones. SPEED keys (batching, placement, deadlines) and REPORTING
keys are never fingerprinted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

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
