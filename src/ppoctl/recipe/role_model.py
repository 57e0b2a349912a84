"""The model that a role starts from: the base model, or the role's own model."""

from dataclasses import dataclass

from ppoctl.model.shape import ModelShape
from ppoctl.model.shape_reader import shape_if_known
from ppoctl.recipe.origins import KeyPath
from ppoctl.recipe.parallel import reward_models
from ppoctl.recipe.schema import CriticModelTable, Recipe


@dataclass(frozen=True)
class RoleModel:
    """The model source of one role."""

    path: str
    """Folder or hub id."""
    dtype: str
    """Dtype of weights and activations, float32 or bfloat16."""
    key: KeyPath
    """Recipe key that has the path as its value."""

    @property
    def weight_bytes(self) -> int:
        """Bytes per weight."""
        return 4 if self.dtype == "float32" else 2

    @property
    def shape(self) -> ModelShape | None:
        """The architecture from the model's config.json, or from the copy of config.json that ppoctl ships; None if
        neither file exists."""
        return shape_if_known(self.path)


def model_of(recipe: Recipe, role: str) -> RoleModel:
    """Return the model that a trained role starts from."""
    model, own = recipe.model, own_models(recipe).get(role)
    if own is None:
        return RoleModel(model.path, model.dtype, ("model", "path"))
    return RoleModel(own.path, own.dtype or model.dtype, ("model", role, "path"))


def own_models(recipe: Recipe) -> dict[str, CriticModelTable]:
    """Return role -> table of the role's own model (`model.ROLE`), for each trained role that does not start from
    `model.path`."""
    model = getattr(recipe, "model", None)  # absent in a recipe with errors (`loading.partial`)
    tables = {role: getattr(model, role, None) for role in recipe.trained}
    return {role: table for role, table in tables.items() if isinstance(table, CriticModelTable)}


def reward_model_of(recipe: Recipe, key: KeyPath) -> RoleModel:
    """Return the model of the reward table at this key."""
    table = reward_models(recipe)[key]
    return RoleModel(table.path, table.dtype, (*key, "path"))
