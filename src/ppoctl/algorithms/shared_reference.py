"""The pass of the frozen trunk, which the reference of the KL penalty shares with the actor.

The trainer shares by the same rule (`engines.megatron.reference`). The result of a stage does not depend on it.
"""

from ppoctl.algorithms.role_model import model_in, model_of, reference_of
from ppoctl.algorithms.roles import POLICY
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.models.convert.adapters import trunk_layers


def shared_layers(recipe: StepRecipe) -> int:
    """Return the number of layers that one forward pass computes for both actor and reference: the frozen trunk. 0:
    there is no trunk, the shape of the model is not known, or the reference shares no weights."""
    shape = model_of(recipe, POLICY).shape
    if reference_of(recipe) != "shared" or shape is None:
        return 0
    return trunk_layers(model_in(recipe, POLICY, shape))
