"""Recipe tables -> the settings of a trainer. What `wire` calls."""

import torch

from ppoctl.engines.megatron.rank import TrainerSettings
from ppoctl.recipe.parallel import layouts, saved_layout
from ppoctl.recipe.role_model import model_of
from ppoctl.recipe.schema import Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trainer_settings(recipe: Recipe, role: str) -> TrainerSettings:
    """What each process of the role is made from."""
    table, cluster = recipe.actor if role == "actor" else recipe.critic, recipe.cluster
    model = model_of(recipe, role)
    own = (cluster.forward_deadline_s, cluster.update_deadline_s, cluster.save_deadline_s)
    return TrainerSettings(
        role=role,
        model=model.path,
        dtype=DTYPES[model.dtype],
        batching=table.batching,
        recompute=table.recompute,
        parallel=layouts(recipe)[role],
        reshardable=saved_layout(recipe, role)["reshardable"],
        # The driver's deadline of one answer comes first, and then a minute to say who is late.
        collective_s=max(filter(None, (cluster.call_deadline_s, *own))) + cluster.start_deadline_s + 60.0,
    )
