"""The critic: the base model with a value head instead of logits."""

from jaxtyping import Float
from torch import Tensor

from ppoctl.batch.records import Rollouts
from ppoctl.engines.megatron.model import ValueModel
from ppoctl.engines.megatron.trainer import MegatronTrainer


class MegatronCritic(MegatronTrainer):
    """A `ports.Critic`."""

    role = "critic"
    model_class = ValueModel

    def values(self, rollouts: Rollouts) -> Float[Tensor, "B R"]:
        """V of the state before each response token."""
        return self.forward(self.wrapped, rollouts).outputs
