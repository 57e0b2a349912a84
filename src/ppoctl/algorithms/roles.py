"""Facts about the roles of a recipe. A role is a model that a step may train; its name is the name of its table."""

from typing import Final

from ppoctl.models.head import Head

POLICY: Final = "actor"
"""The role that generates responses, is evaluated, is exported by default, and is kept as the best."""
CRITIC: Final = "critic"
"""The role whose values the advantages of PPO read. Without such advantages, a recipe has no critic."""

REFERENCE: Final = "reference"
"""The frozen model that a KL penalty compares the policy with. It is not a role: its weights are in the processes of
the policy, and no step trains it."""


def head_of(role: str) -> Head:
    """Return the head of the model of a role: tokens for the policy, values for every other role."""
    return "token" if role == POLICY else "value"


def head_of_model(name: str) -> Head:
    """Return the head of the model of a role, or of the reference, which has the policy's head."""
    return head_of(POLICY if name == REFERENCE else name)


def role_with(head: Head) -> str:
    """Return the role that a checkpoint outside a run has: the policy or, if the head returns values, the critic."""
    return POLICY if head == "token" else "critic"
