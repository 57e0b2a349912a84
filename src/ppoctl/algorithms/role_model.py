"""The model that a role or the reference starts from: the base model, or its own model."""

from dataclasses import dataclass

from ppoctl.algorithms.roles import POLICY, REFERENCE, head_of
from ppoctl.algorithms.step_recipe import StepRecipe
from ppoctl.core.key_path import KeyPath
from ppoctl.models.convert.adapters import trunk_layers
from ppoctl.models.model import Model, ReferenceKind, reference_kind
from ppoctl.models.model_tables import CriticModelTable, ReferenceModelTable
from ppoctl.models.shape import ModelShape
from ppoctl.models.shape_reader import shape_if_known
from ppoctl.models.trainable import Trainable
from ppoctl.rewards.model_reward import ModelScorer


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


def model_of(recipe: StepRecipe, role: str) -> RoleModel:
    """Return the model that a trained role starts from, or the model of `REFERENCE`."""
    model, own = recipe.model, own_models(recipe).get(role)
    if own is None:
        return RoleModel(model.path, model.dtype, ("model", "path"))
    dtype = own.dtype if isinstance(own, CriticModelTable) else None
    return RoleModel(own.path, dtype or model.dtype, ("model", role, "path"))


def model_in(recipe: StepRecipe, role: str, shape: ModelShape) -> Model:
    """Return the description of a trained role's model, whose source has this shape. A reference is described whether
    or not a stage uses it."""
    trainable = trainable_of(recipe, role)
    if role != POLICY:
        return Model(shape, head_of(role), trainable)
    return Model(shape, head_of(role), trainable, recipe.value_head, reference_of(recipe))


def reference_of(recipe: StepRecipe) -> ReferenceKind:
    """Return the kind of the reference, whether or not a stage uses it."""
    is_initial = model_of(recipe, REFERENCE).path == model_of(recipe, POLICY).path
    return reference_kind(trainable_of(recipe, POLICY), is_initial=is_initial)


def shared_layers(recipe: StepRecipe) -> int:
    """Return the number of layers that one forward pass computes for both actor and reference: the frozen trunk. 0:
    there is no trunk, the shape of the model is not known, or the reference shares no weights. The trainer shares by
    the same rule (`engines.megatron.reference`)."""
    shape = model_of(recipe, POLICY).shape
    if reference_of(recipe) != "shared" or shape is None:
        return 0
    return trunk_layers(model_in(recipe, POLICY, shape))


def own_models(recipe: StepRecipe) -> dict[str, CriticModelTable | ReferenceModelTable]:
    """Return name -> table of its own model (`model.NAME`), for each trained role, and for `REFERENCE`, that does not
    start from `model.path`."""
    model = getattr(recipe, "model", None)  # absent in a recipe with errors (`loading.partial`)
    tables = {name: getattr(model, name, None) for name in (*recipe.trained, REFERENCE)}
    return {
        name: table for name, table in tables.items() if isinstance(table, CriticModelTable | ReferenceModelTable)
    }


def reward_models(recipe: StepRecipe) -> dict[KeyPath, ModelScorer]:
    """Return the reward tables that have a model, by key path. The dotted form of the path is the role name of the
    reward model."""
    scorers = {("reward", *below): scorer for below, scorer in recipe.reward.scorers.items()}
    return {key: scorer for key, scorer in scorers.items() if isinstance(scorer, ModelScorer)}


def reward_model_of(recipe: StepRecipe, key: KeyPath) -> RoleModel:
    """Return the model of the reward table at this key."""
    table = reward_models(recipe)[key]
    return RoleModel(table.path, table.dtype, (*key, "path"))


def lora_starts(recipe: StepRecipe) -> dict[str, str]:
    """Return role -> folder or hub id of the peft adapter that it starts from, for each trained role that has one."""
    starts: dict[str, str] = {}
    for role, table in recipe.trained.items():
        # A recipe with errors (`loading.partial`) lacks keys.
        start = getattr(getattr(getattr(table, "train", None), "lora", None), "start", None)
        if start is not None:
            starts[role] = start
    return starts


def trainable_of(recipe: StepRecipe, role: str) -> Trainable:
    """Return the parameters of a role's model that train."""
    table = recipe.trained[role]
    return Trainable(freeze=table.freeze) if table.train is None else table.train.trainable(table.freeze)
