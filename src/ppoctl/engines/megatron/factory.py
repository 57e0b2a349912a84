"""Recipe tables -> trainers in this process, and the settings of any. What `wire` calls."""

import torch

from ppoctl.engines.megatron.rank import MegatronRank, TrainerSettings
from ppoctl.engines.megatron.ranks import ThisProcess
from ppoctl.engines.megatron.trainer import MegatronActor, MegatronCritic
from ppoctl.recipe.parallel import layouts
from ppoctl.recipe.saved_layout import saved_layout
from ppoctl.recipe.schema import BySequences, ByTokens, ModelTable, Recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trainer_settings(recipe: Recipe, role: str) -> TrainerSettings:
    """What each process of the role is made from. The temperature is the rollouts': updates divide the logits by it,
    as the generator did."""
    table, cluster = recipe.actor if role == "actor" else recipe.critic, recipe.cluster
    own = (cluster.forward_deadline_s, cluster.update_deadline_s, cluster.save_deadline_s)
    return TrainerSettings(
        role=role,
        model=recipe.model.critic or recipe.model.path if role == "critic" else recipe.model.path,
        dtype=DTYPES[recipe.model.dtype],
        batching=table.batching,
        recompute=table.recompute,
        parallel=layouts(recipe)[role],
        reshardable=saved_layout(recipe, role)["reshardable"],
        temperature=recipe.rollout.temperature,
        # The driver's deadline of one answer comes first, and then a minute to say who is late.
        collective_s=max(filter(None, (cluster.call_deadline_s, *own))) + cluster.start_deadline_s + 60.0,
    )


def build_actor(
    model: ModelTable, batching: BySequences | ByTokens, *, temperature: float, device: torch.device | None = None
) -> MegatronActor:
    """An actor in this process, at no state yet: `start` or `load` builds the model. Sets up the process group,
    which must happen before a vLLM engine is made in the same process.
    """
    settings = TrainerSettings(
        role="actor",
        model=model.path,
        dtype=DTYPES[model.dtype],
        batching=batching,
        temperature=temperature,
        device=None if device is None else str(device),
    )
    return MegatronActor(settings, ThisProcess(MegatronRank(settings)))


def build_critic(
    model: ModelTable, batching: BySequences | ByTokens, *, device: torch.device | None = None
) -> MegatronCritic:
    """A critic in this process, at no state yet, initialised from the base model; its value head starts at zero."""
    settings = TrainerSettings(
        role="critic",
        model=model.path,
        dtype=DTYPES[model.dtype],
        batching=batching,
        device=None if device is None else str(device),
    )
    return MegatronCritic(settings, ThisProcess(MegatronRank(settings)))
