"""What every table of the recipe is, and the bounds its keys share."""

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

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
