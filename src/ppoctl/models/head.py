"""The heads of a model: the output layers after the last hidden state."""

from dataclasses import dataclass
from typing import Literal

Head = Literal["token", "value"]
"""token: one logit per id of the vocabulary, as in a language model. value: one number per token, as in a critic or a
reward model."""

ValueHeadKind = Literal["linear", "mlp"]
"""linear: hidden -> 1. mlp: hidden -> 2 hidden, ReLU, -> 1."""

VALUE_HEAD_PREFIX = "value_head."
"""Beginning of Megatron's names of the parameters of a `SharedValueHead`."""


@dataclass(frozen=True)
class SharedValueHead:
    """A value head on the policy's model, in addition to the token head: one model computes log-probs and values."""

    kind: ValueHeadKind
    layers_copied: int = 0
    """Number of last layers, followed by the final norm, of which the head has copies of its own. 0: the head reads
    the hidden states that the token head reads."""
