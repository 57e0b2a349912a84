"""What a sequence costs a decoder, in numbers of its configuration. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenCost:
    """What a sequence costs a causal decoder: a part per token, and a part per pair of a token and one it sees."""

    flops_per_token: float
    flops_per_pair: float

    @staticmethod
    def of_decoder(parameters: int, num_layers: int, num_heads: int, head_dim: int) -> "TokenCost":
        """The forward pass of a decoder; a backward pass is twice that in both parts, and the split the same.

        A token meets `parameters` weights in one multiplication and one addition each (of a mixture of experts: those
        it is routed to; embeddings are looked up and do not count). A pair is one product of queries and keys and one
        of weights and values, over `num_heads * head_dim` numbers in each layer: 2 * 2 * heads * head_dim * layers
        (PaLM, arXiv:2204.02311, appendix B: 12 L H Q T per token for forward and backward, both halves of the mask).
        """
        return TokenCost(2.0 * parameters, 4.0 * num_layers * num_heads * head_dim)
