"""The `[model]` table: the models that actor, critic and reference start from."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from ppoctl.core.recipe_table import RESULTS, Table


class CriticModelTable(Table):
    """The critic's own model, of any supported family and size, with the same token ids as the actor's model.

    Default of: NeMo-RL and verl (none: the actor's model); OpenRLHF starts the critic from the reward model.
    """

    path: Annotated[str, RESULTS]
    """Initial weights of the critic: a reward model (a folder or hub id of a ...ForSequenceClassification with one
    label), another language model (the value head starts at zero), a folder written by `convert-ckpt --to megatron`,
    or a saved critic of a run, `runs/NAME/states/critic/STEP`. The optimizer of a saved critic is not loaded."""
    dtype: Annotated[Literal["float32", "bfloat16"] | None, RESULTS] = None
    """Dtype of the critic's weights and activations; absent: `model.dtype`."""


class ReferenceModelTable(Table):
    """A reference of its own for the KL penalty: a model with the architecture and the token ids of the actor's
    model, in the dtype of the actor. Its weights never change.

    Default of: all systems (none: the initial weights of the actor); TRL has `ref_model`
    """

    path: Annotated[str, RESULTS]
    """Weights of the reference: a folder or hub id of a language model, a folder written by `convert-ckpt --to
    megatron`, or a saved actor of a run, `runs/NAME/states/actor/STEP`."""


PathOrTable = BeforeValidator(lambda value: {"path": value} if isinstance(value, str) else value)
"""Validator of a table that may be written as its path alone, as in run directories of earlier versions."""


class ModelTable(Table):
    """The base model: the initial weights of the actor, and of a critic and a reference without their own model."""

    path: Annotated[str, RESULTS]
    """Hugging Face folder (a relative path starts at the recipe file) or hub id."""
    dtype: Annotated[Literal["float32", "bfloat16"], RESULTS] = "bfloat16"
    """Dtype of weights and activations; main weights and optimizer are float32 in both cases."""
    critic: Annotated[CriticModelTable | None, PathOrTable] = None
    """The critic's own model, as a table or as its path alone; absent: the base model with a value head of zeros."""
    reference: Annotated[ReferenceModelTable | None, PathOrTable] = None
    """The reference of the KL penalty, as a table or as its path alone; absent: the base model."""
