"""Recipe tables -> trainers. What `wire` calls."""

import torch

from ppoctl.engines.megatron.actor import MegatronActor
from ppoctl.engines.megatron.critic import MegatronCritic
from ppoctl.engines.megatron.trainer import TrainerSettings
from ppoctl.recipe.schema import BySequences, ByTokens, ModelTable


def build_actor(
    model: ModelTable, batching: BySequences | ByTokens, *, temperature: float, device: torch.device | None = None
) -> MegatronActor:
    """An actor at no state yet: `start` or `load` builds the model. Sets up the process group, which must happen
    before a vLLM engine is made in the same process.

    `temperature` is the rollouts': updates divide the logits by it, as the generator did.
    """
    return MegatronActor(_settings(model, batching, temperature, device))


def build_critic(
    model: ModelTable, batching: BySequences | ByTokens, *, device: torch.device | None = None
) -> MegatronCritic:
    """A critic at no state yet, initialised from the base model; its value head starts at zero."""
    return MegatronCritic(_settings(model, batching, 1.0, device))


def _settings(
    model: ModelTable, batching: BySequences | ByTokens, temperature: float, device: torch.device | None
) -> TrainerSettings:
    default = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]
    return TrainerSettings(model.path, dtype, batching, device or default, temperature)
