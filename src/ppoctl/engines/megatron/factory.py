"""Recipe tables -> the settings of a trainer. What `wire` calls."""

import torch

from ppoctl.engines.megatron.rank import TrainerSettings
from ppoctl.model.folder import model_folder
from ppoctl.model.shape_reader import read_shape
from ppoctl.recipe.origins import KeyPath, dotted
from ppoctl.recipe.parallel import layouts, reward_models, saved_layout
from ppoctl.recipe.role_model import model_of
from ppoctl.recipe.schema import ByTokens, ParallelTable, Recipe
from ppoctl.recipe.sizes import reward_tokens

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trainer_settings(recipe: Recipe, role: str) -> TrainerSettings:
    """What each process of the role is made from."""
    table = recipe.actor if role == "actor" else recipe.critic
    model = model_of(recipe, role)
    return TrainerSettings(
        role=role,
        model=model.path,
        dtype=DTYPES[model.dtype],
        batching=table.batching,
        recompute=table.recompute,
        parallel=layouts(recipe)[role],
        reshardable=saved_layout(recipe, role)["reshardable"],
        collective_s=_patience_s(recipe),
    )


def reward_settings(recipe: Recipe, key: KeyPath) -> TrainerSettings:
    """What each process of the reward model at this key is made from. Raises MissingAssetError where its folder is
    not here."""
    table = reward_models(recipe)[key]
    most = reward_tokens(table, read_shape(model_folder(table.path)))
    return TrainerSettings(
        role=dotted(key),
        model=table.path,
        dtype=DTYPES[table.dtype],
        batching=ByTokens(max_tokens_per_microbatch=most),
        parallel=table.parallel or ParallelTable(),
        collective_s=_patience_s(recipe),
        label=table.label,
    )


def _patience_s(recipe: Recipe) -> float:
    """How long ranks wait for each other: the driver's deadline of one answer comes first, and then a minute to say
    who is late."""
    cluster = recipe.cluster
    own = (cluster.forward_deadline_s, cluster.update_deadline_s, cluster.save_deadline_s)
    return max(filter(None, (cluster.call_deadline_s, *own))) + cluster.start_deadline_s + 60.0
