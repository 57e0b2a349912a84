"""The part of each trained role's model that trains: number of parameters, and a description."""

from collections.abc import Iterator
from dataclasses import dataclass

from ppoctl.model.head import SharedValueHead
from ppoctl.model.shape import ModelShape
from ppoctl.plan.memory.parameters import EVERYTHING, rank_parameters
from ppoctl.plan.memory.pipeline import whole_model
from ppoctl.recipe.role_model import model_of, trainable_of
from ppoctl.recipe.roles import POLICY, head_of
from ppoctl.recipe.schema import ParallelTable, Recipe


@dataclass(frozen=True)
class TrainedPart:
    """The part of a role's model that trains. Padding of the vocabulary is counted."""

    parameters: int | None
    """Parameters of the model, with a value head; None: the model is not on this machine."""
    trained_parameters: int | None
    text: str
    """What trains, and what is frozen; empty: everything trains, and the model has no value head."""


def trained_part(recipe: Recipe, role: str) -> TrainedPart:
    """Return the part of this role's model that trains."""
    shape, head, trainable = model_of(recipe, role).shape, head_of(role), trainable_of(recipe, role)
    value_head = recipe.value_head if role == POLICY else None
    text = ", ".join(_described(recipe, role, shape, value_head))
    if shape is None:
        return TrainedPart(None, None, text)
    total, trained = (
        rank_parameters(shape, head, whole_model(shape), ParallelTable(), each, value_head).total
        for each in (EVERYTHING, trainable)
    )
    return TrainedPart(total, trained, text)


def _described(
    recipe: Recipe, role: str, shape: ModelShape | None, value_head: SharedValueHead | None
) -> Iterator[str]:
    trainable, head = trainable_of(recipe, role), head_of(role)
    if trainable.top_layers is not None:
        of = "" if shape is None else f" of {shape.num_layers}"
        yield f"the last {trainable.top_layers}{of} layers"
        yield "the final norm"
        if head == "token" and shape is not None:
            yield "not the output layer, which is tied to the embedding" if shape.tied_embeddings else "the output layer"
    if trainable.freeze:
        yield f"nothing that matches {', '.join(f'`{pattern}`' for pattern in trainable.freeze)}"
    if head == "value" and not trainable.is_all:
        yield "the value head"
    if value_head is not None:
        copies = f" and copies of the last {value_head.layers_copied} layers" if value_head.layers_copied else ""
        yield f"a value head ({value_head.kind}){copies}"
