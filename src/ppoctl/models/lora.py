"""Low-rank adapters (LoRA): which projections have one, and the names of its two matrices.

An adapter adds scale x B A to the weight of one projection of the Hugging Face model (`q_proj`, `gate_proj`), also if
Megatron fuses several projections into one parameter:

    decoder.layers.3.self_attention.linear_qkv.weight                      the frozen weight of q, k and v
    decoder.layers.3.self_attention.linear_qkv.adapters.q_proj.lora_A      [rank, inputs]
    decoder.layers.3.self_attention.linear_qkv.adapters.q_proj.lora_B      [outputs, rank]
"""

from dataclasses import dataclass

A, B = "lora_A", "lora_B"
_ADAPTERS = ".adapters."


@dataclass(frozen=True)
class Lora:
    """Adapters of a model. Source: Hu et al. 2021 (arXiv:2106.09685), section 4.1."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | None = None
    """Names of the projections that have an adapter, as in peft. None: all (peft's "all-linear")."""

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / self.rank

    def is_target(self, projection: str) -> bool:
        """Return whether a projection of this name has adapters, in every layer that has it."""
        return self.targets is None or projection in self.targets


def adapter_name(parameter: str, projection: str, matrix: str) -> str:
    """Return Megatron's name of a matrix (`A` or `B`) of the adapter of a projection, which `parameter` contains."""
    return f"{parameter.removesuffix('.weight')}{_ADAPTERS}{projection}.{matrix}"


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is a matrix of an adapter."""
    return _ADAPTERS in name


def adapted_parameter(name: str) -> str:
    """Return the name of the parameter to which the adapter matrix of this name belongs."""
    return f"{name.partition(_ADAPTERS)[0]}.weight"
