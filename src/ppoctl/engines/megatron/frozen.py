"""Frozen parameters of a pipeline stage: they get no gradient, and Megatron-Core's gradient buffers and optimizer
leave them out."""

from ppoctl.engines.megatron.model import PackedModel
from ppoctl.engines.megatron.weights import names_in_whole_model
from ppoctl.model.trainable import Trainable


def trained_names(stage: PackedModel, trainable: Trainable) -> set[str]:
    """Return the names, within the stage, of the parameters that train."""
    shape, head = stage.settings.shape, stage.head
    return {name for name, whole in names_in_whole_model(stage).items() if trainable.trains(whole, shape, head)}


def freeze(stage: PackedModel, trainable: Trainable) -> None:
    """Freeze all parameters of the stage that do not train. This must precede the wrapper with gradient buffers."""
    trained = trained_names(stage, trainable)
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name in trained)
