"""Shapes of the models that a recipe trains."""

from ppoctl.model.shape import ModelShape
from ppoctl.recipe.role_model import model_of
from ppoctl.recipe.schema import Recipe


def shapes_of(recipe: Recipe) -> dict[str, ModelShape] | None:
    """Return trained role -> shape of the model that the role starts from.

    None: a model has neither a local folder nor a shipped config.json.
    """
    shapes = {role: model_of(recipe, role).shape for role in recipe.trained}
    known = {role: shape for role, shape in shapes.items() if shape is not None}
    return known if len(known) == len(shapes) else None
