"""The actor, and the reference that lives beside it."""

from collections.abc import Iterator

from jaxtyping import Float
from torch import Tensor

from ppoctl.batch.records import Rollouts, State
from ppoctl.engines.megatron.model import LogprobModel, PackedModel
from ppoctl.engines.megatron.trainer import MegatronTrainer
from ppoctl.engines.megatron.weights import load_weights, parts_of
from ppoctl.ports import NamedWeights


class MegatronActor(MegatronTrainer):
    """A `ports.Actor`."""

    role = "actor"
    model_class = LogprobModel
    _reference: PackedModel | None = None

    def logprobs(
        self, rollouts: Rollouts, *, temperature: float
    ) -> tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]:
        """Log-prob of each response token and entropy of its distribution (nats)."""
        found = self.forward(self.wrapped, rollouts, temperature=temperature)
        assert found.entropy is not None
        return found.outputs, found.entropy

    def reference_logprobs(self, rollouts: Rollouts, *, temperature: float) -> Float[Tensor, "B R"]:
        """The same under the frozen initial weights: a second model in the model's dtype, always read from the
        model source (never from a saved state, so a resumed run keeps its anchor), on first use."""
        if self._reference is None:
            reference = self.build().requires_grad_(requires_grad=False)
            load_weights(reference, self.source[0])
            self._reference = reference
        return self.forward(self._reference, rollouts, temperature=temperature).outputs

    def weights(self, state: State) -> NamedWeights:
        """What the generator loads. Tensors are views of the parameters, except where Megatron's fused layout
        interleaves them."""
        model = self.wrapped.module

        def tensors() -> Iterator[tuple[str, Tensor]]:
            return ((part.name, part.read()) for part in parts_of(model))

        return NamedWeights(state=state, names=tuple(part.name for part in parts_of(model)), tensors=tensors)
