"""Parts that the reference of the KL penalty shares with the actor: frozen weights, and the pass of the frozen trunk.

The trainer shares by the same rule (`engines.megatron.reference`). The result of a stage does not depend on it.
"""

from ppoctl.convert.adapters import trunk_layers
from ppoctl.recipe.role_model import model_of, trainable_of
from ppoctl.recipe.roles import POLICY, REFERENCE
from ppoctl.recipe.schema import Recipe


def shares_weights(recipe: Recipe) -> bool:
    """Return whether the weights of the reference that are frozen in the actor are those of the actor: the reference
    is the initial model of the actor, and only a part of the actor trains."""
    is_initial = model_of(recipe, REFERENCE).path == model_of(recipe, POLICY).path
    return is_initial and not trainable_of(recipe, POLICY).is_all


def shared_layers(recipe: Recipe) -> int:
    """Return the number of layers that one forward pass computes for both actor and reference: the frozen trunk. 0:
    there is no trunk, the shape of the model is not known, or the reference is the actor without adapters."""
    if not shares_weights(recipe) or trainable_of(recipe, POLICY).lora is not None:
        return 0
    shape = model_of(recipe, POLICY).shape
    return 0 if shape is None else trunk_layers(trainable_of(recipe, POLICY), shape)
