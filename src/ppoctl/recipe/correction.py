"""The recipe's tables of the correction between the sampler's and the trainer's log-probs."""

from typing import Annotated, Literal

from pydantic import Field

from ppoctl.table import RESULTS, Table


class NoCorrection(Table):
    """No correction: the sampler's log-probs are trusted to be the trainer's."""

    kind: Annotated[Literal["none"], RESULTS]
    """No weights."""


class TruncatedImportance(Table):
    """Truncated importance sampling: each token's loss is weighted by min(trainer / sampler probability,
    max_ratio)."""

    kind: Annotated[Literal["tis"], RESULTS]
    """Truncated importance sampling."""
    max_ratio: Annotated[float, RESULTS, Field(gt=1)] = 2.0
    """Largest importance weight of a token."""


Correction = Annotated[NoCorrection | TruncatedImportance, Field(discriminator="kind")]
