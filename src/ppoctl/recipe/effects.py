"""What changing a key changes. Every recipe key carries exactly one of these; a test proves it.

RESULTS keys are fingerprinted by the stages that read them: a committed stage is recalled only under equal ones.
SPEED keys (batching, placement, deadlines) and REPORTING keys are never fingerprinted.
"""

from enum import Enum


class Effect(Enum):
    RESULTS = "results"
    SPEED = "speed"
    REPORTING = "reporting"


RESULTS = Effect.RESULTS
SPEED = Effect.SPEED
REPORTING = Effect.REPORTING
