"""Views of Hugging Face tensors inside the Megatron parameters that contain them."""

from torch import Tensor

from ppoctl.models.convert.tensor_mapping import FusedPart
from ppoctl.models.shape import ModelShape


def part_of(parameter: Tensor, place: FusedPart, shape: ModelShape) -> Tensor:
    """Return a view of the elements of one Hugging Face tensor in a parameter, or in a tensor rank's slice of the
    parameter, in the order of the tensor. For fused queries, keys and values, rows become three dimensions: groups,
    heads of a group, channels."""
    if place is FusedPart.WHOLE:
        return parameter
    if place in (FusedPart.GATE, FusedPart.UP):
        half = len(parameter) // 2
        return parameter[:half] if place is FusedPart.GATE else parameter[half:]
    queries = shape.num_heads // shape.num_kv_heads
    groups = parameter.view(-1, queries + 2, shape.head_dim, *parameter.shape[1:])
    start, heads = {FusedPart.QUERY: (0, queries), FusedPart.KEY: (queries, 1), FusedPart.VALUE: (queries + 1, 1)}[
        place
    ]
    return groups[:, start : start + heads]
