"""Conversion of recipe tables to the settings of a trainer, called by `wire`."""

import torch

from ppoctl.algorithms.role_model import model_of, reward_models, trainable_of
from ppoctl.algorithms.role_table import ByTokens
from ppoctl.algorithms.roles import POLICY, REFERENCE
from ppoctl.algorithms.sizes import reward_tokens
from ppoctl.core.key_path import KeyPath, dotted
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.engines.megatron.megatron_config import UNBALANCED, RouterBalance
from ppoctl.engines.megatron.rank_settings import TrainerSettings
from ppoctl.models.folder import model_folder
from ppoctl.models.shape_reader import read_shape
from ppoctl.models.trainable_tables import AdaptersTable
from ppoctl.recipe.parallel import layouts, saved_layout
from ppoctl.recipe.schema import Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trainer_settings(recipe: Recipe, role: str) -> TrainerSettings:
    """Return the settings from which each process of the role creates its model."""
    table = recipe.trained[role]
    model = model_of(recipe, role)
    balance = RouterBalance(recipe.actor.router_aux_loss_coef, recipe.actor.router_bias_rate)
    return TrainerSettings(
        role=role,
        model=model.path,
        dtype=DTYPES[model.dtype],
        batching=table.batching,
        recompute=table.recompute,
        kernels=table.kernels,
        parallel=layouts(recipe)[role],
        reshardable=saved_layout(recipe, role)["reshardable"],
        collective_s=_collective_timeout_s(recipe),
        reference=model_of(recipe, REFERENCE).path if role == POLICY else None,
        trainable=trainable_of(recipe, role),
        seed=recipe.seed,
        adapters=table.train.lora.start if isinstance(table.train, AdaptersTable) else None,
        value_head=recipe.value_head if role == POLICY else None,
        optimizer_on=table.optimizer.on,
        balance=balance if role == POLICY else UNBALANCED,
    )


def reward_settings(recipe: Recipe, key: KeyPath) -> TrainerSettings:
    """Return the settings from which each process of a reward model creates the model; `key` is the key of its recipe
    table. Raises MissingAssetError if the model folder is not on this machine."""
    table = reward_models(recipe)[key]
    max_tokens = reward_tokens(table, read_shape(model_folder(table.path)))
    return TrainerSettings(
        role=dotted(key),
        model=table.path,
        dtype=DTYPES[table.dtype],
        batching=ByTokens(max_tokens_per_microbatch=max_tokens),
        parallel=table.parallel or ParallelTable(),
        collective_s=_collective_timeout_s(recipe),
        label=table.label,
    )


def _collective_timeout_s(recipe: Recipe) -> float:
    """Return how long ranks wait for each other. This timeout must exceed the driver's deadline of a call by a
    minute: the driver has to report which ranks are late before a collective fails."""
    cluster = recipe.cluster
    deadlines = (cluster.forward_deadline_s, cluster.update_deadline_s, cluster.save_deadline_s)
    return max(filter(None, (cluster.call_deadline_s, *deadlines))) + cluster.start_deadline_s + 60.0
