"""The frozen reference of an actor's rank: a second model that always has the weights of the model source."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ppoctl.engines.megatron.model import PackedModel


class ReferenceModel:
    """The initial weights in the model's dtype, read on first use and never from a saved state: a run that was
    resumed keeps its anchor."""

    def __init__(
        self, build: Callable[[], Sequence[PackedModel]], read_source: Callable[[Sequence[PackedModel]], None]
    ) -> None:
        """Given are how a model without weights is built and how the source's weights get into it."""
        self._build = build
        self._read_source = read_source
        self._stages: list[PackedModel] = []

    def stages(self) -> Sequence[PackedModel]:
        """This rank's pipeline stages. Raises EnvironmentProblemError or RecipeError where the source is missing,
        broken or not supported."""
        if not self._stages:
            stages = [stage.requires_grad_(requires_grad=False) for stage in self._build()]
            self._read_source(stages)
            self._stages = stages
        return self._stages

    def weights(self) -> Iterator[Tensor]:
        """What is in memory of it: nothing before the first use."""
        return (weight for stage in self._stages for weight in stage.parameters())
