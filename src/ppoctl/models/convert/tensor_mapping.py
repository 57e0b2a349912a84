"""Row format of the family tables: one row per Hugging Face tensor.

    TensorMapping("self_attn.k_proj.weight", "self_attention.linear_qkv.weight", "keys* hidden", FusedPart.KEY)

This row means: the tensor of that name has `keys` rows and `hidden` columns, tensor ranks split the dimension with
the star, and in Megatron it is the keys' part of that parameter. Names are relative to a layer; `{expert}` stands for
the number of each expert. Parameters have the names of the torch layer spec (`transformer_engine` maps them to the
names of the other layer spec).
"""

from enum import Enum
from typing import NamedTuple


class FusedPart(Enum):
    """The part of a fused Megatron parameter that a tensor occupies."""

    WHOLE = "all of it"
    QUERY = "of queries, keys and values fused by group: for each key/value head its query heads, key, value"
    KEY = "of that fused parameter: the key of each group"
    VALUE = "of that fused parameter: the value of each group"
    GATE = "of a gated MLP's first product: the first half of the rows"
    UP = "of that first product: the second half"


class TensorMapping(NamedTuple):
    """One Hugging Face tensor, and the part of a Megatron parameter that it occupies."""

    name: str
    parameter: str
    """Name of the Megatron parameter."""
    dims: str
    """Names of the tensor's dimensions (`tensors.sizes`); a star marks the dimension that tensor ranks split."""
    place: FusedPart = FusedPart.WHOLE
