"""What every table of the recipe is, the bounds its keys share, and what changing a key changes.

Every recipe key carries exactly one effect; a test proves it. RESULTS keys are fingerprinted by the stages that read
them: a committed stage is recalled only under equal ones. SPEED keys (batching, placement, deadlines) and REPORTING
keys are never fingerprinted.
"""

from enum import Enum

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Effect(Enum):
    """What changing a key changes."""

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
OFF = "off"
OrOff = BeforeValidator(lambda value: None if value == OFF else value)
"""TOML has no word for absent, and some keys are not absent by default."""
Array = Field(strict=False)
"""TOML and JSON have arrays, Python has tuples."""


class Table(BaseModel):
    """Base of all tables: unknown keys are errors, values are frozen and of the written type (`"8"` is no number, `1`
    is no switch), docstrings become descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
