"""The frozen reference on a rank of the actor: a second model, which always has the weights of its source."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ppoctl.engines.megatron.model import PackedModel


class ReferenceModel:
    """A model in the dtype of the actor. Its weights are read from its source on first use, and never from a state of
    this run, so that a resumed run keeps its reference."""

    def __init__(
        self, build: Callable[[], Sequence[PackedModel]], read_source: Callable[[Sequence[PackedModel]], None]
    ) -> None:
        """`build` creates a model without weights, and `read_source` loads the source's weights into it."""
        self._build = build
        self._read_source = read_source
        self._stages: list[PackedModel] = []

    def stages(self) -> Sequence[PackedModel]:
        """Return this rank's pipeline stages. Raises EnvironmentProblemError or RecipeError if the source is missing,
        broken or not supported."""
        if not self._stages:
            stages = [stage.requires_grad_(requires_grad=False) for stage in self._build()]
            self._read_source(stages)
            self._stages = stages
        return self._stages

    def weights(self) -> Iterator[Tensor]:
        """Yield the weights that are in memory. Yields nothing before the first use."""
        return (weight for stage in self._stages for weight in stage.parameters())
