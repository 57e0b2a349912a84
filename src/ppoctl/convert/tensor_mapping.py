"""The language of the tables: one row per Hugging Face tensor.

    Row("self_attn.k_proj.weight", "self_attention.linear_qkv.weight", "keys* hidden", KEY)

reads: the tensor of that name has `keys` rows and `hidden` columns, tensor ranks split the dimension with the star,
and in Megatron it is the keys' part of that parameter. Names are of a layer; `{expert}` stands for every expert's
number. Parameters have the names of the torch layer spec (`transformer_engine` knows the other's).
"""

from enum import Enum
from typing import NamedTuple


class FusedPart(Enum):
    """The part of a fused Megatron parameter that a tensor is."""

    WHOLE = "all of it"
    QUERY = "of queries, keys and values fused by group: for each key/value head its query heads, key, value"
    KEY = "of that fused parameter: the key of each group"
    VALUE = "of that fused parameter: the value of each group"
    GATE = "of a gated MLP's first product: the first half of the rows"
    UP = "of that first product: the second half"


class TensorMapping(NamedTuple):
    """One Hugging Face tensor and its place in Megatron."""

    name: str
    parameter: str
    """Name of the Megatron parameter."""
    dims: str
    """Names of the tensor's dimensions (`tensors.sizes`), a star behind the one that tensor ranks split."""
    place: FusedPart = FusedPart.WHOLE
