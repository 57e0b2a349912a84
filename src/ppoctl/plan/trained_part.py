"""The part of each trained role's model that trains: number of parameters, and a description."""

from collections.abc import Iterator
from dataclasses import dataclass

from ppoctl.algorithms.role_model import model_in, model_of, trainable_of
from ppoctl.algorithms.roles import POLICY, head_of
from ppoctl.core.recipe_table import ParallelTable
from ppoctl.models.convert.adapters import expert_projections
from ppoctl.models.shape import ModelShape
from ppoctl.plan.memory.parameter_memory import held_parameters, rank_parameters
from ppoctl.plan.memory.pipeline import whole_model
from ppoctl.recipe.schema import Recipe


@dataclass(frozen=True)
class TrainedPart:
    """The part of a role's model that trains. Padding of the vocabulary is counted."""

    parameters: int | None
    """Parameters of the model, with a value head and adapters; None: the model is not on this machine."""
    trained_parameters: int | None
    text: str
    """Description of what trains and what is frozen; empty: everything trains, and the model has no value head."""


def trained_part(recipe: Recipe, role: str) -> TrainedPart:
    """Return the part of this role's model that trains."""
    shape = model_of(recipe, role).shape
    parts = (_trained(recipe, role, shape), _frozen(recipe, role, shape))
    text = "; ".join(", ".join(each) for each in map(list, parts) if each)
    if shape is None:
        return TrainedPart(None, None, text)
    total, trained = (
        count(model_in(recipe, role, shape), whole_model(shape), ParallelTable()).total
        for count in (held_parameters, rank_parameters)
    )
    return TrainedPart(total, trained, text)


def _trained(recipe: Recipe, role: str, shape: ModelShape | None) -> Iterator[str]:
    trainable, value_head = trainable_of(recipe, role), recipe.value_head if role == POLICY else None
    if trainable.lora is not None:
        lora = trainable.lora
        targets = "all projections" if lora.targets is None else ", ".join(lora.targets)
        of_experts = () if shape is None else expert_projections(shape)
        without = " (not of routed experts)" if any(map(lora.is_target, of_experts)) else ""
        yield f"adapters of rank {lora.rank} on {targets}{without}"
        if head_of(role) == "value":
            yield "value head"
    top_layers = trainable.top_layers
    if top_layers is not None:
        of = "" if shape is None else f" of {shape.num_layers}"
        yield f"{top_layers}{of} layers, final norm"
        if head_of(role) == "value":
            yield "value head"
        elif shape is not None and not shape.tied_embeddings:
            yield "output layer"
    if value_head is not None:
        copied = value_head.layers_copied
        copies = f" and {copied} copied layer{'s' * (copied > 1)}" if copied else ""
        yield f"value head ({value_head.kind}){copies}"


def _frozen(recipe: Recipe, role: str, shape: ModelShape | None) -> Iterator[str]:
    trainable = trainable_of(recipe, role)
    is_tied = shape is not None and shape.tied_embeddings and head_of(role) == "token"
    if is_tied and trainable.top_layers is not None:
        yield "the tied output layer is frozen"
    if trainable.freeze:
        patterns = ", ".join(f"`{pattern}`" for pattern in trainable.freeze)
        yield f"{patterns} {'are' if len(trainable.freeze) > 1 else 'is'} frozen"
