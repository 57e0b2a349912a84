"""Folders from which a rank reads weights: of Hugging Face, or of `convert-ckpt --to megatron`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from ppoctl.engines.megatron.cpu_adaptation import megatron_device
from ppoctl.engines.megatron.megatron_model import PackedModel
from ppoctl.engines.megatron.parameter_shards import load_weights
from ppoctl.engines.megatron.state_reader import load_torch_dist
from ppoctl.models.convert.torch_dist import is_torch_dist
from ppoctl.models.folder import model_folder
from ppoctl.models.labels import labels_of
from ppoctl.models.shape import ModelShape
from ppoctl.models.shape_reader import read_shape


class ModelSources:
    """Folders of models and the shapes of the models. Each is read once."""

    def __init__(self, *, read_labels: bool) -> None:
        """`read_labels`: whether the head has one output per label of the folder (a reward model)."""
        self._read_labels = read_labels
        self._known: dict[str, tuple[Path, ModelShape]] = {}

    def of(self, model: str) -> tuple[Path, ModelShape]:
        """Return the folder of a model path, and the shape of its model. Raises EnvironmentProblemError if there is
        no folder, and the errors of `read_shape`."""
        if model not in self._known:
            folder = model_folder(model)
            labels = len(labels_of(folder)) if self._read_labels else 1
            self._known[model] = folder, replace(read_shape(folder), labels=labels)
        return self._known[model]

    def load(
        self, model: str, stages: Sequence[PackedModel], is_read: Callable[[Tensor], bool] = lambda _: True
    ) -> None:
        """Load the weights of a model into this rank's pipeline stages: those for whose tensors in the stages
        `is_read` returns True."""
        folder = self.of(model)[0]
        with megatron_device():
            if is_torch_dist(folder):
                load_torch_dist(stages, folder, is_read)
            else:
                load_weights(stages, folder, is_read)
