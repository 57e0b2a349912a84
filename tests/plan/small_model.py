"""A model whose bytes are computed by hand."""

from ppoctl.models.rope import Rope
from ppoctl.models.shape import ModelShape

SMALL = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=100,
    max_positions=64,
    norm_eps=1e-6,
    rope=Rope(1e4),
    tied_embeddings=False,
)
